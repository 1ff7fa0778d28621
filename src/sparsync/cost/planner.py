"""Plan: find the fastest collective on a network, by how much, and from where on dense wins.

Pure arithmetic: a ``Machine`` and sizes in, a ``Plan`` out, the same on every rank.

Overlap, where the computation's time is given: a pass is one third forward, two thirds backward.  What
is exchanged in m parts (DDP's buckets of 25 MiB, the units of ``attach``) overlaps the backward
pass, all but the last part.  A model that is one unit hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import WORD_BYTES
from sparsync.collectives.dense import Dense
from sparsync.cost.machine import Machine
from sparsync.cost.predict import Prediction, predict
from sparsync.cost.wording import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)
from sparsync.errors import ConfigurationError
from sparsync.selection import Everything

__all__ = ["Plan", "plan"]

_DENSE = Algorithm(
    "dense", Everything, Dense, source="Ok-Topk, Table 1, Dense"
)  # all are compared with it
_DEFAULT_DENSITY = 0.01
_BACKWARD = 2 / 3  # of a pass: two matrix products per layer, where forward has one
_NEARLY = 0.9  # of the entries that fit a budget
_SLOWEST, _FASTEST = 1.0, 1e18  # bytes per second between which break-even is looked for
_PER_DECADE, _HALVINGS = 4, 40  # points at which, and then halvings of the interval


@dataclass(frozen=True)
class Plan:
    """The fastest collective, and why it is.

    Attributes:
        choice: name of the fastest collective.
        why: one sentence.
        break_even_bandwidth: bytes per second below which, however slow, some sparse candidate beats
            dense; 0: there is no such bandwidth; None: at every bandwidth one does.
        break_even_density: k / n below which likewise; None: up to density 1.
        k: entries per rank.
        dense: what all are compared with, whether or not it competes.
        table: all that compete, the fastest first.
    """

    choice: str
    why: str
    break_even_bandwidth: float | None
    break_even_density: float | None
    k: int
    dense: Prediction
    table: tuple[Prediction, ...]


@dataclass(frozen=True)
class _Setting:
    """The part of a plan that stays the same while k and the bandwidth are varied."""

    size: int
    world_size: int
    backward: float
    bucket_bytes: int
    unit_bytes: int | None

    def predict(self, candidate: Algorithm, k: int, machine: Machine) -> Prediction:
        """Predict, and hide what the backward pass hides."""
        made = predict(candidate, size=self.size, k=k, world_size=self.world_size, machine=machine)
        part = self.bucket_bytes if candidate.name == "dense" else self.unit_bytes
        parts = 1 if part is None else max(math.ceil(WORD_BYTES * self.size / part), 1)
        early = made.seconds_exchange * (1 - 1 / parts)
        return replace(made, seconds_hidden=min(early, self.backward))

    def sparse_wins(self, candidates: Sequence[Algorithm], k: int, machine: Machine) -> bool:
        """Tell whether any of these beats dense."""
        dense = self.predict(_DENSE, k, machine).seconds
        return any(self.predict(c, k, machine).seconds < dense for c in candidates)

    def break_even(
        self, candidates: Sequence[Algorithm], k: int, machine: Machine
    ) -> tuple[float | None, float | None]:
        """Return the bandwidth and the density up to which one of these beats dense."""
        if self.world_size == 1 or self.size == 0:  # nothing is exchanged, whatever the network
            return 0.0, 0.0
        bandwidth = _break_even(
            lambda rate: self.sparse_wins(candidates, k, replace(machine, beta=1 / rate)),
            _SLOWEST,
            _FASTEST,
        )
        density = _break_even(
            lambda part: self.sparse_wins(candidates, _entries(part, self.size), machine),
            1 / self.size,
            1.0,
        )
        return bandwidth, density


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
    bucket_bytes: int = 25 * 2**20,
    unit_bytes: int | None = None,
) -> Plan:
    """Choose the collective that is predicted fastest for k entries.

    Args:
        size: number of elements n.
        world_size: number of ranks P.
        machine: what its links and cores take.
        candidates: algorithms; at equal times the first one wins.
        density: k / n; default 0.01 where neither k nor a budget is given.
        k: entries per rank, instead of a density.
        budget_bytes: what a rank may send or receive per step; collectives that need more do not
            compete.  Without density and k, as many entries as fit (with all candidates that fit at
            least 90 % of what the best fits).
        compute: seconds of a forward and backward pass; None: nothing overlaps it.
        bucket_bytes: of gradients that dense exchanges at once (PyTorch's DDP: 25 MiB).
        unit_bytes: likewise of the others (``Compression(unit_bytes=...)``); None: all at once.

    Raises:
        ConfigurationError: a bad number or name, or a budget that nothing fits.

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
    _check(size, world_size, density, k, budget_bytes, compute)
    if not candidates:
        raise ConfigurationError("plan: no candidates; give algorithms to choose from")
    backward = _BACKWARD * (compute or 0.0)
    setting = _Setting(size, world_size, backward, bucket_bytes, unit_bytes)
    if k is None and density is None and budget_bytes is not None:
        k = _most_entries(setting, machine, candidates, budget_bytes)
    elif k is None:
        k = _entries(_DEFAULT_DENSITY if density is None else density, size)
    k = min(k, size)
    made = [setting.predict(candidate, k, machine) for candidate in candidates]
    fitting = [p for p in made if budget_bytes is None or p.bytes_sent <= budget_bytes]
    if not fitting:
        least = min(made, key=lambda p: p.bytes_sent)
        raise ConfigurationError(
            f"no collective exchanges {k:,} entries within {format_bytes(budget_bytes or 0)} per step; "
            f"the least is {format_bytes(least.bytes_sent)} with {least.collective}: give a larger "
            "budget, or a smaller density"
        )
    table = tuple(sorted(fitting, key=lambda p: p.seconds))
    dense = setting.predict(_DENSE, k, machine)
    competing = {p.collective for p in table}
    sparse = [c for c in candidates if c.name in competing and c.result != "whole"]
    bandwidth, most = setting.break_even(sparse, k, machine)
    sentence = _why(table, dense, bandwidth, most, world_size if size else 0)
    return Plan(table[0].collective, sentence, bandwidth, most, k, dense, table)


def _break_even(wins: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return up to which value, from ``low`` on, sparse wins; 0: it loses there; None: up to ``high``.

    Points are equally far apart on a logarithmic scale, then the interval is halved.
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


def _entries(density: float, size: int) -> int:
    """Return k for a density, as ``Unit.entries`` does."""
    return min(size, max(1, round(density * size)))


def _most_entries(
    setting: _Setting, machine: Machine, candidates: Sequence[Algorithm], budget: float
) -> int:
    """Return how many entries fit a budget with the frugal candidates; n if none depends on k.

    Frugal are those that fit nearly as many as the best; all of these shall compete.
    """

    def most(candidate: Algorithm) -> int:
        return _bisect(
            lambda k: setting.predict(candidate, k, machine).bytes_sent <= budget, setting.size
        )

    counts = [most(candidate) for candidate in candidates if candidate.result != "whole"]
    most_of_all = max(counts, default=setting.size)
    return min((count for count in counts if count >= _NEARLY * most_of_all), default=most_of_all)


def _bisect(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that fits, if 1 does; else 1."""
    low, high = min(1, most), most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _check(
    size: int,
    world_size: int,
    density: float | None,
    k: int | None,
    budget_bytes: float | None,
    compute: float | None,
) -> None:
    """Refuse numbers that cannot be planned for."""
    for name, value, good, expected in (
        ("size", size, size >= 0, "the number of elements, at least 0"),
        ("world_size", world_size, world_size >= 1, "at least 1 rank"),
        ("density", density, density is None or 0 < density <= 1, "k / n, in (0, 1], e.g. 0.01"),
        ("k", k, k is None or k >= 0, "at least 0 entries"),
        ("budget_bytes", budget_bytes, budget_bytes is None or budget_bytes > 0, "more than 0"),
        ("compute", compute, compute is None or 0 <= compute < math.inf, "seconds >= 0"),
    ):
        if not good:
            raise ConfigurationError(f"plan: {name} is {value}; give {expected}")
    if density is not None and k is not None:
        raise ConfigurationError("plan: density and k were both given; give one of them")


def _why(
    table: Sequence[Prediction],
    dense: Prediction,
    bandwidth: float | None,
    density: float | None,
    partners: int,
) -> str:
    """Say in one sentence what wins, by how much, and from where on something else would.

    ``partners``: 1: one rank is alone; 0: there is nothing to exchange.
    """
    best = table[0]
    if partners <= 1:
        reason = (
            "one rank has nobody to exchange with" if partners else "there is nothing to exchange"
        )
        return f"{best.collective} wins here: {reason}"
    if best.collective == "dense":
        rival = next(iter(table[1:]), None)
        if rival is None:
            return (
                f"dense wins here: {format_seconds(best.seconds)}, and nothing else was asked for"
            )
        versus = f"{format_seconds(rival.seconds)} of {rival.collective}, the next best"
        return f"dense wins here: {format_seconds(best.seconds)} against {versus}" + _limits(
            "; sparse would win below", bandwidth, density
        )
    if all(entry.collective != "dense" for entry in table):  # over the budget, or not asked for
        times = [
            f"{format_seconds(p.seconds)} and {format_bytes(p.bytes_sent)}" for p in (best, dense)
        ]
        return f"{best.collective} wins here: {times[0]} against dense's {times[1]}"
    versus = f"{format_seconds(best.seconds)} against dense's {format_seconds(dense.seconds)}"
    return f"{best.collective} wins here: {versus}" + _limits(
        "; dense would win above", bandwidth, density
    )


def _limits(start: str, bandwidth: float | None, density: float | None) -> str:
    """Name the limits that there are."""
    named = [format_bandwidth(bandwidth)] if bandwidth else []
    named += [f"a density of {format_percent(density)}"] if density else []
    return f"{start} {' or '.join(named)}" if named else ""
