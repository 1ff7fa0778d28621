"""Time each selector on residuals of several sizes (RedSync, Figure 3)."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from sparsync import kernels
from sparsync.algorithm import check_density
from sparsync.cli.bench.kernels import check_device
from sparsync.cli.flags import names
from sparsync.cli.launch import on_one_thread
from sparsync.cli.output import Columns, drawing, format_ms, format_ratio, progress
from sparsync.cli.values import Seed, check, check_fields, check_memory
from sparsync.errors import ConfigurationError
from sparsync.published.redsync import BinarySearch, Trimmed
from sparsync.selection import Exact, Sampled, Selector
from sparsync.sparse import SparseVector

__all__ = [
    "DEFAULT_SIZES",
    "SELECTOR_INPUTS",
    "SelectorRow",
    "SelectorSettings",
    "bench_selectors",
    "format_size",
    "parse_sizes",
    "selector_tables",
    "write_plot",
]

DEFAULT_SIZES: Final = "64KB,256KB,1MB,4MB,16MB,64MB,256MB,512MB"  # the sizes of Figure 3
SELECTOR_INPUTS: Final = ("uniform", "normal", "residual")
_UNITS = MappingProxyType({"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30})
_ITEM = 4  # bytes of a float32
# rounds of error feedback that make a residual, so that entries accumulate below the threshold
_ROUNDS = 20
# standard deviation of the gradient, relative to the distance between the k-th and 2k-th magnitude
_DRIFT = 0.25
_PERIOD = 5  # number of calls that share a threshold (RedSync, 5.2.2: "empirically set to 5")
_SETTLED = 10  # number of calls until the fused selector knows how many candidates to collect


@dataclass(frozen=True)
class SelectorSettings:
    """Settings of ``--selectors``, checked before anything starts."""

    sizes: tuple[int, ...]  # sizes of the residual in bytes; float32
    density: float = 0.001  # k / n (RedSync: 0.1 %)
    # "uniform" on [0, 1) as in the figure, "normal", or "residual": after rounds of error feedback
    input: str = "uniform"
    device: str = "cpu"
    seed: Seed = 0  # seed of the residual and of the gradients
    seconds: float = 0.3  # seconds for which a selector is repeated after its warm-up
    repeats: int = 3  # minimum number of repetitions, however long they take

    def __post_init__(self) -> None:
        check_fields(self)
        check_density(self.density)
        copies = 4 * max(self.sizes)  # the residual, the gradients and a sort's memory
        check_memory(f"selectors at {format_size(max(self.sizes))}", copies, "give smaller --sizes")
        check_device(self.device)
        check("input", self.input, self.input in SELECTOR_INPUTS, ", ".join(SELECTOR_INPUTS))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes, e.g. "64KB,512MB"; 1 KB is 1,024 bytes.

    Example:
        >>> parse_sizes("64KB, 1MB")
        (65536, 1048576)
    """
    matches = [re.fullmatch(r"(\d+)\s*([KMG]B)", part.upper()) for part in names(text)]
    sizes = tuple(int(match[1]) * _UNITS[match[2]] for match in matches if match)
    if len(sizes) < len(matches) or 0 in sizes:
        raise ConfigurationError(
            f"sizes is {text!r}; give bytes separated by commas, e.g. 64KB,1MB"
        )
    return sizes


def format_size(nbytes: int) -> str:
    """Format a size in the largest unit that divides it, so that ``parse_sizes`` can read it.

    Example:
        >>> format_size(65536), format_size(1 << 29), format_size(1536 << 10)
        ('64 KB', '512 MB', '1536 KB')
    """
    unit = max((unit for unit in _UNITS if nbytes % _UNITS[unit] == 0), key=_UNITS.__getitem__)
    return f"{nbytes // _UNITS[unit]} {unit}"


# ---- measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectorRow:
    """One selector at one size; the field names are the keys of the JSON.

    The rows that only add or read the residual have None in the fields about selected entries.
    """

    selector: str
    nbytes: int  # bytes of the residual
    speedup: float  # seconds of torch.topk at this size / seconds of the selector
    over_read: float  # seconds of the selector / seconds to read the residual once
    entries_over_k: float | None  # number of entries that the last call selected, divided by k
    recall: float | None  # fraction of the k largest entries that were selected
    correct: bool  # False if the selector promises the k largest, but did not select them
    # median time of one call in seconds; on the CPU, the processor time of its single thread
    seconds: float
    samples: int
    size: int
    k: int
    density: float
    input: str
    device: str


@dataclass
class _Line:
    """One line of the figure: a selector, or an operation to compare the selectors with."""

    name: str
    prepare: Callable[[], object]  # makes the next step's data; not timed
    run: Callable[[], Tensor]  # returns the selected values
    exact: bool | None = False  # whether it promises the k largest; None: it selects nothing
    period: int = 1  # calls in a cycle of unequal calls; a sample is their mean
    warmup: int = 1  # number of untimed calls before the first sample
    samples: list[float] = field(default_factory=list)  # seconds per call

    def sample(self, clock: Callable[[], float]) -> Tensor:
        """Time the calls of a period; return the selection of the last one."""
        seconds = 0.0
        for _ in range(self.period):
            self.prepare()
            start = clock()
            values = self.run()
            seconds += clock() - start
        self.samples.append(seconds / self.period)
        return values


def _judge(x: Tensor, k: int, values: Tensor) -> tuple[float, float]:
    """Return the number of selected values divided by k, and the share of the k largest among them."""
    largest = x[kernels.top(x, k)].abs()
    # more than k if other entries tie with the k-th largest
    reached = int((values.abs() >= largest.min()).sum())
    return values.numel() / len(largest), min(reached / len(largest), 1.0)


def bench_selectors(settings: SelectorSettings) -> list[SelectorRow]:
    """Time every selector at every size, in ascending order; torch.topk is first, a plain read last.

    Between two calls, a small gradient is added to the residual or subtracted from it, so that the
    threshold changes.  This also leaves the residual in the caches, as accumulation does in training.
    On the CPU, all selectors run on one thread, because torch.topk always does.
    """
    rows = []
    with on_one_thread(), progress() as bar:
        for nbytes in sorted(set(settings.sizes)):
            with bar(format_size(nbytes)) as advance:
                rows += _rows(settings, nbytes, advance)
    return rows


def _rows(
    settings: SelectorSettings, nbytes: int, advance: Callable[[int | None], None]
) -> list[SelectorRow]:
    """Measure one size, alternating between selectors so that other load affects all of them equally."""
    size = nbytes // _ITEM
    k = max(round(settings.density * size), 1)
    x, gradient = _data(settings, size, k)
    lines = _lines(x, gradient, k)
    clock = time.thread_time if settings.device == "cpu" else _clock_of_gpu
    judged: list[tuple[float, float] | tuple[None, None]] = [(None, None)] * len(lines)
    for line in lines:
        for _ in range(line.warmup):
            line.prepare()
            line.run()
    for _ in range(settings.repeats):
        for i, line in enumerate(lines):
            end = time.perf_counter() + settings.seconds / settings.repeats
            values = line.sample(clock)
            while time.perf_counter() < end:
                values = line.sample(clock)
            if line.exact is not None:
                judged[i] = _judge(x, k, values)
            advance(settings.repeats * len(lines))
    seconds = [statistics.median(line.samples) for line in lines]
    return [
        SelectorRow(
            selector=line.name,
            nbytes=nbytes,
            speedup=seconds[0] / mine,
            over_read=mine / seconds[-1],
            entries_over_k=entries,
            recall=recall,
            correct=not line.exact or entries == recall == 1,
            seconds=mine,
            samples=len(line.samples),
            size=size,
            k=k,
            **{name: getattr(settings, name) for name in ("density", "input", "device")},
        )
        for line, mine, (entries, recall) in zip(lines, seconds, judged, strict=True)
    ]


def _clock_of_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _data(settings: SelectorSettings, size: int, k: int) -> tuple[Tensor, Tensor]:
    """Return a residual, and a gradient that slightly changes the residual's threshold."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    draw = partial(torch.randn, size, generator=generator, device=settings.device)
    if settings.input == "uniform":
        x = torch.rand(size, generator=generator, device=settings.device)
    else:
        x = draw()
    if settings.input == "residual":
        for _ in range(_ROUNDS):
            x[kernels.top(x, k)] = 0
            x += draw()
    tail = x[kernels.top(x, 2 * k)].abs().sort(descending=True).values
    return x, draw().mul_(_DRIFT * (tail[k - 1] - tail[-1]))


def _lines(x: Tensor, gradient: Tensor, k: int) -> list[_Line]:
    """Return the lines in order; as the gradient's sign alternates, ``x`` stays near its first value."""

    def move() -> Tensor:
        return x.add_(gradient.neg_())

    def selecting(name: str, selector: Selector, period: int = 1, *, exact: bool = False) -> _Line:
        steps = count()
        return _Line(
            name, move, lambda: selector.select(x, k, next(steps)).values, exact, period, period
        )

    fused, steps, memory = Exact(), count(), torch.empty_like(gradient)

    def accumulate_and_select() -> Tensor:
        step = next(steps)
        found = kernels.accumulate_(x, memory, *fused.collect_from(k, step, x.dtype) or ())
        collected = found and SparseVector(*found, x.numel())
        return fused.select(x, k, step, collected).values

    return [
        _Line("torch.topk of |x|", move, lambda: x[x.abs().topk(k).indices], True),
        selecting("exact, no sort of n", Exact(), exact=True),
        selecting("trimmed", Trimmed(), exact=True),
        selecting("binary search", BinarySearch()),
        selecting(f"binary search, 1 of {_PERIOD}", BinarySearch(reuse_period=_PERIOD), _PERIOD),
        selecting("sampled", Sampled()),
        _Line(
            "exact + x.add_, fused",
            lambda: memory.copy_(gradient.neg_()),
            accumulate_and_select,
            True,
            warmup=_SETTLED,
        ),
        _Line("x.add_(gradient)", gradient.neg_, lambda: x.add_(gradient), None),
        _Line("one read, x.sum()", move, x.sum, None),
    ]


# ---- tables and picture ----------------------------------------------------------------------------


def selector_tables(rows: Sequence[SelectorRow]) -> Group:
    """Show each selector's time at each size, also relative to torch.topk, and its entries / k."""
    first = rows[0]

    def selected(row: SelectorRow) -> str:
        return format_ratio(row.entries_over_k) if row.correct else "WRONG"

    def ms(row: SelectorRow) -> str:
        return f"{1e3 * row.seconds:.4f}" if row.seconds < 1e-5 else format_ms(row.seconds)

    return Group(
        Text(f"{first.input} input, density {first.density:g}, {first.device}\n"),
        _table("Times faster than torch.topk", rows, lambda row: format_ratio(row.speedup)),
        Text(),
        _table("Selected entries, over k", rows, selected),
        Text(),
        _table("ms per call", rows, ms),
    )


def _table(title: str, rows: Sequence[SelectorRow], cell: Callable[[SelectorRow], str]) -> Columns:
    """Return a table with one line per selector and one column per size."""
    by_size = [list(group) for _, group in groupby(rows, key=lambda row: row.nbytes)]
    cells = [
        {"selector": line[0].selector, **{format_size(row.nbytes): cell(row) for row in line}}
        for line in zip(*by_size, strict=True)
    ]
    return Columns.of(cells, title)


def write_plot(rows: Sequence[SelectorRow], path: Path) -> None:
    """Plot milliseconds against the size, both on logarithmic scales."""
    first, last = rows[0], rows[-1]
    sizes = [row.nbytes for row in rows if row.selector == first.selector]
    title = (
        f"Selecting {100 * first.density:g} % of a residual ({first.input}, {first.device}); "
        f"next to the names: times faster than torch.topk at {format_size(last.nbytes)}"
    )
    with drawing(path, (8.4, 4.8), title) as axis:
        for name in (row.selector for row in rows if row.nbytes == first.nbytes):
            line = [row for row in rows if row.selector == name]
            label = f"{name}: {format_ratio(line[-1].speedup)}x"
            axis.loglog(sizes, [1e3 * row.seconds for row in line], "o-", markersize=3, label=label)
        axis.set_xticks(sizes, [format_size(size).replace(" ", "\n") for size in sizes])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set(xlabel="residual, float32", ylabel="ms per call")
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.figure.legend(loc="outside right center", frameon=False, fontsize=8)
