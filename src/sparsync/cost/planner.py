"""Predict each collective's time for a step, the fastest collective, and where dense wins.

    seconds   = selection + exchange - hidden
    selection = n select + (entries of the total) decode
    exchange  = messages alpha + bytes beta + (bytes of dense sums) gamma
                + (entries encoded) encode + (entries decoded and merged) decode + turns turn

All terms refer to the busiest rank, as counted by ``Collective.cost``.  An entry takes the same time in
every sparse format.  Messages are sequential, as in the papers; links on which they overlap are faster.
If the computing time is given, part of the exchange is hidden behind the backward pass, which takes two
thirds of that time.  An exchange in m parts (DDP's buckets of 25 MiB, or the units of ``attach``)
overlaps the backward pass except for its last part.  If the whole model is a single unit, nothing is
hidden.

The planner is pure arithmetic: it maps a ``Machine`` and sizes to a ``Plan``, the same on every rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import (
    WORD_BYTES,
    Cost,
    Job,
    Result,
    lemma_5_1_words,
    lower_bound_words,
    sum_bound_words,
)
from sparsync.collectives.dense import Dense
from sparsync.cost.machine import Machine
from sparsync.cost.wording import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)
from sparsync.errors import ConfigurationError, require
from sparsync.selection import Everything

__all__ = [
    "BACKWARD",
    "BUCKET_BYTES",
    "DEFAULT_DENSITY",
    "EXCHANGE_PASSES",
    "STEP_PASSES",
    "Plan",
    "Prediction",
    "bound_words",
    "entries_at",
    "plan",
    "predict",
    "ranking",
    "seconds_of_updates",
]

# the algorithm with which all candidates are compared, even if it is not one of them
_DENSE = Algorithm("dense", Everything, Dense, source="Ok-Topk, Table 1, Dense")
DEFAULT_DENSITY = 0.01
BUCKET_BYTES = 25 * 2**20  # bytes of gradients per dense exchange, as in PyTorch's DDP
# fraction of the computation: the backward pass has two matrix products per layer, the forward pass one
BACKWARD = 2 / 3
# The overhead of updates besides their exchange: per local step (for the optimizer) and per exchange (for
# the shared weights).  The unit is a pass over the model that takes as long as a dense addition.  The
# numbers were set by hand to match a GPT with 8.4 M parameters in the lab (benchmarks/time_to_loss.md).
STEP_PASSES, EXCHANGE_PASSES = 8, 8
_NEARLY = 0.9  # fraction of the largest k within a budget; see ``plan``
_SLOWEST, _FASTEST = 1.0, 1e18  # bytes per second between which break-even is searched
# this search tries 4 points per decade, and then halves the interval 40 times
_PER_DECADE, _HALVINGS = 4, 40


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step with one collective."""

    collective: str  # name of the preset
    seconds_selection: float  # seconds to accumulate and select, and to apply the total
    seconds_exchange: float  # seconds from the selected entries to their sum
    bytes_sent: float  # largest number of bytes that a rank sends or receives
    messages: float  # number of messages that a rank sends in sequence
    equation: str  # paper and number, or "sparsync"
    # lower bound for the same result in words of 4 bytes: two words per entry, or one per dense value
    lower_bound_words: float
    seconds_hidden: float = 0.0  # part of the exchange that overlaps the backward pass

    @property
    def seconds(self) -> float:
        """The seconds for which the step waits: selection, and the part of the exchange not hidden."""
        return self.seconds_selection + self.seconds_exchange - self.seconds_hidden


def predict(
    algorithm: Algorithm, *, size: int, k: int, world_size: int, machine: Machine
) -> Prediction:
    """Predict the cost of one step.

    Raises:
        ConfigurationError: the algorithm's cost is unknown, or a number is out of range.
    """
    for name, value, least in (("size", size, 0), ("k", k, 0), ("world_size", world_size, 1)):
        require(value >= least, f"predict: {name} is {value}; give at least {least}")
    job, result = Job(size, min(k, size), world_size), algorithm.result
    alone = world_size == 1 or size == 0
    cost = Cost(0, 0) if alone else algorithm.cost(job)
    applied = 0.0 if alone else min(job.k, job.summed) if result == "top-k" else job.summed
    selection = 0.0 if result == "whole" else size * machine.select + applied * machine.decode
    return Prediction(
        collective=algorithm.name,
        seconds_selection=selection,
        seconds_exchange=cost.seconds(machine.alpha, machine.beta, machine.distance)
        + cost.dense_bytes * machine.gamma
        + cost.encoded * machine.encode
        + cost.decoded * machine.decode
        + cost.turns * machine.turn,
        bytes_sent=cost.nbytes,
        messages=cost.messages,
        equation=algorithm.source,
        lower_bound_words=0.0 if alone else bound_words(result, job),
    )


def seconds_of_updates(
    algorithm: Algorithm, period: int, *, size: int, world_size: int, machine: Machine
) -> float:
    """Predict the seconds per local step if all updates are exchanged every ``period`` steps.

    Raises:
        ConfigurationError: as for ``predict``.

    Example:
        >>> from sparsync.presets import resolve
        >>> gigabit = Machine(alpha=50e-6, beta=8e-9)
        >>> on = {"size": 10**7, "world_size": 4, "machine": gigabit}
        >>> one_bit = resolve("quantised", bits=1, block=512)
        >>> round(seconds_of_updates(one_bit, 2, **on), 3), round(predict(_DENSE, k=0, **on).seconds, 3)
        (0.096, 0.485)
    """
    made = predict(algorithm, size=size, k=size, world_size=world_size, machine=machine)
    whole = WORD_BYTES * size * machine.gamma
    return STEP_PASSES * whole + (made.seconds + EXCHANGE_PASSES * whole) / period


def entries_at(density: float, size: int) -> int:
    """Return k for a density: at least 1 unless there are no elements, like ``Unit.entries``."""
    return min(size, max(1, round(density * size)))


def bound_words(result: Result, job: Job) -> float:
    """Return the lower bound, in words, for any algorithm with this kind of total.

    The bound is Ok-Topk's Theorem 3.1 for a top-k, SparCML's Lemmas 5.1 and 5.2 for a sum, and
    Lemma 5.1 for whole vectors.
    """
    if result == "top-k":
        return lower_bound_words(job.k, job.world_size)
    if result == "sum":
        return sum_bound_words(job)
    return lemma_5_1_words(job.size, job.world_size, disjoint=False)


# ---- plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The fastest collective, and the reason for this choice."""

    choice: str
    why: str  # one sentence
    # bytes per second below which a sparse candidate always beats dense; 0 if there is no such
    # bandwidth, None if a sparse candidate wins at every bandwidth
    break_even_bandwidth: float | None
    break_even_density: float | None  # k / n below which sparse always wins; None: up to density 1
    k: int  # entries per rank
    dense: Prediction  # shown for comparison even if dense is not a candidate
    table: tuple[Prediction, ...]  # all candidates, fastest first


def plan(
    size: int,
    world_size: int,
    machine: Machine,
    candidates: Sequence[Algorithm],
    *,
    density: float | None = None,
    k: int | None = None,
    budget_bytes: float | None = None,
    compute: float | None = None,
    unit_bytes: int | None = None,
) -> Plan:
    """Choose the collective with the shortest predicted time for k entries.

    Args:
        size: number of elements n.
        world_size: number of ranks P.
        machine: times of the links and cores.
        candidates: algorithms; if times are equal, the first one wins.
        density: k / n; default 0.01 if neither k nor a budget is given.
        k: entries per rank, instead of a density.
        budget_bytes: the largest number of bytes that a rank may send or receive per step; collectives
            that need more are excluded.  If neither density nor k is given, k is derived from the budget.
            Every candidate that selects entries can send a certain number of them within the budget.  k
            is the smallest of these numbers, leaving out numbers below 90 % of the largest.
        compute: seconds that a forward and backward pass takes; with None, there is no overlap.
        unit_bytes: bytes of gradients per exchange, except for dense; with None, all are exchanged
            together.

    Raises:
        ConfigurationError: a number or name is invalid, or no collective fits the budget.

    Example:
        >>> from sparsync.collectives import Budgeted
        >>> gigabit = Machine(alpha=50e-6, beta=8e-9)
        >>> from sparsync.presets import resolve
        >>> candidates = [resolve("dense"), resolve("budgeted")]
        >>> made = plan(14_728_266, 8, gigabit, candidates, density=0.01)
        >>> made.choice, made.table[0].seconds < made.dense.seconds / 20
        ('budgeted', True)
        >>> fast = Machine(alpha=1e-6, beta=1e-11)
        >>> plan(1_000_000, 2, fast, candidates).why.split(" against")[0]
        'dense wins here: 362 µs'
    """
    for name, value, good, expected in (
        ("size", size, size >= 0, "the number of elements, at least 0"),
        ("world_size", world_size, world_size >= 1, "at least 1 rank"),
        ("density", density, density is None or 0 < density <= 1, "k / n, in (0, 1], e.g. 0.01"),
        ("k", k, k is None or k >= 0, "at least 0 entries"),
        ("budget_bytes", budget_bytes, budget_bytes is None or budget_bytes > 0, "more than 0"),
        ("compute", compute, compute is None or 0 <= compute < math.inf, "seconds >= 0"),
    ):
        require(good, f"plan: {name} is {value}; give {expected}")
    require(density is None or k is None, "plan: density and k were both given; give one of them")
    require(bool(candidates), "plan: no candidates; give algorithms to choose from")

    def predicted(algorithm: Algorithm, entries: int, on: Machine = machine) -> Prediction:
        made = predict(algorithm, size=size, k=entries, world_size=world_size, machine=on)
        part = BUCKET_BYTES if algorithm.name == "dense" else unit_bytes
        parts = 1 if part is None else max(math.ceil(WORD_BYTES * size / part), 1)
        early = made.seconds_exchange * (1 - 1 / parts)
        return replace(made, seconds_hidden=min(early, BACKWARD * (compute or 0.0)))

    def most_entries(algorithm: Algorithm, budget: float) -> int:
        fitting = bisect_right(
            range(1, size + 1), budget, key=lambda entries: predicted(algorithm, entries).bytes_sent
        )
        return max(fitting, min(1, size))

    if k is None and density is None and budget_bytes is not None:
        # take the minimum over the candidates that can send nearly as many entries as the best one, so
        # that all of them can be compared
        counts = [most_entries(c, budget_bytes) for c in candidates if c.result != "whole"]
        most_of_all = max(counts, default=size)
        k = min((count for count in counts if count >= _NEARLY * most_of_all), default=most_of_all)
    elif k is None:
        k = entries_at(DEFAULT_DENSITY if density is None else density, size)
    k = entries = min(k, size)
    table = _ranked([predicted(candidate, k) for candidate in candidates], k, budget_bytes)
    dense = predicted(_DENSE, k)
    competing = {p.collective for p in table}
    sparse = [c for c in candidates if c.name in competing and c.result != "whole"]

    def sparse_wins(entries: int, on: Machine) -> bool:
        limit = predicted(_DENSE, entries, on).seconds
        return any(predicted(candidate, entries, on).seconds < limit for candidate in sparse)

    bandwidth: float | None = 0.0
    most: float | None = 0.0
    if world_size > 1 and size:  # otherwise nothing is exchanged on any network
        bandwidth = _break_even(
            lambda rate: sparse_wins(entries, replace(machine, beta=1 / rate)), _SLOWEST, _FASTEST
        )
        most = _break_even(lambda part: sparse_wins(entries_at(part, size), machine), 1 / size, 1.0)
    why = _why(table, dense, bandwidth, most, world_size if size else 0)
    return Plan(table[0].collective, why, bandwidth, most, k, dense, table)


def ranking(
    size: int,
    world_size: int,
    machine: Machine,
    candidates: Sequence[Algorithm],
    *,
    k: int,
    budget_bytes: float | None = None,
) -> tuple[Prediction, ...]:
    """Return only the table of ``plan``; the search for break-even would take far longer.

    Raises:
        ConfigurationError: as for ``plan``.

    Example:
        >>> from sparsync.presets import resolve
        >>> gigabit, candidates = Machine(), [resolve("dense"), resolve("budgeted")]
        >>> made = ranking(10**6, 8, gigabit, candidates, k=10**4)
        >>> made == plan(10**6, 8, gigabit, candidates, k=10**4).table
        True
    """
    made = [
        predict(candidate, size=size, k=k, world_size=world_size, machine=machine)
        for candidate in candidates
    ]
    return _ranked(made, min(k, size), budget_bytes)


def _ranked(made: Sequence[Prediction], k: int, budget: float | None) -> tuple[Prediction, ...]:
    """Return the predictions that fit the budget, fastest first."""
    fitting = [p for p in made if budget is None or p.bytes_sent <= budget]
    if not fitting:
        least = min(made, key=lambda p: p.bytes_sent)
        raise ConfigurationError(
            f"no collective exchanges {k:,} entries within {format_bytes(budget or 0)} per step; "
            f"the least is {format_bytes(least.bytes_sent)} with {least.collective}: give a larger "
            "budget, or a smaller density"
        )
    return tuple(sorted(fitting, key=lambda p: p.seconds))


def _break_even(wins: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the value up to which sparse wins; 0 if it loses at ``low``, None if it wins at ``high``.

    The search tries equally spaced points on a logarithmic scale, and then halves the interval.
    """
    steps = max(math.ceil(_PER_DECADE * math.log10(high / low)), 1)
    points = [low * math.pow(high / low, i / steps) for i in range(steps + 1)]
    lost = next((i for i, point in enumerate(points) if not wins(point)), None)
    if lost is None:
        return None
    if lost == 0:
        return 0.0
    won, beyond = points[lost - 1], points[lost]
    for _ in range(_HALVINGS):
        middle = math.sqrt(won * beyond)
        won, beyond = (middle, beyond) if wins(middle) else (won, middle)
    return won


def _why(
    table: Sequence[Prediction],
    dense: Prediction,
    bandwidth: float | None,
    density: float | None,
    partners: int,
) -> str:
    """Return a sentence that says which candidate wins, by how much, and where a different one would.

    ``partners`` is 1 for a single rank, and 0 if there is nothing to exchange.
    """
    best, *others = table
    won = f"{best.collective} wins here: "
    if partners <= 1:
        alone = "one rank has nobody to exchange with"
        return won + (alone if partners else "there is nothing to exchange")
    won += format_seconds(best.seconds)
    if best.collective == "dense" and not others:
        return f"{won}, and nothing else was asked for"
    if best.collective == "dense":
        rival = f"{format_seconds(others[0].seconds)} of {others[0].collective}, the next best"
        beyond = "sparse would win below"
    elif any(entry.collective == "dense" for entry in others):
        rival, beyond = f"dense's {format_seconds(dense.seconds)}", "dense would win above"
    else:  # dense is over the budget, or is not a candidate
        needed = f"dense's {format_seconds(dense.seconds)} and {format_bytes(dense.bytes_sent)}"
        return f"{won} and {format_bytes(best.bytes_sent)} against {needed}"
    limits = [format_bandwidth(bandwidth)] if bandwidth else []
    limits += [f"a density of {format_percent(density)}"] if density else []
    return f"{won} against {rival}" + (f"; {beyond} {' or '.join(limits)}" if limits else "")
