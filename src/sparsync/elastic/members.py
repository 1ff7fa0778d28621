"""The ranks that take a step together, and the fate of that step when these ranks change.

::

    exchange --all data received--> prepared --all votes received--> committed

A rank commits once it knows that all ranks are prepared.  If the exchange fails earlier, the rank
abandons the step, which ends the other ranks' waits.  The remaining ranks form a new group and call the
roll:

* if any rank has committed, then all ranks were prepared; those that have not committed now do so;
* if no rank has committed, all ranks exchange their accumulated gradients once more, in the new group.

Either way, a step is applied by all remaining ranks or by none, its gradients count once, and residuals
match the ranks that took part.  The residual of a killed rank is lost.

If a rank commits and is then cut off, the other ranks may redo the step without it.  When the rank
returns, the history of the latest group counts: the rank adds its delivered entries back to its residual,
and fetches the weights.  For this purpose, a rank remembers its contributions to the last step, in every
attempt that it completed.

The correction is exact as long as every group contains a rank of the last group that applied a step.
This is guaranteed if every group has more than half of the ranks.  With smaller groups, two histories
can diverge by many steps.  The weights still end up equal, but only the last step of the abandoned
history is undone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import CheckpointError, ConfigurationError
from sparsync.feedback.agreed_setup import number_of
from sparsync.feedback.reducer import Position, Reducer
from sparsync.feedback.residual import Residual
from sparsync.feedback.shares import SharesState
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.agree import equalise_
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw

__all__ = ["Entry", "Members", "Verdict", "judge", "rest_of"]

# the number of group changes that a rank may miss; it is fixed, so that the receivers of a ``_brief``
# know its length
_PAST: Final = 32
# the number of attempts at one step for which this rank remembers its contribution, which may take a
# copy of n elements each
_ATTEMPTS: Final = 8
_MEASURED: Final = 10  # steps between measurements of the residual's norm (a pass over n elements)


class Entry(NamedTuple):
    """A rank's answer to the roll call."""

    # all fields are integers, because an entry is sent as a row of int64
    step: int  # the open step
    history: int  # the attempt that committed the last step; initially a digest of the weights
    prepared: int  # the attempt at the open step whose exchange this rank completed; 0: none
    behind: int  # 1: this rank is fetching its weights
    leaves: int  # 1: this rank's residual is dealt in the next step; 2: the next step is its last
    set_up: int  # a digest of everything that must be equal on all ranks
    clock: int = 0  # this rank's position in training, for stale ranks
    view: int = 0  # serial number of the last group whose roll this rank completed


class Verdict(NamedTuple):
    """The result of a roll call, the same on all ranks.

    Attributes:
        step: the next step to exchange.
        current: ranks whose weights belong to that step, once ``commits`` have committed.
        commits: ranks that must commit the previous step.
        stale: ranks that missed steps, or whose history differs; they start fetching weights.
        donor: the first current rank, preferably one that does not leave; weights are fetched from it.
        there: the first rank that has committed the previous step, even if that rank is behind.
    """

    step: int
    current: frozenset[int]
    commits: frozenset[int]
    stale: frozenset[int]
    donor: int
    there: int


def judge(entries: Sequence[Entry]) -> Verdict:
    """Decide which ranks continue, which must commit first, and which are stale.

    The candidates are the histories whose weights some rank holds and that end at most one step before
    the furthest of them.  The history with the latest group wins.  Ties go to the furthest history, then
    to the history with the most ranks that hold its weights, and then to the one with the lowest such
    rank.  Before the first step, ranks with equal weights share a history, so the most common weights
    win.

    Raises:
        CheckpointError: the ranks that had the latest weights have died; the others must not start over.

    Example:
        >>> fresh, ahead = Entry(0, 77, 0, 0, 0, 5), Entry(5, 9, 0, 0, 0, 5)
        >>> verdict = judge([fresh, ahead, Entry(4, 8, 9, 0, 0, 5)])
        >>> verdict.step, sorted(verdict.current), sorted(verdict.commits), sorted(verdict.stale)
        (5, [1, 2], [2], [0])
    """
    verdicts = []
    for step, history in dict.fromkeys((entry.step, entry.history) for entry in entries):
        there = {r for r, e in enumerate(entries) if (e.step, e.history) == (step, history)}
        # these ranks have all data of a step that other ranks have applied, so they apply the step too
        # and need not fetch weights
        commits = {
            rank
            for rank, entry in enumerate(entries)
            if entry.step == step - 1 and entry.prepared and entry.prepared == history
        }
        current = {rank for rank in there | commits if not entries[rank].behind}
        stale = set(range(len(entries))) - there - commits
        sets = frozenset(current), frozenset(commits), frozenset(stale)
        # ranks that are behind know a history but not its weights, so they cannot continue it alone
        if current:
            view = max(entries[rank].view for rank in there | commits)
            donor = min(current, key=lambda rank: (entries[rank].leaves > 0, rank))
            verdicts.append((view, Verdict(step, *sets, donor, min(there))))
    # A rank commits a step only with the votes of its whole group, so no rank of that group is more than
    # one step behind it.  A history that ends earlier belongs to ranks that were cut off, however recent
    # their last group is.
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
    """The changes to this rank's residuals if a certain attempt at a step is applied."""

    minus: list[Vector]  # delivered entries, by unit; empty if all ranks refused the attempt
    plus: list[tuple[int, slice, Tensor]]  # values dealt to this rank by leaving ranks
    deals: bool  # this rank leaves, and the rest of its residuals goes to other ranks
    scale: float  # the reducer's scale


class _Last(NamedTuple):
    """The last step that this rank has closed; a roll call may undo it, or apply another attempt."""

    step: int
    attempt: int  # the applied attempt; 0: none
    parts: dict[int, _Part]  # by attempt, for all attempts that this rank completed


@final
class Members:
    """A rank's view of the ranks that take the open step together.

    Args:
        reducer: a ``changing`` reducer.  It does not divide its totals; the divisor is ``contributors``.
        start: digest of all weights, trained and frozen, before the first step.
        set_up: digest of everything that must be equal on all ranks.

    Attributes:
        attempt: number of the current group, > 0.
        behind: this rank is fetching its weights; until it has them, its gradients do not count.
        first: the lowest rank with current weights.
        leaving: this rank wants to leave, which takes two steps.  In the first step, its residual is
            dealt to the other ranks.  In the second step, it contributes nothing; this step's commit
            shows that all ranks have applied the first.
        left: this rank has left.
        idle: this rank takes part without training until it has left, and cannot serve its weights.
        counts: this rank's gradient counts in the open step.
        deals: this rank's residual is dealt in the open step.
        clock: the position in training as a number; a stale rank takes over its peers' clock.
        newcomers: ranks whose gradients count from the next step on, but not in this step, with
            their donors.
        told: further numbers from all ranks' votes, by rank.
    """

    def __init__(self, reducer: Reducer, start: int, set_up: int = 0) -> None:
        self.reducer, self._set_up = reducer, set_up
        self.attempt, self.first, self.newcomers = 0, 0, dict[int, int]()
        self.behind = self._ready = self.leaving = self.left = self.idle = False
        # Each pair of a step and an attempt says that this attempt's group committed from that step on.
        # The first pair stands for the initial weights, so ranks that start from different weights have
        # different histories.
        self._past, self._prepared, self._view = [(-1, start)], 0, 0
        self._parts: dict[int, _Part] = {}  # of the open step, by earlier attempt
        self._last = _Last(-1, start, {})
        self.counts, self.deals, self.clock = True, False, 0
        self._spent = False  # whether this rank's residual was dealt to the others
        # Two tables with a row per rank, for the open step and for the next, as sent with votes:
        # whether the rank contributes, whether it leaves, its donor, and the norm of its residual some
        # steps ago. The open step is averaged, and may be repeated, with the rows of the previous vote.
        self._present = self._next = torch.tensor(
            [[1.0, 0, 0, 0]], dtype=torch.float64, device="cpu"
        )
        self._norm, self.told = 0.0, torch.zeros(1, 0, device="cpu")
        self._names: tuple[Hashable, ...] = ()  # names of the group's ranks
        self._lost: dict[Hashable, float] = {}  # norms of dead ranks' residuals, by name
        self._delivered: list[Vector] = []  # entries delivered in the prepared attempt, by unit
        # values dealt to this rank by ranks that leave with the open step
        self._dealt: list[tuple[int, slice, Tensor]] = []
        self._events: list[dict[str, Any]] = []

    @property
    def contributors(self) -> int:
        """The number of ranks whose gradients are in the averages of the open step."""
        return int(self._present[:, 0].sum())

    @property
    def fetching(self) -> bool:
        """Whether any rank is behind in the open step."""
        return bool(((self._present[:, 0] == 0) & (self._present[:, 1] == 0)).any())

    @property
    def spent(self) -> bool:
        """Whether the other ranks have received this rank's residual."""
        return self._spent

    # ---- a step ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Begin to leave, which takes the next two steps."""
        self.leaving = True

    def withdraw(self) -> None:
        """Begin to leave without further training: peers still get the residual, but no gradients."""
        self.leaving = self.idle = True
        self._ready = False

    def tell_clock(self, clock: int) -> None:
        """Record the position in training, which the next roll call passes on to stale ranks."""
        self.clock = clock

    def caught_up(self) -> None:
        """Record that this rank has taken over its peers' weights after the last step."""
        self.behind = False

    def count_only(self, came: Tensor) -> None:
        """Before the commit, remove ranks from ``contributors`` unless their gradients ``came``."""
        self._present = self._present.clone()
        self._present[:, 0] *= came

    async def vote(
        self, facts: Sequence[float] = (), *, donor: int = 0, ready: bool = False
    ) -> None:
        """Announce that this rank has all data of the open step, and wait until all ranks have done so.

        The vote also says whether this rank contributes to the next step, and whether the next step is
        its last.

        Args:
            facts: further numbers for ``told``; all ranks must give the same number of them.
            donor: the rank from which this rank fetches weights while it is behind.
            ready: this rank has fetched a copy and kept all averages since, so it is no longer behind
                from the next step on.

        Raises:
            CommunicationError: a vote did not arrive.
        """
        # Set ``_prepared`` before sending the vote: a rank that receives all votes may commit.  If this
        # rank is cut off now, it must be able to say at the next roll call that it was prepared.
        self._prepared, self._ready = self.attempt, ready and not self.idle
        reduced = self.reducer.reduced
        # save the delivered entries now: the reducer drops its results when the commit opens the
        # next step
        self._delivered = [reduced[unit].delivered for unit in range(len(reduced))]
        leaves = 2 if self.deals or self._spent else int(self.leaving)
        counts = (not self.behind or self._ready) and leaves < 2 and not self.idle
        if self.reducer.step % _MEASURED == 0 or not self._norm:
            kept = [torch.linalg.vector_norm(r.accumulated) for r in self.reducer.residuals]
            self._norm = math.hypot(*map(float, kept))
        told = [counts, leaves, donor, self._norm, *facts]
        # float64 represents ranks, flags and digests of up to 53 bits exactly
        mine = torch.tensor(told, dtype=torch.float64, device="cpu")
        rows = torch.stack(await self.reducer.channel("vote").allgather(mine, "vote"))
        own = len(told) - len(facts)
        self._next, self.told = rows[:, :own], rows[:, own:]
        new = (self._next[:, 0] > self._present[:, 0]).nonzero().flatten().tolist()
        self.newcomers = {rank: int(self._next[rank, 2]) for rank in new}

    def committed(self, step: int, *, still: bool, applied: bool = True) -> bool:
        """Advance to the step after ``step``, with the same group (``still``) or the last roll's group.

        If all ranks refuse a step (e.g. because of NaN), it is not ``applied``, and no rank leaves with
        this step.

        Returns:
            Whether this rank has caught up, so that its gradients count from the next step on.
        """
        if not applied:
            self._dealt, self.deals = [], False
            if still:
                # Residuals were not dealt, so leaving ranks deal them in the next step.  These ranks
                # still count in that step, although their votes had announced it as their last
                self._next[self._present[:, 1] == 1, :2] = 1.0
        arrived = still and self.behind and self._ready
        if arrived:
            self.behind = self._ready = False
        # Set ``left`` before ``_hand_over`` sets ``_spent``, so that a rank leaves one step after the
        # step in which its residual was dealt.  Only the votes of the later step show that all ranks have
        # applied the earlier one.
        self.left = self._spent
        part = self._applied() if applied else _Part([], [], False, 1.0)
        self._last = _Last(step, self._prepared, {**self._parts, self._prepared: part})
        self._parts, self._delivered = {}, []
        self._hand_over()
        # one entry covers all steps that a group commits, so the history grows with changes, not with
        # steps
        if self._past[-1][1] != self._prepared:
            self._past = [*self._past[1 - _PAST :], (step, self._prepared)]
        self._prepared = 0
        if still:
            self._count(self._next)
        else:
            self.go_on()
        return arrived

    def _hand_over(self) -> None:
        """Drop this rank's residual if it was dealt; add the residuals that were dealt to this rank."""
        if self.deals:
            self._spent = True
            for residual in self.reducer.residuals:
                residual.load(None)
        for unit, where, values in self._dealt:
            _add_to(self.reducer.residuals[unit], where, values)
        self._dealt = []

    def _applied(self) -> _Part:
        """Return the changes that applying the open step makes to this rank's residuals.

        ``_take_back`` can undo them.

        Nothing is copied unless this rank's residual is dealt or a unit was delivered completely.
        """
        minus, spare = list[Vector](), self._last.parts.get(self._last.attempt)
        for unit, residual in enumerate(self.reducer.residuals):
            delivered = self._delivered[unit]
            # compare types first, as in ``Residual.retain``: reading ``values`` of a vector held in
            # messages decodes the messages
            if type(delivered) is DenseVector and delivered.values is residual.accumulated:
                # Everything was delivered, and the next gradients will overwrite the buffer.  The copy
                # reuses the memory of the last step's copy, since that step is final: fresh memory costs
                # more than the copying itself.
                former = spare.minus[unit] if spare and spare.minus else None
                delivered = DenseVector(_copy_of(residual.accumulated, former))
            if self.deals:
                # accumulated = delivered + residual; the residual went to other ranks, so this rank keeps
                # nothing of ``accumulated``
                rest = residual.value
                all_of_it = delivered.to_dense()
                delivered = DenseVector(all_of_it if rest is None else all_of_it + rest)
            minus.append(delivered)
        return _Part(minus, self._dealt, self.deals, self.reducer.scale)

    async def end(self, *, whole: bool = True) -> bool:
        """Return whether all ranks have ended with ``whole`` weights, i.e. none still has to fetch them.

        Raises:
            CommunicationError: a rank has died, or has not committed the last step.
        """
        comm = self._those_at_the_end()
        if comm is None:
            return True
        rows = await comm.allgather(torch.tensor([int(whole)], device="cpu"), "end")
        return all(map(bool, rows))

    async def equalise(self, tensors: Mapping[str, Tensor]) -> None:
        """At the end, copy one rank's tensors to all ranks; wait until all ranks have them.

        Raises:
            CommunicationError: a rank has died.
            ConfigurationError: the names or shapes of this rank's tensors differ.
        """
        comm = self._those_at_the_end()
        if comm is None:
            return
        # compare names here, because a CommunicationError from ``equalise_`` would make ranks try again
        names = await comm.allgather(
            torch.tensor([number_of(" ".join(tensors))], device="cpu"), "end"
        )
        if not torch.equal(names[0], names[comm.rank]):
            raise ConfigurationError(
                f"rank {self.reducer.comm.rank} ends with other buffers than the others, so they cannot "
                "be made equal: another name or shape; register buffers alike on all ranks"
            )
        await equalise_(comm, tensors)
        # if a rank dies before this message, all ranks notice
        await comm.allgather(torch.tensor([1], device="cpu"), "end")

    def _those_at_the_end(self) -> Communicator | None:
        """Return the group of all ranks that reach the end; None if this rank does not."""
        # ranks that leave after this step do not reach the end, so the other ranks must not wait for them
        leaves = self._present[:, 1].tolist()
        if leaves[self.reducer.comm.rank] == 2:
            return None
        there = [rank for rank, when in enumerate(leaves) if when < 2]
        # put first a rank that was not behind: if the end is repeated, other ranks may already have its
        # tensors
        there.sort(key=lambda rank: rank != self.first)
        return Subgroup(self.reducer.channel("vote"), there)

    def _count(self, rows: Tensor) -> None:
        """Record which ranks contribute to the open step, and which ranks leave after it."""
        counts, leaves, *_ = rows[self.reducer.comm.rank].tolist()
        self._present, self.counts, self.deals = rows, counts == 1, leaves == 1

    async def deal(self) -> None:
        """Deal the residuals of leaving ranks to the staying ranks, element by element, in turn.

        Raises:
            CommunicationError: a rank has died.

        Cost: n elements sent by each leaving rank.
        """
        comm = self.reducer.channel("roll")
        leaves = self._present[:, 1].tolist()
        stay = [rank for rank, when in enumerate(leaves) if not when]
        # only record dealt values here: the commit adds them, and if the attempt is abandoned, they are
        # dealt again
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
        """Determine, in a new group of ranks with these names, which ranks continue, and at which step.

        This brings the reducer to that step.  Ranks in ``commits`` must then commit the open step
        without a new exchange.  ``serial`` grows with every group, unless the lighthouse is restarted.

        Raises:
            CommunicationError: a further rank has died; call the roll again.
            CheckpointError: see ``judge``.
            ConfigurationError: this rank's set-up differs from the set-up of the ranks that continue.
        """
        reducer, self.attempt = self.reducer, attempt
        # The roll is outside of any step.  Messages are matched by the ledger's step, but ranks may be
        # at different steps, so on all ranks this channel has a fresh ledger.
        comm = reducer.channel("roll").apart()
        history = self._past[-1][1]
        leaves = 2 if self._spent else int(self.leaving)
        prepared, behind = self._prepared, int(self.behind)
        place = history, prepared, behind, leaves, self._set_up, self.clock, self._view
        mine = Entry(reducer.step, *place)
        told = await comm.allgather(torch.tensor(mine, dtype=torch.int64, device="cpu"), "roll")
        entries = [Entry(*row.tolist()) for row in told]
        verdict = judge(entries)
        self.first = verdict.donor
        if entries[comm.rank].set_up != entries[verdict.donor].set_up:
            raise ConfigurationError(
                f"rank {comm.rank} is set up differently from rank {verdict.donor} and those that "
                "continue with it: another model, algorithm, density or version; attach alike on "
                "all ranks"
            )
        if comm.rank in verdict.stale:
            # use the furthest clock: ranks of this history that have not started the open exchange yet
            # still report the clock of the previous exchange
            first = entries[verdict.there]
            alike = [e for e in entries if (e.step, e.history) == (first.step, first.history)]
            self.clock = max(entry.clock for entry in alike)
        # look norms up by name before ``_note`` stores the new names, because ranks are renumbered
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
                leaves = 1  # the step in which the rank's residual was dealt is not in this history
            counts = rank in verdict.current and leaves < 2
            rows.append([counts, leaves, verdict.donor, norms.get(names[rank], 0)])
        self._next = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self.newcomers = {}
        # a restarted lighthouse counts from the beginning, but views must still grow
        self._view = max(serial, 1 + max(entry.view for entry in entries))
        if comm.rank not in verdict.commits:
            self._set_aside()
            self.go_on()
        return verdict

    def go_on(self) -> None:
        """Plan the open step for the group whose roll was called."""
        self._dealt = []
        self._count(self._next)
        self._norm = 0.0  # measured again in the next step: this group has not voted on it yet
        # regroup last, because thresholds, regions and shares are planned for the ranks of this group
        self.reducer.regroup()

    async def _brief(self, comm: Communicator, verdict: Verdict) -> None:
        """Send the state of the exchange to stale ranks; on a stale rank, receive and adopt it."""
        reducer, shares = self.reducer, self.reducer.plan.shares
        if comm.rank == verdict.there:
            key = -1 if shares.key is None else shares.key
            past = [number for pair in self._past for number in pair]
            # the history is padded to the fixed length with its last pair; ``dict.fromkeys`` below
            # drops duplicates
            past += past[-2:] * (_PAST - len(self._past))
            for rank in sorted(verdict.stale):
                numbers = [verdict.step, *past, reducer.skipped, key, *shares.quotas]
                raw = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)
                await comm.isend(raw, rank, "brief", Raw("control"))
        elif comm.rank in verdict.stale:
            count = 3 + 2 * _PAST + len(reducer.units)
            step, *rest = await _numbers_from(comm, verdict.there, count)
            past, (skipped, key, *quotas) = rest[: 2 * _PAST], rest[2 * _PAST :]
            self._past = list(dict.fromkeys(zip(past[::2], past[1::2], strict=True)))
            # a unit's k must be equal on all ranks, because message lengths depend on it
            shares = SharesState(tuple(quotas), None if key < 0 else key)
            self._adopt(Position(step, skipped, shares))
            self.behind = True

    # ---- a change of history -----------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Remember the changes of the prepared attempt, because a rank may already have applied them."""
        if self._prepared:
            reducer, minus, plus = self.reducer, list[Vector](), [*self._dealt]
            # with NaN or Inf in the totals, any rank that commits this attempt refuses the step
            if any(
                self._is_broken(reducer.reduced[unit].total) for unit in range(len(reducer.units))
            ):
                plus = []
            else:
                for residual, delivered in zip(reducer.residuals, self._delivered, strict=True):
                    whole = type(delivered) is DenseVector
                    if self.deals or (whole and delivered.values is residual.accumulated):
                        # copy the values, because the buffer keeps accumulating gradients
                        delivered = DenseVector(residual.accumulated.clone())
                    minus.append(delivered)
            while len(self._parts) >= _ATTEMPTS:
                del self._parts[next(iter(self._parts))]
            self._parts[self._prepared] = _Part(minus, plus, self.deals, reducer.scale)
        self._prepared, self._delivered = 0, []

    def _adopt(self, position: Position) -> None:
        """Close the open step; bring the reducer to its peers' step, and residuals to their history."""
        reducer, last = self.reducer, self._last
        closed, step = reducer.step, position.step
        self._set_aside()
        by = _attempt_of(closed, self._past, step) or 0
        part = self._parts.get(by)
        for residual in reducer.residuals:
            # A step refused because of NaN is undone.  Otherwise its gradients stay in the residual.  If
            # this rank completed the attempt that its peers have applied, ``_apply`` subtracts the
            # entries that this attempt delivered.
            refused = part is not None and not part.minus
            broken = part is None and self._is_broken(DenseVector(residual.accumulated))
            if refused or broken:
                residual.restore()
        reducer.regroup(position)
        if part is not None:
            self._apply(part)
        else:
            # Peers may have applied this rank's last closed step in a different attempt.  If so, undo
            # the changes of this rank's attempt, and apply the changes of the peers' attempt.
            holds = _attempt_of(last.step, self._past, step)
            if holds is not None and holds != last.attempt:
                self._take_back(last.parts.get(last.attempt))
                self._apply(last.parts.get(holds))
                self._last = last = last._replace(attempt=holds)
        if step > closed:
            self._last, self._parts = _Last(closed, by, self._parts), {}
        elif step < closed:
            # the reopened step is the last step that was closed here, or an older step, whose attempts
            # are forgotten
            self._parts = last.parts if step == last.step else {}
            self._last = _Last(-1, 0, {})

    def _apply(self, part: _Part | None) -> None:
        """Update residuals as the commit would, for a step that only this rank's peers have applied."""
        if part is None or not part.minus:
            return
        self._add(part, 1.0)
        self._spent = self._spent or part.deals

    def _take_back(self, part: _Part | None) -> None:
        """Undo a step in the residuals, because this rank's peers have not applied it."""
        if part is None or not part.minus:
            return
        self._add(part, -1.0)
        self._spent = self._spent and not part.deals

    def _add(self, part: _Part, sign: float) -> None:
        """Add an attempt's changes to the residuals, or subtract them."""
        # residuals have the GradScaler's current scale, but ``part`` has the scale of its step
        factor = sign * self.reducer.scale / part.scale
        for residual, vector in zip(self.reducer.residuals, part.minus, strict=True):
            _add_to(residual, slice(None), -factor * vector.to_dense())
        for unit, where, values in part.plus:
            _add_to(self.reducer.residuals[unit], where, factor * values)

    def _is_broken(self, vector: Vector) -> bool:
        """Return whether an exchanged or accumulated vector contains NaN or Inf."""
        return vector.first_nonfinite(self.reducer.residuals[0].accumulated.dtype) is not None

    # ---- numbers for the user ----------------------------------------------------------------------

    def _note(self, names: tuple[Hashable, ...], verdict: Verdict) -> None:
        """Record the ranks that joined and left, for ``state``."""
        rows = zip(
            self._names, self._present.tolist(), strict=len(self._names) == len(self._present)
        )
        gone = {name: row for name, row in rows if name not in names}
        # ranks that disappear in their last step have left properly: their residual was already dealt
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
        """Return plain numbers: the current ranks, and all changes of the group.

        Every entry of "changes" states the step, the number of ranks from then on, and how many joined,
        left and died.  "lost_norm" is the norm of the residuals of dead ranks, measured at most 10 steps
        before their death.  A rank that was only presumed dead may return with its residual.  It is then
        counted in "back", and its norm is removed from "lost_norm".
        """
        return {
            "ranks": len(self._present),
            "contributors": self.contributors,
            "behind": self.behind,
            "lost_norm": math.hypot(*self._lost.values()),
            "changes": [dict(event) for event in self._events],
        }


# ---- operations on residuals that only a change of ranks needs ---------------------------------------


def rest_of(residual: Residual, delivered: Vector) -> Tensor:
    """Return the residual that committing the open step would leave, without changing anything."""
    # compare types first, as in ``Residual.retain``: reading ``values`` of a vector held in messages
    # decodes the messages
    if type(delivered) is DenseVector and delivered.values is residual.accumulated:
        return torch.zeros_like(residual.accumulated)
    rest = residual.accumulated.clone()
    delivered.subtract_from_(rest)
    return rest


def _add_to(residual: Residual, where: slice, values: Tensor) -> None:
    """Add values to a residual, which may be empty; call this only between steps."""
    whole = residual.accumulated
    if residual.value is None:
        whole.zero_()
    whole[where] += values
    residual.load(whole)  # this copies nothing, but marks the residual as nonzero


def _copy_of(values: Tensor, former: Vector | None) -> Tensor:
    """Return a copy of values, in the memory of a former copy if possible."""
    fits = type(former) is DenseVector and former.values.shape == values.shape
    if former is None or not fits or former.values is values:
        return values.clone()
    return former.values.copy_(values)


def _attempt_of(step: int, past: Sequence[tuple[int, int]], end: int) -> int | None:
    """Return the attempt that committed a step; 0 from ``end`` on; None if the step is too old.

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
