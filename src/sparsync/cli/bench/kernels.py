"""Compare each kernel with the same computation in torch operations, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.cli.output import Columns, format_ms, format_ratio
from sparsync.errors import ConfigurationError
from sparsync.kernels import native, normal_levels, packing
from sparsync.kernels import reference as specification

__all__ = [
    "Comparison",
    "KernelRow",
    "bench_kernels",
    "check_device",
    "comparisons",
    "kernel_table",
]

_KEYS = 512  # number of keys to count, as many as a fine histogram has bins
_BLOCK = 128  # elements per block of the int8 codec
_LEVEL_BLOCK, _LARGEST = 512, 2.0**120  # block size of levels in ``attach``; largest scale


@dataclass(frozen=True)
class KernelRow:
    """One kernel; the fields are the keys of the JSON."""

    kernel: str
    speedup: float  # seconds_torch / seconds
    over_add: float  # seconds / seconds of ``residual.add_(gradient)`` on the whole vector
    # computed for n float32 elements, even if the kernel reads only some of them
    gigabytes_per_second: float
    seconds: float  # best of the repetitions, including the wait for the device
    seconds_torch: float  # the same time for the torch operations that specify the kernel
    equal: bool  # whether the results are bit-identical
    backend: str  # "triton", the instruction set of the C++ kernels, or "torch" without either
    device: str
    threads: int  # threads that torch (and C++) may use
    size: int
    density: float

    @property
    def correct(self) -> bool:
        """Whether the results are the same."""
        return self.equal


def check_device(device: str) -> None:
    """Refuse a device that does not exist."""
    there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device not in there:
        raise ConfigurationError(f"--device is {device!r}; here it can be: {', '.join(there)}")


def bench_kernels(
    device: str = "cpu",
    size: int = 14_728_266,
    density: float = 0.01,
    *,
    streams: int = 8,
    repetitions: int = 10,
    seed: int = 0,
) -> list[KernelRow]:
    """Time every kernel and the equivalent torch operations alternately, and compare their results.

    Args:
        device: "cpu" or "cuda".
        size: number of elements n; by default, VGG-16's number of parameters.
        density: k / n; twice as many elements are candidates.
        streams: number of ranks P whose entries are merged, in a region of n / P elements.
        repetitions: number of timed calls; only the fastest counts; an additional, untimed call before
            them warms up and compiles.
        seed: seed of the vectors.

    Raises:
        ConfigurationError: the device does not exist.
    """
    check_device(device)
    generator = torch.Generator().manual_seed(seed)
    residual, gradient = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    backend = kernels.backend_of(residual).__name__.rpartition(".")[2]
    backend = {"native": native.chosen(), "reference": "torch"}.get(backend, backend)
    seconds_add, _ = _best(torch.Tensor.add_, lambda: (residual.clone(), gradient), repetitions)
    rows = []
    for name, make, fast, plain, in_place in comparisons(residual, gradient, density, streams):
        seconds, result = _best(fast, make, repetitions, in_place)
        seconds_torch, expected = _best(plain, make, repetitions, in_place)
        rows.append(
            KernelRow(
                kernel=name,
                speedup=seconds_torch / seconds,
                over_add=seconds / seconds_add,
                gigabytes_per_second=4e-9 * size / seconds,
                seconds=seconds,
                seconds_torch=seconds_torch,
                equal=_same(result, expected),
                backend=backend,
                device=device,
                threads=torch.get_num_threads(),
                size=size,
                density=density,
            )
        )
    return rows


def kernel_table(rows: Sequence[KernelRow]) -> Columns:
    """Return a table of the rows; its first columns are the ratios."""
    first = rows[0]
    title = (
        f"{first.backend} on {first.device}, {first.threads} threads: "
        f"n = {first.size:,}, density {first.density:g}"
    )
    cells = [
        {
            "kernel": row.kernel,
            "times faster than torch": format_ratio(row.speedup),
            "over add_": format_ratio(row.over_add),
            "ms": format_ms(row.seconds),
            "torch ms": format_ms(row.seconds_torch),
            "equal": "yes" if row.equal else "NO",
        }
        for row in rows
    ]
    return Columns.of(cells, title)


# ---- clock and comparison -------------------------------------------------------------------------


def _best(
    function: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    repetitions: int,
    in_place: bool = False,
) -> tuple[float, Any]:
    """Return a call's fastest time and last result; ``in_place`` adds the arguments to the result."""
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
    """Return whether nested results are equal, float32 values bit for bit."""
    if isinstance(mine, Tensor):
        if mine.dtype == torch.float32:
            mine, expected = mine.view(torch.int32), expected.view(torch.int32)
        return torch.equal(mine, expected)
    if isinstance(mine, tuple | list):
        return len(mine) == len(expected) and all(map(_same, mine, expected))
    return bool(mine == expected)


# ---- comparisons -----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """A function whose speed is compared between the device's kernels and torch operations."""

    name: str
    # makes fresh arguments, which either function may overwrite
    make: Callable[[], tuple[Any, ...]]
    fast: Callable[..., Any]
    plain: Callable[..., Any]
    in_place: bool = False  # the changed arguments are part of the result


def comparisons(
    residual: Tensor, gradient: Tensor, density: float, streams: int
) -> list[Comparison]:
    """Return all comparisons on `[n]` float32 vectors, which stay unchanged; see ``bench_kernels``."""
    spec, size = specification, residual.numel()
    k = max(round(density * size), 1)
    accumulated = residual + gradient
    keys = kernels.magnitude_keys(accumulated).sort(descending=True).values
    few, many = int(keys[k - 1]), int(keys[min(2 * k, keys.numel()) - 1])
    candidates = accumulated[kernels.magnitude_keys(accumulated) >= max(many, 1)]
    ends = few, int(keys[0])
    ladder = torch.linspace(*ends, _KEYS, dtype=torch.float64, device=keys.device).long()
    limit, region = 4 * k, max(size // streams, 1)
    supports = [_support(region, density, i, residual) for i in range(streams)]
    parts = [(at, residual[at]) for at in supports]
    own, other = (_support(size, density, streams + i, residual) for i in range(2))

    def select(a: Tensor, b: Tensor) -> Tensor:
        found = kernels.accumulate_(a, b, many, limit)
        assert found is not None
        return found[0][kernels.top(found[1], k)]

    def select_plainly(a: Tensor, b: Tensor) -> Tensor:
        return spec.top(a.add_(b), k)

    def both(*more: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (residual.clone(), gradient.clone(), *more)

    def dense() -> tuple[Tensor, Tensor, Tensor]:
        return residual.clone(), own, residual[own]

    def kernel(
        name: str, title: str, make: Callable[[], tuple[Any, ...]], **more: Any
    ) -> Comparison:
        return Comparison(title, make, getattr(kernels, name), getattr(spec, name), **more)

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
        *_packings(residual, density),
        *_levels(residual),
    ]


def _support(size: int, density: float, seed: int, like: Tensor) -> Tensor:
    """Draw ascending indices at random, about ``density`` times ``size`` of them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size, generator=generator) < density).nonzero().flatten().to(like.device)


def _packings(x: Tensor, density: float) -> list[Comparison]:
    """Return the comparisons for packing and unpacking whole messages, without their headers."""
    size, indices, made = x.numel(), _support(x.numel(), density, 0, x), []
    for form, name in ((packing.BF16, "bf16"), (packing.INT8, "int8")):
        entries = indices, x[indices], size, form, _BLOCK
        message = _pack(*entries)[0], indices.numel(), size, form, _BLOCK
        made += [
            Comparison(
                f"pack k, {name}", partial(tuple, entries), partial(packing.pack, b""), _pack
            ),
            Comparison(f"unpack k, {name}", partial(tuple, message), packing.unpack, _unpack),
        ]
    return made


def _levels(x: Tensor) -> list[Comparison]:
    """Return the comparisons for levels: encoding a vector, and adding a message."""
    made = []
    for bits in (1, 2, 4):
        given = x, bits, _LEVEL_BLOCK, _LARGEST
        message = normal_levels.quantise(*given), bits, _LEVEL_BLOCK

        def sums(message: tuple[Tensor, int, int] = message) -> tuple[Any, ...]:
            return torch.zeros_like(x), *message

        encode, add = (
            (normal_levels.quantise, normal_levels.quantise_plainly),
            (normal_levels.decode_, normal_levels.decode_plainly_),
        )
        made += [
            Comparison(f"encode n, {bits} bits", partial(tuple, given), *encode),
            Comparison(f"add n, {bits} bits", sums, *add, in_place=True),
        ]
    return made


def _pack(indices: Tensor, values: Tensor, size: int, form: int, block: int) -> Any:
    raw = packing.pack_values(values, form, block)
    rounded = packing.unpack_values(raw, len(values), form, block)
    return torch.cat([raw, packing.pack_indices(indices, size)]), rounded


def _unpack(body: Tensor, nnz: int, size: int, form: int, block: int) -> Any:
    middle = packing.value_bytes(nnz, form, block)
    values = packing.unpack_values(body[:middle], nnz, form, block)
    return packing.unpack_indices(body[middle:], nnz, size), values
