"""How fast the hardware computes and how fast it moves bytes: from a table of known GPUs, or measured by a probe.

The ridge is the number of FLOPs that it does in the time in which it moves one byte (the roofline's corner, Williams et
al. 2009): what turns memory traffic into FLOPs.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from imgscale import files
from imgscale.errors import UserError
from imgscale.models import place

# Dense bfloat16 FLOP/s over the memory's bytes/s, by the makers' data sheets (SXM). The first that fits a name counts.
RIDGES = {"H200": 206.0, "H100": 295.0, "A100": 153.0}
TRIALS, PATIENCE = 6, 0.25  # of each probe, and the seconds after which no further trial is made


@dataclass(frozen=True)
class Hardware:
    """What computes.

    Args:
        name: Of the device.
        ridge: FLOPs in the time of moving one byte.
        source: "table" or "measured".
        speed: FLOP/s that were measured here, or None.
    """

    name: str
    ridge: float
    source: str
    speed: float | None = None

    def seconds(self, eflops: float) -> float | None:
        """How long so many eFLOPs take at full speed: a lower bound; None where no speed was measured."""
        return None if self.speed is None else eflops / self.speed


def default_dtype(device: str | torch.device | None) -> torch.dtype:
    """What models are loaded in: float32 on a CPU and bfloat16 elsewhere."""
    planned = isinstance(device, str) and device.upper() in RIDGES
    return torch.bfloat16 if planned or place(device).type != "cpu" else torch.float32


def of(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Hardware:
    """The hardware of a device.

    Args:
        device: One that torch can use here, or the name of a GPU in `RIDGES` that needn't be here; the accelerator, if
            there is one, for None.
        dtype: What it computes in; what models are loaded in for None.

    Raises:
        UserError: It is neither.
    """
    if isinstance(device, str) and device.upper() in RIDGES:
        return Hardware(device.upper(), RIDGES[device.upper()], "table")
    try:
        where = place(device)
    except UserError as error:
        raise UserError(f"{error} A GPU to plan for is one of {', '.join(sorted(RIDGES))}.") from error
    name = _name(where)
    flops, moved = _measured(name, where, dtype or default_dtype(where))
    for known, ridge in RIDGES.items():
        if where.type == "cuda" and known in name:
            return Hardware(name, ridge, "table", flops)
    return Hardware(name, flops / moved, "measured", flops)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    return f"{processor}, {torch.get_num_threads()} threads" if device.type == "cpu" else f"{processor} ({device.type})"


def _measured(name: str, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s and bytes/s: what was measured here before, or else the probe's."""
    key = f"{name}, {str(dtype).removeprefix('torch.')}"
    kept = _read()
    if key not in kept:
        kept[key] = asdict(probe(device, dtype))
        try:
            _file().parent.mkdir(parents=True, exist_ok=True)
            files.write(_file(), json.dumps(kept, indent=1).encode())
        except OSError:
            pass  # it is measured anew next time
    return kept[key]["flops"], kept[key]["bytes"]


@dataclass(frozen=True)
class Rates:
    """FLOP/s of large matrix products, and bytes/s of copies, read and written bytes taken together."""

    flops: float
    bytes: float


def probe(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures a device, in about half a second."""
    large = device.type != "cpu"
    n, size = (8192, 1 << 30) if large else (1024, 1 << 27)
    a = torch.full((n, n), 0.5, device=device, dtype=dtype)
    source = torch.zeros(size, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return Rates(
        flops=2 * n**3 / _best(device, lambda: a @ a),
        bytes=2 * size / _best(device, lambda: target.copy_(source)),
    )


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest trial: others on the machine only ever make it slower."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) <= TRIALS and (len(times) < 2 or time.perf_counter() - began < PATIENCE):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first warms up


def _read() -> dict[str, dict[str, float]]:
    """What was measured on this machine; nothing where the file isn't what `_measured` writes."""
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
        return {
            str(name): {kind: float(rates[kind]) for kind in ("flops", "bytes")}
            for name, rates in kept.items()
            if min(rates["flops"], rates["bytes"]) > 0
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imgscale" / "hardware.json"
