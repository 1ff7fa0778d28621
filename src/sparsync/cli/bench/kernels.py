"""The kernels' worth: each one against the same in torch's operations, on one device."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.cli.output import Columns, format_ms, format_ratio
from sparsync.errors import ConfigurationError
from sparsync.kernels import native, packing
from sparsync.kernels import reference as specification

__all__ = [
    "Backend",
    "Comparison",
    "KernelRow",
    "Messages",
    "backend_of",
    "bench_kernels",
    "comparisons",
    "kernel_table",
]

_KEYS = 512  # that values are counted from, as many as a fine histogram has bins


@dataclass(frozen=True)
class KernelRow:
    """One kernel; the fields are the keys of the JSON.

    Attributes:
        kernel: its name.
        speedup: seconds_torch / seconds.
        over_add: seconds over those of ``residual.add_(gradient)`` on the whole vector.
        seconds: best of the repetitions, the wait for the device included.
        seconds_torch: the same of the specification, in torch's operations.
        equal: the results are the same, bit for bit.
        backend: "triton", the instruction set of the C++ kernels, or "torch" where neither is there.
        device: as given.
        threads: that torch (and C++) may use.
    """

    kernel: str
    speedup: float
    over_add: float
    seconds: float
    seconds_torch: float
    equal: bool
    backend: str
    device: str
    threads: int
    size: int
    density: float

    @property
    def correct(self) -> bool:
        """The results are the same."""
        return self.equal


def bench_kernels(
    device: str = "cpu",
    size: int = 14_728_266,
    density: float = 0.01,
    *,
    streams: int = 8,
    repetitions: int = 10,
    seed: int = 0,
) -> list[KernelRow]:
    """Time every kernel against torch's operations, in turns, and compare what they return.

    Args:
        device: "cpu" or "cuda".
        size: number of elements n; the default is VGG-16's.
        density: k / n; twice k are candidates.
        streams: ranks P whose entries are merged, in a region of n / P.
        repetitions: the fastest counts; one more before them warms up (and compiles).
        seed: of the vectors.

    Raises:
        ConfigurationError: the device is not there.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        there = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ConfigurationError(f"--device is {device!r}; here it can be: {there}")
    backend = backend_of(device)
    generator = torch.Generator().manual_seed(seed)
    residual, gradient = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    seconds_add, _ = _best(torch.Tensor.add_, lambda: (residual.clone(), gradient), repetitions)
    rows = []
    for case in comparisons(backend, residual, gradient, density, streams):
        seconds, result = _best(case.fast, case.make, repetitions, case.in_place)
        seconds_torch, expected = _best(case.plain, case.make, repetitions, case.in_place)
        rows.append(
            KernelRow(
                kernel=case.name,
                speedup=seconds_torch / seconds,
                over_add=seconds / seconds_add,
                seconds=seconds,
                seconds_torch=seconds_torch,
                equal=_same(result, expected),
                backend=backend.name,
                device=device,
                threads=torch.get_num_threads(),
                size=size,
                density=density,
            )
        )
    return rows


def kernel_table(rows: Sequence[KernelRow]) -> Columns:
    """Show the rows, ratios first."""
    first = rows[0]
    title = (
        f"{first.backend} on {first.device}, {first.threads} threads: "
        f"n = {first.size:,}, density {first.density:g}"
    )
    heads = ["kernel", "times faster than torch", "over add_", "ms", "torch ms", "equal"]
    cells = [
        [
            row.kernel,
            format_ratio(row.speedup),
            format_ratio(row.over_add),
            format_ms(row.seconds),
            format_ms(row.seconds_torch),
            "yes" if row.equal else "NO",
        ]
        for row in rows
    ]
    return Columns(heads, cells, title)


# ---- clock and comparison -------------------------------------------------------------------------


def _best(
    function: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    repetitions: int,
    in_place: bool = False,
) -> tuple[float, Any]:
    """Return the fastest time of a call, and the last call's result (and arguments)."""
    best, outcome = float("inf"), None
    for repetition in range(repetitions + 1):
        arguments = make()
        _finish()
        start = time.perf_counter()
        result = function(*arguments)
        _finish()
        if repetition:
            best = min(best, time.perf_counter() - start)
        outcome = (arguments, result) if in_place else result
    return best, outcome


def _finish() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _same(mine: Any, expected: Any) -> bool:
    """Whether nested results are equal, float32 in every bit."""
    if isinstance(mine, Tensor):
        if mine.dtype == torch.float32:
            mine, expected = mine.view(torch.int32), expected.view(torch.int32)
        return torch.equal(mine, expected)
    if isinstance(mine, tuple | list):
        return len(mine) == len(expected) and all(map(_same, mine, expected))
    return bool(mine == expected)


# ---- comparisons -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
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
    """The kernels that serve float32 on a device: name, kernels, packing."""

    name: str
    kernels: Any
    messages: Messages


def backend_of(device: str) -> Backend:
    """Return the backend of "cpu" or "cuda"; torch's operations where no other is installed."""
    if device == "cpu":
        return Backend(native.chosen(), kernels, _Native(packing))
    triton = importlib.import_module("sparsync.kernels.triton")  # slow: only where it is used
    if triton.installed():
        return Backend("triton", triton, Messages(triton))
    return Backend("torch", specification, Messages(packing))


def comparisons(
    backend: Backend, residual: Tensor, gradient: Tensor, density: float, streams: int
) -> list[Comparison]:
    """Return all comparisons, on vectors of n elements, which are not modified.

    Args:
        backend: compared with torch's operations.
        residual: `[n]` float32.
        gradient: `[n]` float32.
        density: k / n; twice k are candidates.
        streams: ranks P whose entries are merged, in a region of n / P.
    """
    fast, spec, size = backend.kernels, specification, residual.numel()
    k = max(round(density * size), 1)
    accumulated = residual + gradient
    keys = spec.magnitude_keys(accumulated).sort(descending=True).values
    few, many = int(keys[k - 1]), int(keys[min(2 * k, keys.numel()) - 1])
    candidates = accumulated[spec.magnitude_keys(accumulated) >= max(many, 1)]
    ends = few, int(keys[0])
    ladder = torch.linspace(*ends, _KEYS, dtype=torch.float64, device=keys.device).long()
    limit, region = 4 * k, max(size // streams, 1)
    parts = [
        (at, residual[at])
        for at in (_support(region, density, i, residual) for i in range(streams))
    ]
    own, other = (_support(size, density, streams + i, residual) for i in range(2))

    def select(a: Tensor, b: Tensor) -> Tensor:
        found = fast.accumulate_(a, b, many, limit)
        chosen: Tensor = found[0][fast.top(found[1], k)]
        return chosen

    def select_plainly(a: Tensor, b: Tensor) -> Tensor:
        return spec.top(a.add_(b), k)

    def both(*more: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (residual.clone(), gradient.clone(), *more)

    def dense() -> tuple[Tensor, Tensor, Tensor]:
        return residual.clone(), own, residual[own]

    def kernel(
        name: str, title: str, make: Callable[[], tuple[Any, ...]], **more: Any
    ) -> Comparison:
        return Comparison(title, make, getattr(fast, name), getattr(spec, name), **more)

    merged = f"merge {streams} streams, n / {streams}"
    return [
        Comparison("accumulate_ + exact top k (torch: add_, topk)", both(), select, select_plainly),
        kernel("accumulate_", "accumulate_", both(), in_place=True),
        kernel("accumulate_", "accumulate_ + k found", both(few, limit), in_place=True),
        kernel("accumulate_", "accumulate_ + 2k found", both(many, limit), in_place=True),
        kernel("find", "find k of n", lambda: (accumulated, few, None)),
        kernel("top", "top k of 2k", lambda: (candidates, k)),
        kernel("top", "top k of n", lambda: (accumulated, k)),
        kernel("count_from", f"count_from {_KEYS} keys, 2k", lambda: (candidates, ladder)),
        kernel("merge", merged, lambda: (parts, region)),
        kernel("restrict", "restrict k to k", lambda: (own, other)),
        kernel("subtract_", "subtract_ k", dense),
        kernel("scatter_", "scatter_ k", dense),
        *_packings(backend.messages, residual, density),
    ]


def _support(size: int, density: float, seed: int, like: Tensor) -> Tensor:
    """Draw ascending indices."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size, generator=generator) < density).nonzero().flatten().to(like.device)


def _packings(fast: Messages, x: Tensor, density: float) -> list[Comparison]:
    size, plain = x.numel(), Messages(packing)
    indices = _support(size, density, 0, x)
    made = []
    for form, name in ((packing.BF16, "bf16"), (packing.INT8, "int8")):
        entries: tuple[Any, ...] = indices, x[indices], size, form
        message = plain.pack(*entries)[0], indices.numel(), size, form
        made += [
            Comparison(f"pack k, {name}", partial(tuple, entries), fast.pack, plain.pack),
            Comparison(f"unpack k, {name}", partial(tuple, message), fast.unpack, plain.unpack),
        ]
    return made
