"""What selecting k of n costs, selector by selector, over sizes of the residual (RedSync, Figure 3)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.bench.progress import progress
from sparsync.bench.selectors_settings import SelectorSettings, format_size
from sparsync.selection.base import Selector
from sparsync.selection.binary_search import BinarySearch
from sparsync.selection.exact import Exact
from sparsync.selection.sampled import Sampled
from sparsync.selection.trimmed import Trimmed

__all__ = ["SelectorRow", "bench_selectors"]

_ITEM = 4  # bytes of a float32
_ROUNDS = 20  # of error feedback that make a residual: it piles up below the threshold
_DRIFT = 0.25  # standard deviation of the gradient, over the distance from k-th to 2k-th magnitude
_PERIOD = 5  # calls that share a threshold (RedSync, 5.2.2: "empirically set to 5")
_SETTLED = 10  # calls until the fused selector knows how many candidates to collect


@dataclass(frozen=True)
class SelectorRow:
    """One selector at one size; the fields are the keys of the JSON.  None: selects nothing.

    Attributes:
        selector: what was run.
        nbytes: of the residual.
        speedup: seconds of torch.topk at this size over these.
        over_read: seconds over those of one read of the residual.
        entries_over_k: selected by the last call, over k.
        recall: part of the k largest that it selected.
        correct: where exactly the k largest are promised, they came.
        seconds: of one call, median of the samples; where the calls of a period differ, the mean of
            their medians.  On the CPU of its one thread's own time: waiting for a core does not
            count.
        samples: how many were taken.
    """

    selector: str
    nbytes: int
    speedup: float
    over_read: float
    entries_over_k: float | None
    recall: float | None
    correct: bool
    seconds: float
    samples: int
    size: int
    k: int
    density: float
    input: str
    device: str


@dataclass(frozen=True)
class _Case:
    """One line of the figure.

    Attributes:
        prepare: makes the next step's data; not timed.
        run: returns the values that it selected.
        period: calls per sample.
        warmup: calls before, not timed.
        exact: promises the k largest.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], Tensor | None]
    period: int = 1
    warmup: int = 1
    exact: bool = False


@dataclass
class _Measured:
    """What was measured of a case: the seconds of each call of each sample; what the last selected."""

    case: _Case
    samples: list[list[float]] = field(default_factory=list)
    entries_over_k: float | None = None
    recall: float | None = None

    @property
    def seconds(self) -> float:
        """The mean over the calls of a period, each the median over the samples."""
        return statistics.fmean(statistics.median(call) for call in zip(*self.samples, strict=True))

    def sample(self, clock: Callable[[], float]) -> Tensor | None:
        """Time the calls of a period; return what the last one selected."""
        seconds, values = [], None
        for _ in range(self.case.period):
            self.case.prepare()
            start = clock()
            values = self.case.run()
            seconds.append(clock() - start)
        self.samples.append(seconds)
        return values

    def judge(self, x: Tensor, k: int, values: Tensor | None) -> None:
        """Note how many values were selected, and which part of the k largest is among them."""
        if values is not None:
            largest = x[kernels.top(x, k)].abs()
            reached = int((values.abs() >= largest.min()).sum())  # more than k if the k-th has ties
            self.entries_over_k = values.numel() / largest.numel()
            self.recall = min(reached / largest.numel(), 1.0)


def bench_selectors(settings: SelectorSettings) -> list[SelectorRow]:
    """Time every selector at every size, smallest first; in each, torch.topk is first, one read last.

    Between two calls a small gradient is added to the residual, or subtracted, so that thresholds
    move; it is then as warm in the caches as after an accumulation.  On the CPU all run on one thread,
    as torch.topk does anyway.
    """
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with progress(shown=True) as bar:
            for nbytes in sorted(set(settings.sizes)):
                with bar(format_size(nbytes)) as advance:
                    rows += _rows(settings, nbytes, advance)
    finally:
        torch.set_num_threads(threads)
    return rows


def _rows(
    settings: SelectorSettings, nbytes: int, advance: Callable[[int | None], None]
) -> list[SelectorRow]:
    """Measure one size."""
    size = nbytes // _ITEM
    k = max(round(settings.density * size), 1)
    x, gradient = _data(settings, size, k)
    measured = _measure(_cases(x, gradient, k), x, k, settings, advance)
    base, read = measured[0].seconds, measured[-1].seconds
    return [
        SelectorRow(
            selector=m.case.name,
            nbytes=nbytes,
            speedup=base / m.seconds,
            over_read=m.seconds / read,
            entries_over_k=m.entries_over_k,
            recall=m.recall,
            correct=not m.case.exact or (m.entries_over_k == m.recall == 1),
            seconds=m.seconds,
            samples=len(m.samples),
            size=size,
            k=k,
            density=settings.density,
            input=settings.input,
            device=settings.device,
        )
        for m in measured
    ]


# ---- data -----------------------------------------------------------------------------------------


def _data(settings: SelectorSettings, size: int, k: int) -> tuple[Tensor, Tensor]:
    """Return a residual, and a gradient that moves its threshold a little."""
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


# ---- lines ----------------------------------------------------------------------------------------


def _cases(x: Tensor, gradient: Tensor, k: int) -> list[_Case]:
    """Return the rows, in their order; all of them keep ``x`` near what it is."""

    def move() -> None:
        x.add_(gradient.neg_())

    def topk() -> Tensor:
        return x[x.abs().topk(k).indices]

    def selecting(name: str, selector: Selector, period: int = 1, *, exact: bool = False) -> _Case:
        steps = count()

        def run() -> Tensor:
            return selector.select(x, k, next(steps)).values

        return _Case(name, move, run, period, warmup=period, exact=exact)

    def read() -> None:
        x.sum()

    def add() -> None:
        x.add_(gradient)

    return [
        _Case("torch.topk of |x|", move, topk, exact=True),
        selecting("exact, no sort of n", Exact(), exact=True),
        selecting("trimmed", Trimmed(), exact=True),
        selecting("binary search", BinarySearch()),
        selecting(f"binary search, 1 of {_PERIOD}", BinarySearch(reuse_period=_PERIOD), _PERIOD),
        selecting("sampled", Sampled()),
        _fused(x, gradient, k),
        _Case("x.add_(gradient)", gradient.neg_, add),
        _Case("one read, x.sum()", move, read),
    ]


def _fused(x: Tensor, gradient: Tensor, k: int) -> _Case:
    """Exact selection among what the accumulation found: the time of both."""
    selector, steps, memory = Exact(), count(), torch.empty_like(gradient)

    def renew() -> None:
        memory.copy_(gradient.neg_())

    def accumulate_and_select() -> Tensor:
        step = next(steps)
        watch = selector.watch(k, step, x.dtype)
        found = kernels.accumulate_(x, memory, *watch) if watch else kernels.accumulate_(x, memory)
        return selector.select(x, k, step, found).values

    return _Case("exact + x.add_, fused", renew, accumulate_and_select, warmup=_SETTLED, exact=True)


# ---- clock ----------------------------------------------------------------------------------------


def _measure(
    cases: list[_Case],
    x: Tensor,
    k: int,
    settings: SelectorSettings,
    advance: Callable[[int | None], None],
) -> list[_Measured]:
    """Measure all cases in turns: what else runs on the machine hits all of them alike."""
    clock = time.thread_time if settings.device == "cpu" else _clock_of_gpu
    measured = [_Measured(case) for case in cases]
    for case in cases:
        for _ in range(case.warmup):
            case.prepare()
            case.run()
    for _ in range(settings.repeats):
        for m in measured:
            end = time.perf_counter() + settings.seconds / settings.repeats
            values = m.sample(clock)
            while time.perf_counter() < end:
                values = m.sample(clock)
            m.judge(x, k, values)
            advance(settings.repeats * len(cases))
    return measured


def _clock_of_gpu() -> float:
    """Return the time at which the GPU has done what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()
