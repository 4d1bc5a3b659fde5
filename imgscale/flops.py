"""Counts the floating point operations and the memory traffic of a computation, without making it.

Networks become hollow: copies whose weights and results have shapes and no numbers (torch's meta device). What a
pipeline does around its networks (tokens, masks, times, position ids) is small, decides what they are given, and is
computed for real. So the very call that a search makes is counted, of any pipeline, in a second and without memory.

A multiplication and its addition are two operations, as in `torch.utils.flop_counter` and in most papers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook, remove_hook_from_module
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Of query (…, s, d), key (…, t, d) and value (…, t, e): two products; a key's head may serve several queries."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


# By operation, from (arguments, out_val=result) to FLOPs. torch knows none for attention on a CPU.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
}


@dataclass(frozen=True)
class Work:
    """What one call of a part of the model takes.

    Args:
        flops: Operations.
        weights: Bytes of the weights that it reads.
        activations: Bytes of everything else that its products, convolutions and attentions read and write. What lies
            between these (norms, activations, sums) is taken to be fused into them.
        parameters: How many weights its networks have.
    """

    flops: int = 0
    weights: int = 0
    activations: int = 0
    parameters: int = 0

    def eflops(self, ridge: float, rows: int = 1) -> int:
        """Effective FLOPs of one call with so many rows: operations, and the traffic's worth of them.

        Args:
            ridge: FLOPs that the hardware does in the time in which it moves a byte.
            rows: They share the weights.
        """
        return round(rows * self.flops + ridge * (self.weights + rows * self.activations))

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Counter(TorchDispatchMode):
    """Counts what is computed within its context, on hollow networks or real ones.

    A hollow attention is counted as the fused kernels compute it, which never write its scores to memory.

    Where a hollow network meets real tensors, the result is hollow. What depends on numbers that don't exist is taken
    for granted: equal, 1, kept by a mask.

    Args:
        modules: Whose weights are read.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        weights = {id(p): p for module in modules for p in module.parameters()}.values()
        self._weights = {_storage(p) for p in weights}
        self.parameters = sum(p.numel() for p in weights)
        self.flops = self.weights = self.activations = 0

    def __enter__(self) -> Counter:
        self._attentions = _Attentions(self)
        self._attentions.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._attentions.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    @property
    def work(self) -> Work:
        return Work(self.flops, self.weights, self.activations, self.parameters)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((*args, *kwargs.values()))
        if any(tensor.is_meta for tensor in tensors):
            if func is aten._local_scalar_dense.default:
                return 1
            if func is aten.equal.default:
                return True
            if func.overloadpacket is aten.index:
                args = (args[0], [place for index in args[1] for place in _places(index)])
            if not all(tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(Tensor, _hollow_tensor, (args, kwargs))
            if "device" in kwargs:  # what is hollow can't be moved to where numbers are
                kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.take(int(formula(*args, **kwargs, out_val=out)), _tensors((*args, *kwargs.values(), out)))
        return out

    def take(self, flops: int, tensors: Iterable[Tensor]) -> None:
        """Counts an operation that reads and writes these tensors."""
        self.flops += flops
        for tensor in tensors:
            expanded = tensor.numel() * tensor.element_size()  # a weight for each row of a batch is still one weight
            size = min(expanded, tensor.untyped_storage().nbytes())
            if _storage(tensor) in self._weights:
                self.weights += size
            else:
                self.activations += size


class _Attentions(TorchFunctionMode):
    """Answers hollow attentions: torch would take them apart, with all scores written out."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            found = _BOUND.bind(*args, **kwargs).arguments
            query, key, value = found["query"], found["key"], found["value"]
            if query.is_meta or key.is_meta:
                out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device="meta")
                self._counter.take(_attention(query, key, value), (query, key, value, out))
                return out
        return func(*args, **kwargs)


_BOUND = inspect.signature(lambda query, key, value, *more, **settings: None)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those among the arguments of an operation, or in its lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _storage(tensor: Tensor) -> int:
    """Views share it; meta tensors have no address to be known by."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _hollow_tensor(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _places(index: Tensor | None) -> list[Tensor | None]:
    """What a mask of k axes picks, as indices of these axes: as many as it says; all, if it is hollow itself."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    kept = index.numel() if index.is_meta else int(index.count_nonzero())
    return [torch.empty(kept, dtype=torch.int64, device="meta")] * index.ndim


def hollow(part: Any) -> Any:
    """A copy of a network, or of an object that holds some, with shapes for weights. No weight is copied.

    Hooks that move weights about (offloading) are left out.
    """
    memo: dict[int, Any] = {}
    for module in networks(part):
        for inner in module.modules():
            if (hook := getattr(inner, "_hf_hook", None)) is not None:
                memo[id(hook)] = ModelHook()  # it may hold the weights, too
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(part, memo)
    for module in networks(copied):
        remove_hook_from_module(module, recurse=True).to("meta")
    return copied


def networks(part: Any) -> list[nn.Module]:
    """The networks that an object is or holds, in its attributes and theirs."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif value is part or type(value).__module__.split(".")[0] == "imgscale":
            for item in getattr(value, "__dict__", {}).values():
                walk(item)

    walk(part)
    return list(found.values())
