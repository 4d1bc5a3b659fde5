"""What every test runs under: no network, one thread, no display, and seeds that no other test can change."""

import os

# Before torch and the hub client are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: a second thread mostly spins
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
import signal
import zlib

import numpy as np
import pytest
import torch

from tests.commands import command

__all__ = ["command"]  # fixtures for all files

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored, as do its children
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds every global generator from the test's own name, so that neither order nor selection matters."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where torch finds no accelerator."""
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch finds no accelerator"))
