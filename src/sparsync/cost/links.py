"""Time messages over a group's links in the way collectives use them: all at once, in both directions.

In a round, every rank r sends to rank r + ``shift`` and receives from rank r - ``shift``.  Rounds with
the same shift follow each other without a barrier, like the phases of a collective.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Raw

__all__ = [
    "Clock",
    "Interval",
    "Link",
    "Measured",
    "Probe",
    "fit_line",
    "fit_pace",
    "fit_with_intervals",
    "measure_links",
]

_PHASE = "calibrate"
_CONTROL = Raw("control")
_SHORTEST = 1e-12  # seconds, added to every time because a ratio to zero is undefined
_SMALLEST, _FACTOR = 256, 4  # bytes of the first messages; ratio of consecutive sizes
# A visit to a size sends messages of this size.  Per shift, it makes one uncounted round and then this
# many counted ones.
_ROUNDS = 4
_PINGS = 8  # round trips by which a rank's clock is compared
_SHARE = 0.25  # fraction of the remaining time that the first visit to a size may take
_CONFIDENCE, _RESAMPLES = 0.95, 200  # for intervals: 5 of 200 resamples lie beyond each end

Interval = tuple[float, float]
"""The lowest and the highest value that are compatible with the measurement."""

Measured = tuple[float, Interval]
"""A number, and its 95 % interval."""


# ---- fits: pure functions of floats, so ranks with the same input get the same result ---------------


def fit_line(seconds_of: Mapping[int, float]) -> tuple[float, float]:
    """Fit ``seconds = alpha + beta nbytes`` through the largest size; neither number is negative.

    The line passes exactly through the largest size, because this size determines beta best; the small
    sizes determine alpha.  Deviations are ratios, because times span orders of magnitude.  They are not
    squared, so that an outlier due to a buffer or a protocol has little influence.  Unless alpha or beta
    is zero, the line also passes through a second point.

    Args:
        seconds_of: times by message size in bytes; at least two sizes.

    Example:
        >>> alpha, beta = fit_line({100: 2e-6, 1_000: 11e-6, 10_000: 5e-6, 100_000: 1001e-6})
        >>> round(alpha * 1e6, 6), round(beta * 1e6, 6)
        (1.0, 0.01)
    """
    *others, (large, most) = sorted(seconds_of.items())
    slopes = [(most - t) / (large - size) for size, t in others]
    betas = [0.0, most / large, *(slope for slope in slopes if 0 <= slope * large <= most)]

    def deviation(beta: float) -> float:
        ratios = [(t + _SHORTEST) / (most - beta * (large - n) + _SHORTEST) for n, t in others]
        return sum(abs(math.log(ratio)) for ratio in ratios)

    beta = min(betas, key=deviation)
    return max(most - beta * large, 0.0), beta


def fit_with_intervals(samples: Mapping[int, Sequence[float]]) -> dict[str, Measured]:
    """Fit a line to the median time of every size, with intervals from the bootstrap.

    Args:
        samples: independent times in seconds, by size in bytes; at least two sizes, none empty.
    """
    draw = random.Random(0)
    lines = [
        fit_line({n: median(draw.choices(times, k=len(times))) for n, times in samples.items()})
        for _ in range(_RESAMPLES)
    ]
    best = fit_line({size: median(times) for size, times in samples.items()})
    alphas, betas = zip(*lines, strict=True)
    return {"alpha": (best[0], _middle(alphas)), "beta": (best[1], _middle(betas))}


def fit_pace(batches: Sequence[tuple[float, float]]) -> Measured:
    """Return the seconds per unit over all batches, with an interval from the bootstrap.

    The result is the total number of seconds divided by the total number of units.  A median would be
    wrong: if processes share cores, most calls run undisturbed, but a few long waits make them slow.

    Args:
        batches: the seconds and the units of work of every batch.
    """

    def pace(drawn: Sequence[tuple[float, float]]) -> float:
        return sum(seconds for seconds, _ in drawn) / sum(units for _, units in drawn)

    draw = random.Random(0)
    paces = [pace(draw.choices(batches, k=len(batches))) for _ in range(_RESAMPLES)]
    return pace(batches), _middle(paces)


def _middle(numbers: Sequence[float]) -> Interval:
    """Return the ends of the middle 95 % of the numbers."""
    ordered = sorted(numbers)
    beyond = math.floor(len(ordered) * (1 - _CONFIDENCE) / 2)
    return ordered[beyond], ordered[-1 - beyond]


# ---- links ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The offset of a rank's clock from rank 0's, in seconds, accurate to half the fastest round trip."""

    ahead: float = 0.0
    uncertainty: float = 0.0


@dataclass(frozen=True)
class Link:
    """One direction between two ranks; its alpha is only as accurate as their clocks' offsets."""

    source: int
    dest: int
    alpha: float
    beta: float


@dataclass(frozen=True)
class Probe:
    """Limits of the measurement; the last two fields concern the ranks' work, the others the links."""

    # bytes of the largest message; on a 10 Gbit/s link, it takes 70 times as long as a latency of 50 us
    largest: int = 1 << 22
    # largest number of visits per size; sizes alternate, so that a busy moment affects all of them
    visits: int = 8
    # largest number of shifts; if there are no more than this, every link is measured
    shifts: int = 8
    budget: float = 0.6  # fraction of the calibration's time that is spent on the links
    # elements of the ranks' vectors: 16 MB, more than most second-level caches
    elements: int = 1 << 22
    # largest number of calls in a batch of work, which also ends when its time is up
    calls: int = 1000


async def measure_links(
    comm: Communicator, seconds: float, probe: Probe
) -> tuple[dict[str, Measured], tuple[Link, ...], tuple[Clock, ...], tuple[int, ...]]:
    """Fit latency and bandwidth of a group of two or more ranks; all ranks call this together.

    Sizes grow as long as they fit into the fraction ``probe.budget`` of the time, and in any case until
    the bandwidth shows in the times.  After that, the sizes are repeated in turn.

    Returns:
        "alpha" and "beta" of all links together; each single link; each rank's clock; the sizes.
    """
    survey, size = _Survey(comm, probe.budget * seconds, probe.shifts), _SMALLEST
    await survey.visit(size, 1)  # the first round opens connections
    clocks = await survey.compare_clocks()
    cost = survey.cost(size)
    first, bytes_show = survey.pace(size), False
    survey.times.clear()
    # a line needs two sizes, and one transfer must take as long as the latency, even if time runs out
    while size <= probe.largest and (not bytes_show or cost <= survey.left * _SHARE):
        await survey.visit(size, _ROUNDS)
        bytes_show = len(survey.times) > 1 and survey.pace(size) >= 2 * first
        cost = _FACTOR * survey.cost(size)
        size *= _FACTOR
    for _ in range(probe.visits - 1):
        for size in survey.times:
            if survey.costs[size] <= survey.left:
                await survey.visit(size, _ROUNDS)
    paces = {size: torch.cat([_paces(v) for v in t]) for size, t in survey.times.items()}
    line = fit_with_intervals({size: pace.tolist() for size, pace in paces.items()})
    return line, survey.each_link(clocks), clocks, tuple(survey.times)


class _Survey:
    """One rank's part in measuring the links; all ranks make the same decisions."""

    def __init__(self, comm: Communicator, seconds: float, most_shifts: int) -> None:
        self.comm, self.seconds = comm, seconds
        count = min(most_shifts, comm.world_size - 1)
        # spread the shifts evenly, and include 1
        self.shifts = [1 + i * (comm.world_size - 1) // count for i in range(count)]
        self.started, self.spent = comm.now, 0.0  # seconds spent by the slowest rank
        self.costs: dict[int, float] = {}  # seconds of the last visit to each size
        # for each size and visit, `[P, shifts, rounds, 3]`: starts, arrivals, ends
        self.times: dict[int, list[Tensor]] = {}

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def pace(self, size: int) -> float:
        """Return the seconds for a round of this size if only the links cause delays."""
        return float(_paces(self.times[size][-1]).quantile(0.25))

    def cost(self, size: int) -> float:
        """Return the expected seconds for a visit to a size, judging from the last visit."""
        return len(self.shifts) * (_ROUNDS + 1) * self.pace(size)

    async def visit(self, size: int, rounds: int) -> None:
        """Send messages of a size in one uncounted and ``rounds`` counted rounds at every shift."""
        comm = self.comm
        # random bytes, because zeros would make a compressing tunnel look fast
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cpu")
        mine = []
        for shift in self.shifts:
            dest = (comm.rank + shift) % comm.world_size
            source = (comm.rank - shift) % comm.world_size
            for _ in range(rounds + 1):
                start = comm.now
                receiving = comm.irecv(source, size, _PHASE, _CONTROL)
                sending = comm.isend(payload, dest, _PHASE, _CONTROL)
                await receiving
                arrived = comm.now
                await sending
                mine += [start, arrived, comm.now]
        mine.append(comm.now - self.started)
        everyone = torch.stack(await comm.allgather(_numbers(mine), _PHASE))
        spent = float(everyone[:, -1].max())
        self.costs[size], self.spent = spent - self.spent, spent
        shape = comm.world_size, len(self.shifts), rounds + 1, 3
        self.times.setdefault(size, []).append(everyone[:, :-1].reshape(shape))

    async def compare_clocks(self) -> tuple[Clock, ...]:
        """Compare every clock with rank 0's like NTP, by the fastest of several round trips."""
        comm = self.comm
        fit = int(_SHARE * self.seconds / (2 * self.pace(_SMALLEST) * comm.world_size + 1e-9))
        best = Clock(uncertainty=math.inf) if comm.rank else Clock()
        for rank in range(1, comm.world_size):
            for _ in range(max(1, min(_PINGS, fit))):
                if comm.rank == rank:
                    start = comm.now
                    receiving = comm.irecv(0, 8, _PHASE, _CONTROL)
                    await comm.isend(_bytes(start), 0, _PHASE, _CONTROL)
                    theirs = float((await receiving).clone().view(torch.float64))
                    end = comm.now
                    if (end - start) / 2 < best.uncertainty:
                        best = Clock((start + end) / 2 - theirs, (end - start) / 2)
                elif comm.rank == 0:
                    await comm.irecv(rank, 8, _PHASE, _CONTROL)
                    await comm.isend(_bytes(comm.now), rank, _PHASE, _CONTROL)
        gathered = await comm.allgather(_numbers([best.ahead, best.uncertainty]), _PHASE)
        return tuple(Clock(*pair.tolist()) for pair in gathered)

    def each_link(self, clocks: Sequence[Clock]) -> tuple[Link, ...]:
        """Fit every link separately; a time runs from when both ranks are ready until the arrival."""
        ahead = _numbers([clock.ahead for clock in clocks]).view(-1, 1, 1, 1)
        # convert all times to rank 0's clock
        common = {size: torch.cat(visits, dim=2) - ahead for size, visits in self.times.items()}
        links = []
        for dest in range(len(clocks)):
            for i, shift in enumerate(self.shifts):
                source = (dest - shift) % len(clocks)
                one_way = {}
                for size, t in common.items():
                    begun = torch.maximum(t[source, i, :, 0], t[dest, i, :, 0])
                    one_way[size] = max(float((t[dest, i, :, 1] - begun).quantile(0.5)), 0.0)
                links.append(Link(source, dest, *fit_line(one_way)))
        return tuple(sorted(links, key=lambda link: (link.source, link.dest)))


def _bytes(number: float) -> Tensor:
    return _numbers([number]).view(torch.uint8)


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _paces(times: Tensor) -> Tensor:
    """Return the median over ranks of the times from round end to round end: `[shifts * rounds]`."""
    return times[..., 2].diff(dim=2).quantile(0.5, dim=0).flatten()
