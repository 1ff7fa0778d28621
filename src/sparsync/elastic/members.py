"""The ranks that take a step together, and the fate of that step when they change.

::

    exchange --everything is here--> prepared --all others' votes are here--> committed

A rank commits once it knows that all are prepared.  If anything fails before, it gives the step up, which
ends the waits of the others, and the ranks that are left meet in a new group, where the roll is called:

* somebody has committed: then all were prepared, and those that still are commit as well;
* nobody has: all exchange their accumulated gradients once more, in the new group.

So a step is applied by all ranks that are left or by none, its gradients count once, and residuals are
those of the ranks that took part.  The residual of a rank that is killed is lost.

A rank that has committed and is cut off may find on return that the others did the step again without it.
The past of the latest group holds; the rank adds its delivered entries to its residual again, and fetches
the weights.  For that it remembers its part in the last step, in every attempt that was complete here.
This is exact while every group has a rank of the last group that applied a step, which is sure if every
group has more than half of the ranks.  With smaller groups, two pasts can grow apart by many steps;
weights are equal all the same, but of the past that is given up only the last step is taken back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import CheckpointError, ConfigurationError
from sparsync.feedback.reducer import Position, Reducer
from sparsync.feedback.residual import Residual
from sparsync.feedback.shares import SharesState
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw

__all__ = ["Entry", "Members", "Verdict", "judge", "rest_of"]

# changes of the group that a rank may have missed; fixed, so that receivers know a brief's length
_PAST: Final = 32
# attempts at one step in which this rank's part is remembered: each may hold a copy of n elements
_ATTEMPTS: Final = 8
_MEASURED: Final = 10  # steps between measurements of the residual's norm, a pass over n elements


class Entry(NamedTuple):
    """A rank's answer when the roll is called."""

    # integers only: an entry travels as one row of int64
    step: int  # the open one
    history: (
        int  # the attempt that committed the last one; before the first a digest of the weights
    )
    prepared: int  # the attempt whose exchange of the open step is complete here; 0: none is
    behind: int  # 1: its weights are being fetched
    leaves: (
        int  # 1: the next step deals its residual; 2: this has happened, and the next is its last
    )
    set_up: int  # a digest of everything that must be equal on all ranks
    clock: int = 0  # the position of its training, for those that are stale
    view: int = 0  # serial number of the last group whose roll was complete here


class Verdict(NamedTuple):
    """The result of a roll, the same on all ranks.

    Attributes:
        step: the one that is exchanged next.
        current: ranks whose weights are those of that step, once ``commits`` have committed.
        commits: ranks that are to commit the step before.
        stale: ranks that have missed steps, or come from another past: they begin to fetch weights.
        donor: the first current rank that does not leave, if any, from which they are fetched.
        there: the first rank that has committed the step before, if it may be behind.
    """

    step: int
    current: frozenset[int]
    commits: frozenset[int]
    stale: frozenset[int]
    donor: int
    there: int


def judge(entries: Sequence[Entry]) -> Verdict:
    """Say who goes on, who commits first, and who is stale.

    Of all pasts that end with whole weights, at most one step before the furthest of them, that of the
    latest group holds; of several, the furthest; of several that led there (before the first step: of
    several weights) that of most ranks, and of as many that of the lowest.

    Raises:
        CheckpointError: those that had the weights are gone; a rank with fresh ones does not begin again.

    Example:
        >>> fresh, ahead = Entry(0, 77, 0, 0, 0, 5), Entry(5, 9, 0, 0, 0, 5)
        >>> verdict = judge([fresh, ahead, Entry(4, 8, 9, 0, 0, 5)])
        >>> verdict.step, sorted(verdict.current), sorted(verdict.commits), sorted(verdict.stale)
        (5, [1, 2], [2], [0])
    """
    verdicts = []
    for step, history in dict.fromkeys((entry.step, entry.history) for entry in entries):
        there = {r for r, e in enumerate(entries) if (e.step, e.history) == (step, history)}
        # the whole of a step that others have applied is on these ranks: they apply it, and fetch nothing
        commits = {
            rank
            for rank, entry in enumerate(entries)
            if entry.step == step - 1 and entry.prepared and entry.prepared == history
        }
        current = {rank for rank in there | commits if not entries[rank].behind}
        stale = set(range(len(entries))) - there - commits
        sets = frozenset(current), frozenset(commits), frozenset(stale)
        # ranks that are behind know a past but not its weights: nobody could go on from it with them
        # alone
        if current:
            view = max(entries[rank].view for rank in there | commits)
            donor = min(current, key=lambda rank: (entries[rank].leaves > 0, rank))
            verdicts.append((view, Verdict(step, *sets, donor, min(there))))
    # A rank commits a step only when all votes are here, so no rank of its group is more than one step
    # behind it: pasts that end earlier are of ranks that were away, however new their last group is.
    reached = max((verdict.step for _, verdict in verdicts), default=0)
    _, chosen = max(
        ((view, verdict) for view, verdict in verdicts if verdict.step >= reached - 1),
        key=lambda one: (one[0], one[1].step, len(one[1].current), -min(one[1].current)),
        default=(0, None),
    )
    furthest = max(entry.step for entry in entries)
    if chosen is None or reached < furthest - 1:
        raise CheckpointError(
            f"the ranks that had the weights of exchange {furthest} are gone, and those that are left "
            f"({len(entries)}) do not have them; load a checkpoint"
        )
    return chosen


class _Part(NamedTuple):
    """The changes that an attempt at a step makes in this rank's residuals, if it is applied."""

    minus: list[Vector]  # by unit; empty: all have refused the attempt
    plus: list[tuple[int, slice, Tensor]]  # dealt by ranks that leave
    deals: bool  # this rank leaves: the rest of its residuals goes to others
    scale: float  # of the reducer


class _Last(NamedTuple):
    """The last step that is closed here."""

    step: int
    attempt: int  # that was applied; 0: none
    parts: dict[int, _Part]  # by attempt, of all that were complete here


@final
class Members:
    """A rank among those that take the open step.

    Args:
        reducer: one that is ``changing``; its totals are not divided, and ``contributors`` says by what.
        start: digest of the weights before the first step.
        set_up: digest of everything that must be equal on all ranks.

    Attributes:
        attempt: number of the present group, > 0.
        behind: this rank's weights are being fetched; its gradients count for nothing until then.
        first: the lowest rank whose weights are current.
        leaving: this rank wants to leave: after a step in which its residual is dealt to the others, and
            one more, to which it contributes nothing: when that is committed, all have the first.
        left: this rank has left.
        idle: this rank takes part without training until it has left; nobody can fetch weights from it.
        counts: this rank's gradient counts in the open step.
        deals: its residual is dealt in the open step.
        clock: the position of training as a number; the others' once this rank was stale.
        newcomers: ranks whose gradients count from the next step on and not in this one; their donors.
        told: further numbers of all ranks' votes, by rank.
    """

    def __init__(self, reducer: Reducer, start: int, set_up: int = 0) -> None:
        self.reducer, self._set_up = reducer, set_up
        self.attempt, self.first, self.newcomers = 0, 0, dict[int, int]()
        self.behind = self._ready = self.leaving = self.left = self.idle = False
        # (step, attempt): from that step on, this attempt's group committed.  The first entry stands for
        # the weights at the start, so that ranks which begin from other weights have another past
        self._past, self._prepared, self._view = [(-1, start)], 0, 0
        self._parts: dict[int, _Part] = {}  # in the open step, of attempts before the present one
        self._last = _Last(-1, start, {})
        self.counts, self.deals, self.clock = True, False, 0
        self._spent = False  # the residual was dealt
        # a row per rank, for the open step and for the next, as sent with votes: whether it contributes,
        # whether it leaves, its donor, and the norm of its residual some steps ago.  Two tables, since
        # the open step is averaged, and may have to be repeated, by the rows of the vote before it
        self._present = self._next = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
        self._norm, self.told = 0.0, torch.zeros(1, 0)
        self._names: tuple[Hashable, ...] = ()  # of the group's ranks
        self._lost: dict[Hashable, float] = {}  # norms of the residuals of ranks that died, by name
        self._delivered: list[Vector] = []  # in the attempt that is prepared, by unit
        self._dealt: list[tuple[int, slice, Tensor]] = []  # of ranks that leave with the open step
        self._events: list[dict[str, Any]] = []

    @property
    def contributors(self) -> int:
        """How many ranks' gradients are in the averages of the open step."""
        return int(self._present[:, 0].sum())

    @property
    def fetching(self) -> bool:
        """Whether some rank is behind in the open step."""
        return bool(((self._present[:, 0] == 0) & (self._present[:, 1] == 0)).any())

    @property
    def spent(self) -> bool:
        """Whether the others have this rank's residual."""
        return self._spent

    # ---- a step ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave with the next two steps."""
        self.leaving = True

    def withdraw(self) -> None:
        """Leave without training on: this rank's residual still counts, and no further gradients do."""
        self.leaving = self.idle = True
        self._ready = False

    def tell_clock(self, clock: int) -> None:
        """Note the position of training, which the next roll tells ranks that are stale."""
        self.clock = clock

    def caught_up(self) -> None:
        """Note that this rank has taken over the others' weights, after the last step."""
        self.behind = False

    def count_only(self, came: Tensor) -> None:
        """Divide averages by those contributors alone whose gradients ``came``; before the commit."""
        self._present = self._present.clone()
        self._present[:, 0] *= came

    async def vote(
        self, facts: Sequence[float] = (), *, donor: int = 0, ready: bool = False
    ) -> None:
        """Say that all of the open step is here, and wait until all others say so.

        The vote also says if this rank contributes to the next step, and if that is its last.

        Args:
            facts: further numbers, for ``told``; as many on all ranks.
            donor: the rank that weights are fetched from, while this one is behind.
            ready: this rank has fetched a copy and kept all averages since: it is not behind from the
                next step on.

        Raises:
            CommunicationError: somebody's vote did not come.
        """
        # Before the vote is sent: a rank that has all votes may commit, and this one, if it is cut off
        # now, has to say at the next roll that it is prepared.
        self._prepared, self._ready = self.attempt, ready and not self.idle
        reduced = self.reducer.reduced
        # kept here, since the reducer forgets its results when the commit opens the next step
        self._delivered = [reduced[unit].delivered for unit in range(len(reduced))]
        leaves = 2 if self.deals or self._spent else int(self.leaving)
        counts = (not self.behind or self._ready) and leaves < 2 and not self.idle
        if self.reducer.step % _MEASURED == 0 or not self._norm:
            kept = [torch.linalg.vector_norm(r.accumulated) for r in self.reducer.residuals]
            self._norm = math.hypot(*map(float, kept))
        told = [counts, leaves, donor, self._norm, *facts]
        # float64 holds ranks, flags and digests of up to 53 bits exactly
        mine = torch.tensor(told, dtype=torch.float64)
        rows = torch.stack(await self.reducer.channel("vote").allgather(mine, "vote"))
        own = len(told) - len(facts)
        self._next, self.told = rows[:, :own], rows[:, own:]
        new = (self._next[:, 0] > self._present[:, 0]).nonzero().flatten().tolist()
        self.newcomers = {rank: int(self._next[rank, 2]) for rank in new}

    def committed(self, step: int, *, still: bool, applied: bool = True) -> bool:
        """Go on to the step after ``step``, with the same group (``still``) or that of the last roll.

        A step that all refuse together, e.g. because of NaN, is not ``applied``: nobody leaves with it.

        Returns:
            Whether this rank has caught up: its gradients count from the next step on.
        """
        if not applied:
            self._dealt, self.deals = [], False
            if still:
                # residuals were not dealt: ranks that were to deal them do it in the next step, in which
                # they still count; their votes had announced it as their last
                self._next[self._present[:, 1] == 1, :2] = 1.0
        arrived = still and self.behind and self._ready
        if arrived:
            self.behind = self._ready = False
        # before ``_hand_over``: a rank has left one step after that in which its residual was dealt, for
        # only that step's votes show that everybody has applied the former
        self.left = self._spent
        part = self._applied() if applied else _Part([], [], False, 1.0)
        self._last = _Last(step, self._prepared, {**self._parts, self._prepared: part})
        self._parts, self._delivered = {}, []
        self._hand_over()
        # one entry for all steps that a group commits: the past grows with changes, not with steps
        if self._past[-1][1] != self._prepared:
            self._past = [*self._past[1 - _PAST :], (step, self._prepared)]
        self._prepared = 0
        if still:
            self._count(self._next)
        else:
            self.go_on()
        return arrived

    def _hand_over(self) -> None:
        """Drop this rank's residual if it was dealt; add what was dealt to this rank."""
        if self.deals:
            self._spent = True
            for residual in self.reducer.residuals:
                residual.load(None)
        for unit, where, values in self._dealt:
            _add_to(self.reducer.residuals[unit], where, values)
        self._dealt = []

    def _applied(self) -> _Part:
        """Return this rank's part in the step that is applied, for ``_take_back``.

        Copies nothing, unless this rank's residual is dealt or all of a unit was delivered.
        """
        minus, spare = list[Vector](), self._last.parts.get(self._last.attempt)
        for unit, residual in enumerate(self.reducer.residuals):
            delivered = self._delivered[unit]
            # by type, as in ``Residual.retain``: ``values`` of a vector in messages decodes them all
            if type(delivered) is DenseVector and delivered.values is residual.accumulated:
                # All was delivered, and the next gradients will be written over it.  The copy takes the
                # memory of the last step's, which is closed for good: fresh memory costs more than the
                # copy itself.
                former = spare.minus[unit] if spare and spare.minus else None
                delivered = DenseVector(_copy_of(residual.accumulated, former))
            if self.deals:
                # accumulated = delivered + residual: the rest went to the others, so all of it is gone
                rest = residual.value
                all_of_it = delivered.to_dense()
                delivered = DenseVector(all_of_it if rest is None else all_of_it + rest)
            minus.append(delivered)
        return _Part(minus, self._dealt, self.deals, self.reducer.scale)

    async def end(self, *, whole: bool = True) -> bool:
        """Tell whether all are at the end, and have ``whole`` weights; those behind may still fetch them.

        Raises:
            CommunicationError: somebody is gone; also for those that have not committed their last step.
        """
        leaves = self._present[:, 1].tolist()
        # ranks in their last step do not come to the end, and nobody waits for them
        if leaves[self.reducer.comm.rank] == 2:
            return True
        there = [rank for rank, when in enumerate(leaves) if when < 2]
        comm = Subgroup(self.reducer.channel("vote"), there)
        rows = await comm.allgather(torch.tensor([int(whole)]), "end")
        return all(map(bool, rows))

    def _count(self, rows: Tensor) -> None:
        """Note the ranks that contribute to the open step, and those whose last step it is."""
        counts, leaves, *_ = rows[self.reducer.comm.rank].tolist()
        self._present, self.counts, self.deals = rows, counts == 1, leaves == 1

    async def deal(self) -> None:
        """Deal the residuals of ranks that leave to those that stay, element by element in turn.

        Raises:
            CommunicationError: somebody is gone.

        Cost: n elements sent by each that leaves.
        """
        comm = self.reducer.channel("roll")
        leaves = self._present[:, 1].tolist()
        stay = [rank for rank, when in enumerate(leaves) if not when]
        # only noted: the commit adds it, and an attempt that is given up deals once more
        self._dealt = []
        for leaver in [rank for rank, when in enumerate(leaves) if when == 1 and stay]:
            for unit, residual in enumerate(self.reducer.residuals):
                if leaver == comm.rank:
                    rest = rest_of(residual, self.reducer.reduced[unit].delivered)
                    for turn, rank in enumerate(stay):
                        raw = bytes_of(rest[turn :: len(stay)].cpu())
                        await comm.isend(raw, rank, "deal", Raw("value"))
                elif comm.rank in stay:
                    where = slice(stay.index(comm.rank), None, len(stay))
                    own = residual.accumulated[where]
                    nbytes = own.numel() * own.itemsize
                    raw = await comm.irecv(leaver, nbytes, "deal", Raw("value"))
                    values = raw.clone().view(own.dtype).to(own.device)
                    self._dealt.append((unit, where, values))

    # ---- a change ----------------------------------------------------------------------------------

    async def call_the_roll(self, attempt: int, names: Sequence[Hashable], serial: int) -> Verdict:
        """Find out, in a new group of ranks with these names, which ranks go on with which step.

        Brings the reducer to that step.  A rank among ``commits`` is to commit the open step as it is.
        ``serial`` grows with every group, unless the lighthouse is started again.

        Raises:
            CommunicationError: somebody is gone again: meet once more.
            CheckpointError: see ``judge``.
            ConfigurationError: this rank is not set up as those that go on.
        """
        reducer, self.attempt = self.reducer, attempt
        # of no step: ranks may be at different ones, and messages are matched by the step of the ledger,
        # here a new one on all ranks
        comm = reducer.channel("roll").apart()
        history = self._past[-1][1]
        leaves = 2 if self._spent else int(self.leaving)
        prepared, behind = self._prepared, int(self.behind)
        place = history, prepared, behind, leaves, self._set_up, self.clock, self._view
        mine = Entry(reducer.step, *place)
        told = await comm.allgather(torch.tensor(mine, dtype=torch.int64), "roll")
        entries = [Entry(*row.tolist()) for row in told]
        verdict = judge(entries)
        self.first = verdict.donor
        if entries[comm.rank].set_up != entries[verdict.donor].set_up:
            raise ConfigurationError(
                f"rank {comm.rank} is set up otherwise than rank {verdict.donor} and those that go on "
                "with it: another model, algorithm, density or version; attach alike on all ranks"
            )
        if comm.rank in verdict.stale:
            # the furthest clock: of those alike some have not begun the open exchange yet, and tell of
            # the one before
            first = entries[verdict.there]
            alike = [e for e in entries if (e.step, e.history) == (first.step, first.history)]
            self.clock = max(entry.clock for entry in alike)
        # by name, and before ``_note`` takes over the new names: ranks have other numbers now
        rows = self._present.tolist()
        norms = {name: row[3] for name, row in zip(self._names, rows, strict=False)}
        self._note(tuple(names), verdict)
        await self._brief(comm, verdict)
        applied = [*self._past]
        if comm.rank in verdict.commits:
            applied.append((verdict.step - 1, self._prepared))
        rows = list[list[float]]()
        for rank, entry in enumerate(entries):
            leaves = entry.leaves
            if leaves == 2 and _attempt_of(entry.step - 1, applied, verdict.step) != entry.history:
                leaves = 1  # the step in which its residual was dealt does not hold
            counts = rank in verdict.current and leaves < 2
            rows.append([counts, leaves, verdict.donor, norms.get(names[rank], 0)])
        self._next = torch.tensor(rows, dtype=torch.float64)
        self.newcomers = {}
        # a lighthouse that was started again counts from the beginning, and views still have to grow
        self._view = max(serial, 1 + max(entry.view for entry in entries))
        if comm.rank not in verdict.commits:
            self._set_aside()
            self.go_on()
        return verdict

    def go_on(self) -> None:
        """Plan the open step for the group whose roll was called."""
        self._dealt = []
        self._count(self._next)
        self._norm = 0.0  # measured anew, since the new group knows none
        # last: thresholds, regions and shares are planned for the ranks of this group
        self.reducer.regroup()

    async def _brief(self, comm: Communicator, verdict: Verdict) -> None:
        """Send those that are stale the state of the exchange."""
        reducer, shares = self.reducer, self.reducer.plan.shares
        if comm.rank == verdict.there:
            key = -1 if shares.key is None else shares.key
            past = [number for pair in self._past for number in pair]
            # the last pair is repeated up to the fixed length; ``dict.fromkeys`` below drops repetitions
            past += past[-2:] * (_PAST - len(self._past))
            for rank in sorted(verdict.stale):
                numbers = [verdict.step, *past, reducer.skipped, key, *shares.quotas]
                raw = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
                await comm.isend(raw, rank, "brief", Raw("control"))
        elif comm.rank in verdict.stale:
            count = 3 + 2 * _PAST + len(reducer.units)
            step, *rest = await _numbers_from(comm, verdict.there, count)
            past, (skipped, key, *quotas) = rest[: 2 * _PAST], rest[2 * _PAST :]
            self._past = list(dict.fromkeys(zip(past[::2], past[1::2], strict=True)))
            # every unit's k must be equal on all ranks, or their messages would not fit each other
            shares = SharesState(tuple(quotas), None if key < 0 else key)
            self._adopt(Position(step, skipped, shares))
            self.behind = True

    # ---- another past ------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Remember this rank's part in the attempt that is prepared: somebody may have applied it."""
        if self._prepared:
            reducer, minus, plus = self.reducer, list[Vector](), [*self._dealt]
            # ranks that apply this attempt look at the same totals, and would refuse it
            if any(
                self._is_broken(reducer.reduced[unit].total) for unit in range(len(reducer.units))
            ):
                plus = []
            else:
                for residual, delivered in zip(reducer.residuals, self._delivered, strict=True):
                    whole = type(delivered) is DenseVector
                    if self.deals or (whole and delivered.values is residual.accumulated):
                        # a copy: the buffer itself is accumulated into from now on
                        delivered = DenseVector(residual.accumulated.clone())
                    minus.append(delivered)
            while len(self._parts) >= _ATTEMPTS:
                del self._parts[next(iter(self._parts))]
            self._parts[self._prepared] = _Part(minus, plus, self.deals, reducer.scale)
        self._prepared, self._delivered = 0, []

    def _adopt(self, position: Position) -> None:
        """Close the open step; bring the reducer to the others' step, and residuals to their past."""
        reducer, last = self.reducer, self._last
        closed, step = reducer.step, position.step
        self._set_aside()
        by = _attempt_of(closed, self._past, step) or 0
        part = self._parts.get(by)
        for residual in reducer.residuals:
            # A step that was refused because of NaN is undone.  Otherwise its gradients stay in the
            # residual, from which ``_apply`` subtracts this rank's part, if the others' attempt had one.
            refused = part is not None and not part.minus
            broken = part is None and self._is_broken(DenseVector(residual.accumulated))
            if refused or broken:
                residual.restore()
        reducer.regroup(position)
        if part is not None:
            self._apply(part)
        else:
            # the others did the last step that is closed here in another attempt, or not yet: exchange
            # the two attempts' parts
            holds = _attempt_of(last.step, self._past, step)
            if holds is not None and holds != last.attempt:
                self._take_back(last.parts.get(last.attempt))
                self._apply(last.parts.get(holds))
                self._last = last = last._replace(attempt=holds)
        if step > closed:
            self._last, self._parts = _Last(closed, by, self._parts), {}
        elif step < closed:
            # open again is the last step that was closed here, or an older one, which is forgotten
            self._parts = last.parts if step == last.step else {}
            self._last = _Last(-1, 0, {})

    def _apply(self, part: _Part | None) -> None:
        """Bring residuals to the end of a step that others have applied."""
        if part is None or not part.minus:
            return
        self._add(part, 1.0)
        self._spent = self._spent or part.deals

    def _take_back(self, part: _Part | None) -> None:
        """Undo this rank's part in a step, which others have not applied."""
        if part is None or not part.minus:
            return
        self._add(part, -1.0)
        self._spent = self._spent and not part.deals

    def _add(self, part: _Part, sign: float) -> None:
        """Add a part's changes to the residuals, or subtract them."""
        # residuals have the present scale of a GradScaler, the part has that of its step
        factor = sign * self.reducer.scale / part.scale
        for residual, vector in zip(self.reducer.residuals, part.minus, strict=True):
            _add_to(residual, slice(None), -factor * vector.to_dense())
        for unit, where, values in part.plus:
            _add_to(self.reducer.residuals[unit], where, factor * values)

    def _is_broken(self, vector: Vector) -> bool:
        """Tell whether a vector that was exchanged or accumulated holds NaN or Inf."""
        return vector.first_nonfinite(self.reducer.residuals[0].accumulated.dtype) is not None

    # ---- what is told ------------------------------------------------------------------------------

    def _note(self, names: tuple[Hashable, ...], verdict: Verdict) -> None:
        """Note the ranks that came and went, for ``state``."""
        rows = zip(
            self._names, self._present.tolist(), strict=len(self._names) == len(self._present)
        )
        gone = {name: row for name, row in rows if name not in names}
        # ranks in their last step have left: all have their residual
        died = {name: row for name, row in gone.items() if row[1] != 2}
        norms = {name: row[3] for name, row in died.items()}
        back = [name for name in names if self._lost.pop(name, None) is not None]
        self._lost |= norms
        event = {
            "when": time.time(),
            "step": verdict.step,
            "ranks": len(names),
            "came": len(set(names) - set(self._names)),
            "left": len(gone) - len(died),
            "died": len(died),
            "back": len(back),
            "lost_norm": math.hypot(*norms.values()),
        }
        self._events, self._names = [*self._events[-999:], event], names

    def state(self) -> dict[str, Any]:
        """Return plain numbers: the present ranks, and all changes of the group.

        "changes" has for each the step, the ranks from then on, and how many came, left and died.
        "lost_norm" is the norm of the residuals of ranks that died, as measured at most 10 steps before.
        A rank that was only taken for dead comes back with its residual: it is counted in "back", and its
        norm no longer in "lost_norm".
        """
        return {
            "ranks": len(self._present),
            "contributors": self.contributors,
            "behind": self.behind,
            "lost_norm": math.hypot(*self._lost.values()),
            "changes": [dict(event) for event in self._events],
        }


# ---- residuals, in ways that only a change of ranks asks for ------------------------------------------


def rest_of(residual: Residual, delivered: Vector) -> Tensor:
    """Return the residual that the commit of the open step would leave; change nothing."""
    # by type, as in ``Residual.retain``: ``values`` of a vector in messages decodes them all
    if type(delivered) is DenseVector and delivered.values is residual.accumulated:
        return torch.zeros_like(residual.accumulated)
    rest = residual.accumulated.clone()
    delivered.subtract_from_(rest)
    return rest


def _add_to(residual: Residual, where: slice, values: Tensor) -> None:
    """Add mass that another rank did not deliver, between steps."""
    whole = residual.accumulated
    if residual.value is None:
        whole.zero_()
    whole[where] += values
    residual.load(whole)  # onto itself, which copies nothing: the residual is not zero any more


def _copy_of(values: Tensor, former: Vector | None) -> Tensor:
    """Return a copy of values, in the memory of a former one if that is there."""
    fits = type(former) is DenseVector and former.values.shape == values.shape
    if former is None or not fits or former.values is values:
        return values.clone()
    return former.values.copy_(values)


def _attempt_of(step: int, past: Sequence[tuple[int, int]], end: int) -> int | None:
    """Return the attempt that committed a step of a past; 0 from ``end`` on; None: the step is too old.

    Example:
        >>> [_attempt_of(step, [(3, 7), (5, 9)], end=8) for step in (2, 3, 4, 7, 8)]
        [None, 7, 7, 9, 0]
    """
    if step >= end:
        return 0
    return next((attempt for since, attempt in reversed(past) if since <= step), None)


async def _numbers_from(comm: Communicator, source: int, count: int) -> list[int]:
    raw = await comm.irecv(source, 8 * count, "brief", Raw("control"))
    numbers: list[int] = raw.clone().view(torch.int64).tolist()
    return numbers
