"""What ``bench.kernels`` compares: calls of a backend beside the same in torch's operations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.kernels import native, packing
from sparsync.kernels import torch as specification

__all__ = ["Backend", "Case", "Messages", "backend_of", "cases"]

_KEYS = 512  # that values are counted from, as many as a fine histogram has bins


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        make: fresh arguments, which either function may overwrite.
        fast: the backend's function.
        plain: the same in torch's operations.
        in_place: what they leave in their arguments belongs to the result.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    fast: Callable[..., Any]
    plain: Callable[..., Any]
    in_place: bool = False


@dataclass(frozen=True)
class Messages:
    """Packs and unpacks the body of whole messages with the loops of a module."""

    loops: Any
    block: int = 128  # of int8, as the codec has it

    def pack(self, indices: Tensor, values: Tensor, size: int, form: int) -> Any:
        """Return a payload without header, and the values that it says."""
        raw = self.loops.pack_values(values, form, self.block)
        rounded = self.loops.unpack_values(raw, values.numel(), form, self.block)
        return torch.cat([raw, self.loops.pack_indices(indices, size)]), rounded

    def unpack(self, body: Tensor, nnz: int, size: int, form: int) -> Any:
        """Return indices and values."""
        middle = packing.value_bytes(nnz, form, self.block)
        values = self.loops.unpack_values(body[:middle], nnz, form, self.block)
        return self.loops.unpack_indices(body[middle:], nnz, size), values


class _Native(Messages):
    """The same in one call, as C++ does it."""

    def pack(self, indices: Tensor, values: Tensor, size: int, form: int) -> Any:
        return self.loops.pack(b"", indices, values, size, form, self.block)

    def unpack(self, body: Tensor, nnz: int, size: int, form: int) -> Any:
        return self.loops.unpack(body, nnz, size, form, self.block)


@final
@dataclass(frozen=True)
class Backend:
    """What serves float32 on a device: its name, its kernels, its packing."""

    name: str
    kernels: Any
    messages: Messages


def backend_of(device: str) -> Backend:
    """Return the backend of "cpu" or "cuda"; torch's operations where no other is installed."""
    if device == "cpu":
        return Backend(native.chosen(), kernels, _Native(packing))
    triton = importlib.import_module(
        "sparsync.kernels.triton"
    )  # takes a while: only where it is used
    if triton.installed():
        loops = importlib.import_module("sparsync.kernels.triton.packing")
        return Backend("triton", triton, Messages(loops))
    return Backend("torch", specification, Messages(packing))


def cases(
    backend: Backend, residual: Tensor, gradient: Tensor, density: float, streams: int
) -> list[Case]:
    """Return all comparisons, on vectors of n elements, which are not modified.

    Args:
        backend: what is compared with torch's operations.
        residual: `[n]` float32.
        gradient: `[n]` float32.
        density: k / n; twice k are candidates.
        streams: ranks P whose entries are merged, in a region of n / P.
    """
    return [
        *_selection_cases(backend.kernels, residual, gradient, density),
        *_sum_cases(backend.kernels, residual, density, streams),
        *_packing_cases(backend.messages, residual, density),
    ]


def _selection_cases(fast: Any, residual: Tensor, gradient: Tensor, density: float) -> list[Case]:
    """Make the cases of one step's selection; the magnitudes of a normal distribution."""
    k = max(round(density * residual.numel()), 1)
    accumulated = residual + gradient
    keys = specification.magnitude_keys(accumulated).sort(descending=True).values
    few, many = int(keys[k - 1]), int(keys[min(2 * k, keys.numel()) - 1])
    candidates = accumulated[specification.magnitude_keys(accumulated) >= max(many, 1)]
    ladder = torch.linspace(
        few, int(keys[0]), _KEYS, dtype=torch.float64, device=keys.device
    ).long()
    limit = 4 * k

    def select(a: Tensor, b: Tensor) -> Tensor:
        found = fast.accumulate_(a, b, many, limit)
        chosen: Tensor = found.indices[fast.top(found.values, k)]
        return chosen

    def select_plainly(a: Tensor, b: Tensor) -> Tensor:
        return specification.top(a.add_(b), k)

    def both() -> tuple[Tensor, Tensor]:
        return residual.clone(), gradient.clone()

    def watch(key: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (*both(), key, limit)

    spec = specification
    return [
        Case("accumulate_ + exact top k (torch: add_, topk)", both, select, select_plainly),
        Case("accumulate_", both, fast.accumulate_, spec.accumulate_, in_place=True),
        Case(
            "accumulate_ + k found", watch(few), fast.accumulate_, spec.accumulate_, in_place=True
        ),
        Case(
            "accumulate_ + 2k found", watch(many), fast.accumulate_, spec.accumulate_, in_place=True
        ),
        Case("find k of n", lambda: (accumulated, few, None), fast.find, spec.find),
        Case("top k of 2k", lambda: (candidates, k), fast.top, spec.top),
        Case("top k of n", lambda: (accumulated, k), fast.top, spec.top),
        Case(
            f"count_from {_KEYS} keys, 2k",
            lambda: (candidates, ladder),
            fast.count_from,
            spec.count_from,
        ),
    ]


def _support(size: int, density: float, seed: int, like: Tensor) -> Tensor:
    """Draw ascending indices."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size, generator=generator) < density).nonzero().flatten().to(like.device)


def _sum_cases(fast: Any, x: Tensor, density: float, streams: int) -> list[Case]:
    size = x.numel()
    region = max(size // streams, 1)
    supports = [_support(region, density, seed, x) for seed in range(streams)]
    parts = [(indices, x[indices]) for indices in supports]
    own, other = _support(size, density, streams, x), _support(size, density, streams + 1, x)
    spec = specification

    def dense() -> tuple[Tensor, Tensor, Tensor]:
        return x.clone(), own, x[own]

    return [
        Case(
            f"merge {streams} streams, n / {streams}",
            lambda: (parts, region),
            fast.merge,
            spec.merge,
        ),
        Case("restrict k to k", lambda: (own, other), fast.restrict, spec.restrict),
        Case("subtract_ k", dense, fast.subtract_, spec.subtract_),
        Case("scatter_ k", dense, fast.scatter_, spec.scatter_),
    ]


def _packing_cases(fast: Messages, x: Tensor, density: float) -> list[Case]:
    size, plain = x.numel(), Messages(packing)
    indices = _support(size, density, 0, x)
    made = []
    for form, name in ((packing.BF16, "bf16"), (packing.INT8, "int8")):
        entries = (indices, x[indices], size, form)
        message = (plain.pack(*entries)[0], indices.numel(), size, form)
        made += [
            Case(f"pack k, {name}", _given(entries), fast.pack, plain.pack),
            Case(f"unpack k, {name}", _given(message), fast.unpack, plain.unpack),
        ]
    return made


def _given(arguments: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: arguments
