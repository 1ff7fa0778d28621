"""What the kernels are worth: each one against torch's own operations, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from sparsync.bench.kernel_cases import backend_of, cases
from sparsync.bench.report import format_ratio
from sparsync.errors import ConfigurationError

__all__ = ["KernelRow", "bench_kernels", "table"]

_MS = 1e3


@dataclass(frozen=True)
class KernelRow:
    """One kernel; the fields are the keys of the JSON.

    Attributes:
        kernel: what was run.
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
    for case in cases(backend, residual, gradient, density, streams):
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


def table(rows: Sequence[KernelRow]) -> Table:
    """Show the rows, ratios first."""
    first = rows[0]
    title = (
        f"{first.backend} on {first.device}, {first.threads} threads: "
        f"n = {first.size:,}, density {first.density:g}"
    )
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    shown.add_column("\nkernel", overflow="fold", max_width=36)
    for heading in ("times faster\nthan torch", "over\nadd_", "\nms", "torch\nms", "\nequal"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.kernel,
            format_ratio(row.speedup),
            format_ratio(row.over_add),
            f"{_MS * row.seconds:.3g}",
            f"{_MS * row.seconds_torch:.3g}",
            "yes" if row.equal else "NO",
        )
    return shown


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
