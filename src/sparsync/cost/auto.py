"""Auto: the planner chooses a collective, and measurements during training correct its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, final

import torch

from sparsync.algorithm import Algorithm
from sparsync.collectives.collective import Collective, Reduced
from sparsync.cost.machine import Machine
from sparsync.cost.planner import Plan, Prediction, plan, ranking
from sparsync.cost.wording import format_percent
from sparsync.errors import ConfigurationError, require
from sparsync.sparse import Vector
from sparsync.state import parse_parts
from sparsync.transports.communicator import Communicator

__all__ = ["Auto", "AutoState"]

_WEIGHT = 0.5  # weight of a new measurement in its candidate's factor


@dataclass(frozen=True)
class AutoState:
    """The current choice, and the candidates' factors, i.e. ratios of measured to predicted times.

    Only arithmetic changes the state, so ranks that get the same times make the same choice.  Until a
    candidate has been used, its prediction is trusted.  So every candidate with enough predicted gain is
    tried once; from then on, its factor decides.

    Example:
        >>> state = AutoState(choice=0, factors=(None, None))
        >>> for _ in range(3):
        ...     state = state.checked({0: 0.01, 1: 0.02}, measured=0.1, gain=0.1, patience=3)
        >>> state.choice, state.factors
        (1, (10.0, None))
    """

    choice: int = -1  # index of the candidate in use; -1 before the first step
    # k and the number of ranks that the choice was planned for; () before the first step
    planned: tuple[int, ...] = ()
    streak: int = 0  # consecutive comparisons in favour of a candidate that is not in use
    # the ratios of measured to predicted seconds; None for a candidate that was never measured
    factors: tuple[float | None, ...] = ()
    parts: tuple[Any, ...] = ()  # the candidates' own states

    def checked(
        self, predicted: Mapping[int, float], measured: float, *, gain: float, patience: int
    ) -> AutoState:
        """Return the state after a new measurement, possibly with a new ``choice``.

        ``predicted`` maps candidates to seconds, fastest first; the current choice is missing from it if
        a budget has ruled it out in the meantime.  ``measured`` is the number of seconds that the current
        choice took; it is the same on all ranks.
        """
        if self.choice not in predicted:
            return replace(self, choice=next(iter(predicted)))
        factors = list(self.factors)
        fresh = measured / predicted[self.choice] if predicted[self.choice] else 1.0
        last = factors[self.choice]
        factors[self.choice] = fresh if last is None else fresh + (1 - _WEIGHT) * (last - fresh)
        learned = replace(self, factors=tuple(factors))
        corrected = learned.corrected(predicted)
        best = min(corrected, key=corrected.__getitem__)
        if corrected[best] >= (1 - gain) * corrected[self.choice]:
            return replace(learned, streak=0)
        if self.streak + 1 < patience:
            return replace(learned, streak=self.streak + 1)
        return replace(learned, choice=best, streak=0)

    def corrected(self, predicted: Mapping[int, float]) -> dict[int, float]:
        """Return the predicted seconds of each candidate times its factor."""
        known = [1.0 if factor is None else factor for factor in self.factors]
        return {i: known[i] * seconds for i, seconds in predicted.items()}


@final
class Auto(Collective):
    """The planner's choice among collectives, corrected by measurements during training.

    The plan is made in the first step, when n, k and P are known, and equal on all ranks.  But the
    entries for this step are already selected, so dense cannot start before the second step.  If k or P
    changes later, e.g. after a warm-up, the next step plans again in the same way, using the factors
    measured so far.

    Every ``check_period`` steps, the ranks agree on the mean time of an exchange since the last plan or
    check.  They use the minimum of their means, because a rank that arrives early also measures its wait
    for the others.  The ratio of this time to the prediction updates the current candidate's factor.  If
    the corrected prediction of a different candidate is better by enough, the ranks switch to it.

    Args: as for the preset ``sparsync.presets.auto``; candidates select k entries or everything.

    Cost: the cost of the choice, plus one allreduce of 8 bytes per check.   State: ``AutoState``.
    Differs from the paper: there is none.

    Example:
        >>> from sparsync.collectives import Allgather, Dense
        >>> from sparsync.selection import Everything, Exact
        >>> from sparsync.sparse import SparseVector
        >>> from sparsync.transports.sim import simulate
        >>> dense = Algorithm("dense", Everything, Dense)
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.eye(9)[comm.rank])
        ...     summed = Auto([dense, Algorithm("allgather", Exact, Allgather)])
        ...     reduced = await summed.reduce(comm, mine, k=1, step=0)
        ...     return reduced.total.nnz, summed.name
        >>> simulate(program, world_size=3).results[2]
        (3, 'allgather')
    """

    def __init__(
        self,
        candidates: Sequence[Algorithm],
        machine: Machine = Machine(),  # noqa: B008 (frozen)
        budget: float | None = None,
        check_period: int | None = 50,
        *,
        gain: float = 0.1,
        patience: int = 2,
    ) -> None:
        for name, value, good, expected in (
            ("check_period", check_period, check_period is None or check_period >= 1, "1 or None"),
            ("gain", gain, 0 <= gain < 1, "a fraction in [0, 1), e.g. 0.1"),
            ("patience", patience, patience >= 1, "at least 1 check"),
        ):
            require(good, f"auto: {name} is {value}; give {expected}")
        self.candidates = tuple(algorithm.name for algorithm in candidates)
        self.machine, self.budget, self.check_period = machine, budget, check_period
        self.gain, self.patience = gain, patience
        self._plannable = list(candidates)
        self._parts = [algorithm.make_collective() for algorithm in candidates]
        self._state = AutoState(factors=(None,) * len(self.candidates))
        # The durations of the steps since the last check or plan differ between ranks.  They are not part
        # of the state, which is equal on all ranks.
        self._seconds: list[float] = []
        self._sizes: tuple[int, int, int] | None = None  # n, k and P of the last step
        self._explained: tuple[tuple[int, int, int], Plan] | None = None
        sparse = [i for i, part in enumerate(self._parts) if not part.whole]
        self._first = sparse[0] if sparse else 0

    @property
    def whole(self) -> bool:
        """Whether the current choice is dense, i.e. needs the whole vector."""
        return self._parts[self._index].whole

    @property
    def name(self) -> str:
        """The name of the current choice."""
        return self.candidates[self._index]

    def explain(self) -> str:
        """Return the choice and the reason for it."""
        if self._sizes is None or self._state.choice < 0:
            return f"{self.name}: the first step is not planned yet"
        known = zip(self.candidates, self._state.factors, strict=True)
        factors = ", ".join(f"{name} {f:.3g} x" for name, f in known if f is not None)
        measured = f"; measured over predicted: {factors}" if factors else ""
        return f"{self.name}: {self._why(self._sizes)}{measured}"

    def _why(self, sizes: tuple[int, int, int]) -> str:
        """Return the reason for the choice: the plan, or a measurement that has corrected it."""
        # plan only here, and once, because the search for break-even takes far longer than a ranking
        if self._explained is None or self._explained[0] != sizes:
            n, k, p = sizes
            made = plan(n, p, self.machine, self._plannable, k=k, budget_bytes=self.budget)
            self._explained = sizes, made
        made, choice = self._explained[1], self._state.choice
        corrected = self._state.corrected(self._seconds_of(made.table))
        if choice not in corrected:
            return "over the budget; the next check chooses another algorithm"
        best = min(corrected, key=corrected.__getitem__)
        if corrected[best] == corrected[choice]:
            measured = f"{made.choice} was predicted; as measured, {self.name} is faster"
            return made.why if made.choice == self.name else measured
        part = format_percent(1 - corrected[best] / corrected[choice])
        saving = f"{self.candidates[best]} would save {part}"
        if corrected[best] >= (1 - self.gain) * corrected[choice]:
            return f"kept, because {saving}, and gain is {format_percent(self.gain)}"
        checks = f"{self._state.streak} of {self.patience} checks in a row"
        return f"kept for now; {saving}, as found in {checks}"

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Run the choice; every ``check_period`` steps, compare its time with the prediction."""
        part = self._parts[self._index]
        if comm.world_size == 1:
            return await part.reduce(comm, selected, k, step)
        self._sizes = sizes = selected.size, k, comm.world_size
        if self._state.planned != sizes[1:]:
            part = self._plan(part, sizes)
        started = comm.now
        reduced = await part.reduce(comm, selected, k, step)
        if part is self._parts[self._index]:
            self._seconds.append(comm.now - started)
        if self.check_period and (step + 1) % self.check_period == 0 and self._seconds:
            await self._check(comm, self._ranking(sizes))
        return reduced

    @property
    def _index(self) -> int:
        return self._first if self._state.choice < 0 else self._state.choice

    def _ranking(self, sizes: tuple[int, int, int]) -> tuple[Prediction, ...]:
        n, k, p = sizes
        return ranking(n, p, self.machine, self._plannable, k=k, budget_bytes=self.budget)

    def _seconds_of(self, table: Sequence[Prediction]) -> dict[int, float]:
        return {self.candidates.index(p.collective): p.seconds for p in table}

    def _plan(self, part: Collective, sizes: tuple[int, int, int]) -> Collective:
        """Choose the fastest candidate; return the fastest one that can use this step's selection."""
        corrected = self._state.corrected(self._seconds_of(self._ranking(sizes)))
        fastest = sorted(corrected, key=corrected.__getitem__)
        self._state = replace(self._state, choice=fastest[0], streak=0, planned=sizes[1:])
        self._seconds.clear()  # these times belong to a different k or P
        alike = (self._parts[i] for i in fastest if self._parts[i].whole == part.whole)
        return next(alike, part)

    async def _check(self, comm: Communicator, made: Sequence[Prediction]) -> None:
        """Compare the mean exchange time with the prediction; switch to a better candidate if any."""
        mine = torch.tensor([fmean(self._seconds)], dtype=torch.float64, device="cpu")
        self._seconds.clear()
        measured = float(await comm.allreduce(mine, "plan", op="min"))
        selection = sum(p.seconds_selection for p in made if p.collective == self.name)
        self._state = self._state.checked(
            self._seconds_of(made), measured + selection, gain=self.gain, patience=self.patience
        )

    # ---- state -----------------------------------------------------------------------------------

    @property
    def state(self) -> AutoState:
        """The choice, and the states of all candidates."""
        return replace(self._state, parts=tuple(part.state for part in self._parts))

    @state.setter
    def state(self, state: AutoState) -> None:
        self._state = replace(state, parts=())
        for part, its in zip(self._parts, state.parts, strict=True):
            part.state = its

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the choice as plain numbers, and the states of all candidates."""
        mine = self._state
        own = {**vars(mine), "planned": list(mine.planned), "factors": list(mine.factors)}
        return {**own, "parts": [part.state_dict() for part in self._parts]}

    def parsed_state(self, state: Mapping[str, Any]) -> AutoState:
        """Return the state object for a dictionary returned by ``state_dict``."""
        saved = dict(state) if isinstance(state, Mapping) else {}
        parts = parse_parts(self, self._parts, saved.pop("parts", None))
        own: AutoState = super().parsed_state({**saved, "parts": ()})
        if not -1 <= own.choice < len(self.candidates) or len(own.factors) != len(self.candidates):
            raise ConfigurationError(
                f"the saved state of Auto has choice {own.choice} among {len(own.factors)}, this run "
                f"{len(self.candidates)} candidates; load it with the candidates it was saved with"
            )
        return replace(own, parts=parts)
