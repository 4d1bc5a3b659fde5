"""What learned verifiers share: where their network runs, how its files are found, and what records say of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imgscale.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFE = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
)  # what is fetched; pickled weights only for want of these
PICKLED = ("*.bin", "*.pt", "*.pth")  # loaded with weights_only=True


class Network:
    """A verifier's network, where it should run.

    Args:
        module: The network with its weights, on the CPU.
        files: The weights files that it was loaded from.
        source: What records call it: a hub id, a folder or "model/pretrained".
        revision: The commit of the hub, where it came from one.
        device: Where it runs; where the images are, if None.
        dtype: "float32", "bfloat16" or "float16". Heads and similarities are always computed in float32.
        offload: Leave the device after every call, for the sake of its memory. Not while gradients are taken.

    Raises:
        UserError: There is no such device or dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        files: Sequence[Path],
        source: str,
        *,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        offload: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise UserError(f"A verifier's dtype can't be {dtype!r}; choose one of {', '.join(DTYPES)}.")
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise UserError(f"A verifier's device can't be {device!r}; give one such as 'cpu' or 'cuda:0'.") from error
        self.module: Any = module.eval().requires_grad_(False)
        self.files, self.source, self.revision = tuple(files), source, revision
        self.dtype, self.offload = DTYPES[dtype], offload
        self._place: torch.device | None = None
        self._sha256: str | None = None

    @contextmanager
    def on(self, near: torch.device | None = None) -> Iterator[torch.device]:
        """The network is on its device within this context.

        Args:
            near: Where the images are: its device if it has none of its own. None stands for where it was last.
        """
        device = self._device or near or self._place or torch.device("cpu")
        if device != self._place:
            self._move(device)
        try:
            yield device
        finally:
            # A graph holds on to the weights that it was made with.
            if self.offload and device.type != "cpu" and not torch.is_grad_enabled():
                self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        with plain_tensors():
            self.module.to(device, self.dtype)
        self._place = device

    def identity(self) -> dict[str, Any]:
        """Source, revision, SHA-256 of the weights files and dtype."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            for path in self.files:
                with path.open("rb") as file:
                    one = hashlib.file_digest(file, "sha256")
                if len(self.files) == 1:
                    digest = one
                else:
                    digest.update(one.digest())
            self._sha256 = digest.hexdigest()
        about = {"source": self.source, "sha256": self._sha256, "dtype": str(self.dtype).removeprefix("torch.")}
        return about if self.revision is None else {**about, "revision": self.revision}


def check(name: str, images: Tensor, prompts: Sequence[str]) -> None:
    """Refuses what no verifier can score.

    Raises:
        UserError: The images aren't (n, 3, h, w), or there isn't a prompt for each.
    """
    if isinstance(prompts, str):  # which is a sequence, too, of letters
        raise UserError(f"The verifier {name} takes a list of prompts, one for each image; this is {prompts[:60]!r}.")
    if images.ndim != 4 or images.shape[1] != 3 or len(prompts) != len(images):
        raise UserError(
            f"The verifier {name} scores images of shape (n, 3, h, w), each for its own prompt; these are"
            f" {tuple(images.shape)} and {len(prompts)} prompts."
        )


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors that are kept must not be inference tensors, which autograd refuses later."""
    with torch.inference_mode(False):
        yield


def fetch(what: str, source: str, revision: str | None = None) -> tuple[Path, list[Path], str | None]:
    """The folder of a checkpoint, its weights files, and its revision on the hub: nothing is loaded.

    Args:
        what: What it should be, for messages: "PickScore model".
        source: A folder, or a hub id "owner/name", of which only safetensors, if it has any, and texts are fetched.
        revision: A branch, tag or commit of the hub.

    Raises:
        UserError: There is nothing of that name, or it has no weights; the message says what to do.
    """
    folder = Path(source).expanduser()
    found = None
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"The folder {source!r} has no revisions; leave out revision={revision!r}.")
    else:
        if source.count("/") != 1 or source.startswith((".", "/", "~")):
            raise UserError(f"There is no {what} {source!r}; give a folder, or a hub id like owner/name.")
        folder = _snapshot(what, source, revision, SAFE)
        if not weights_in(folder):
            folder = _snapshot(what, source, revision, (*SAFE, *PICKLED))
        found = folder.name
    files = weights_in(folder)
    if not files:
        raise UserError(f"The {what} {source!r} holds no weights; put model.safetensors there or give another.")
    return folder, files, found


def weights_in(folder: Path) -> list[Path]:
    """Its weights files, in order: all safetensors, or else all torch files."""
    return sorted(folder.glob("*.safetensors")) or sorted(f for kind in PICKLED for f in folder.glob(kind))


def _snapshot(what: str, source: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise UserError(why_not(what, source, error)) from error


def why_not(what: str, source: str, error: BaseException) -> str:
    """One sentence on why a checkpoint can't be loaded, and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    lower = reason.lower()
    if "gated" in lower or "401 client" in lower or "403 client" in lower:
        return f"The {what} {source!r} is gated: accept its licence on the hub and log in with 'hf auth login'."
    if isinstance(error, MemoryError) or "out of memory" in lower:
        return f"There isn't enough memory to load the {what} {source!r}; choose a smaller one or another dtype."
    if isinstance(error, ImportError):
        return f"The {what} {source!r} needs a package that is missing: {reason[:300]}"
    return f"The {what} {source!r} can't be loaded ({reason[:300]}); check its name, its files and the network."


def fetch_file(what: str, source: str, revision: str | None = None) -> tuple[Path, str | None]:
    """One weights file, and its revision on the hub: nothing is loaded.

    Args:
        what: What it should be, for messages: "HPS model".
        source: A file; a folder that holds a single weights file; or "owner/name/file" of the hub.
        revision: A branch, tag or commit of the hub.

    Raises:
        UserError: There is no such file, or it can't be fetched; the message says what to do.
    """
    from huggingface_hub import hf_hub_download

    path = Path(source).expanduser()
    if path.exists() and revision is not None:
        raise UserError(f"The {what} {source!r} is on this machine and has no revisions; leave out {revision!r}.")
    if path.is_file():
        return path, None
    if path.is_dir():
        files = weights_in(path)
        if len(files) != 1:
            held = ", ".join(f.name for f in files) or "none"
            raise UserError(
                f"The folder {source!r} should hold one weights file of the {what} ({held}); give the file."
            )
        return files[0], None
    owner, _, rest = source.partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file) or source.startswith((".", "~")):
        raise UserError(f"There is no {what} {source!r}; give a file, a folder, or owner/name/file of the hub.")
    try:
        found = Path(hf_hub_download(f"{owner}/{name}", file, revision=revision))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise UserError(why_not(what, source, error)) from error
    return found, found.parents[file.count("/")].name


def read_state(what: str, source: str, file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU; those of its "state_dict" where it has one.

    Raises:
        UserError: It can't be read as tensors; pickled code isn't run.
    """
    try:
        with plain_tensors():
            if file.suffix == ".safetensors":
                return load_file(file)
            state = torch.load(file, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state)
            return {k: v for k, v in state.items() if isinstance(v, Tensor)}
    except Exception as error:  # safetensors, pickle, zip files and the disk each raise their own
        raise UserError(why_not(what, source, error)) from error
