"""A second copy of every residual, on another rank: a rank that is killed takes little along.

Sorted by name, the ranks that stay are a ring.  Each is the *keeper* of the one before it, its *ward*.
After every applied step both hold the same ``copy`` of the ward's residual.  While the next gradients are
computed, the ward sends what the copy lacks, in two bits per element::

    copy <- copy + round(residual - copy) - delivered      with the next step, by both, bit for bit

So the copy lacks one step's gradient, and what rounding has left of those before.  The error of rounding
is 0.34 of the norm of what is rounded where that is normally distributed, hence ``|residual - copy|`` is
at most 1.53 times the largest norm of a gradient.

Copies belong to the step: they change when it is applied, and not when it is refused or done again.  When
a step is applied without a rank that was in the last one, its keeper adds the copy to its own residual.
Everyone in the group knows that; so the rank, if it was only away, is told, and gives that part up.

Where every element is delivered, rounded (as by default for updates), a residual is only what one
exchange has rounded away, and is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.feedback.reducer import Reducer
from sparsync.feedback.residual import Residual
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Raw
from sparsync.wire import Coo, LloydMax

__all__ = ["Buddy", "Copied"]

_CODEC: Final = LloydMax(bits=2)
_KNOWN: Final = 100  # absent ranks whose copies were taken over that are remembered
_NONE: Final = (-1, 0)  # no step, by no group


class Copied(NamedTuple):
    """The copies' part of one attempt at a step, as exchanged."""

    group: tuple[int, ...]  # its ranks' numbers
    ring: list[int]  # those that stay
    # by unit, what this rank has delivered, None standing for all; nothing: its copy begins again
    delivered: list[SparseVector | None]
    payloads: list[Tensor]  # of the ward; none: its copy begins again
    subtract: list[SparseVector | None]  # what the ward has delivered


@final
class _Change:
    """``copy <- factor (copy + payload) - delivered`` of every unit, and its inverse.

    Zeros without a payload, or where all was delivered; None stands for them.
    """

    def __init__(
        self,
        copies: list[Tensor | None],
        payloads: Sequence[Tensor],
        delivered: Sequence[SparseVector | None],
        factor: float,
    ) -> None:
        self.before, self.payloads, self.factor = copies, payloads, factor
        self.delivered = delivered if payloads else [None] * len(copies)

    def make(self, residuals: Sequence[Residual]) -> list[Tensor | None]:
        """Return the copies afterwards, most of them changed in place."""
        after = list[Tensor | None]()
        for unit, vector in enumerate(self.delivered):
            copy = None
            if vector is not None:
                copy = self.before[unit]
                copy = torch.zeros_like(residuals[unit].accumulated) if copy is None else copy
                _CODEC.decode_to(self.payloads[unit].to(copy.device), copy, add=True)
                if self.factor != 1.0:
                    copy.mul_(self.factor)
                vector.to(copy.device).subtract_from_(copy)
            after.append(copy)
        return after

    def undo(self) -> list[Tensor | None]:
        """Return the copies before, but for rounding."""
        for unit, vector in enumerate(self.delivered):
            if vector is not None and (copy := self.before[unit]) is not None:
                copy.neg_()
                vector.to(copy.device).subtract_from_(copy)
                copy.div_(self.factor)
                _CODEC.decode_to(self.payloads[unit].to(copy.device), copy, add=True)
                copy.neg_()
        return self.before


class _Concluded(NamedTuple):
    """The last step's change, and what was before."""

    fields: dict[str, Any]
    mine: _Change
    theirs: _Change
    takes: bool  # the ward's copy was taken over


@final
class Buddy:
    """Both ends of a rank's copies: of its own residual, which its keeper has, and of its ward's.

    Attributes:
        keepers: of the ranks that applied the last step and stay, by number: their keepers.
        taken: absent ranks whose copies were taken over.
        exposed: norm of the part of the residual that the keeper does not have; None: it has nothing.
        copied: what the last attempt at the open step has exchanged.

    Memory: two buffers of n elements, one of which equals the keeper's; none where all is delivered.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.keepers: dict[int, int] = {}
        self.taken: dict[int, None] = {}
        self.exposed: float | None = None
        self._applied = _NONE  # the last step, and the group that applied it
        self._own = self._keeper = self._ward = 0  # numbers; 0: none
        # None stands for zeros
        self._mine: list[Tensor | None] = [None] * len(reducer.units)
        self._theirs: list[Tensor | None] = [None] * len(reducer.units)
        self._scale = reducer.scale  # of both
        self._leaves_some = False  # of the last step, some entries were not delivered at all
        self._rest: list[Tensor] | None = None  # the payloads of the open step, by unit
        self._started: tuple[int, int] | None = None  # the step and group they were sent in
        self._sending: list[Operation] = []
        self.copied: Copied | None = None
        self._concluded: _Concluded | None = None

    # ---- the open step -----------------------------------------------------------------------------

    def encode(self) -> None:
        """Round what the keeper does not have yet; call it between steps."""
        residuals = self.reducer.residuals
        if self._rest is not None or not (self._keeper and self._leaves_some):
            return
        lacking, rest = 0.0, []
        for residual, mine in zip(residuals, self._mine, strict=True):
            lacks = residual.accumulated
            if residual.empty:
                lacks = torch.zeros_like(lacks)
            if mine is not None:
                lacks = lacks - mine
            lacking += float(torch.linalg.vector_norm(lacks)) ** 2
            rest.append(_CODEC.written(lacks).cpu())
        self._rest, self.exposed = rest, lacking**0.5

    def start(
        self, comm: Communicator, group: Sequence[int], ring: list[int], attempt: int
    ) -> None:
        """Begin to send, for the open step and this group, of which those in the ring stay."""
        step, self._own = self.reducer.step, group[comm.rank]
        keeper, ward = _neighbours(ring, self._own)
        if self._started == (step, attempt) or not keeper:
            return
        self._sending.clear()  # of a group that is no more
        self._send(comm, group.index(keeper), self._mark(self._keeper, self._rest is not None))
        for payload in self._rest or ():
            self._send(comm, group.index(keeper), payload)
        self._send(comm, group.index(ward), self._mark(self._ward))
        self._started = step, attempt

    async def exchange(
        self, comm: Communicator, group: Sequence[int], ring: list[int], attempt: int
    ) -> None:
        """Take in what the ward sends, and tell the keeper what this rank has delivered."""
        self.start(comm, group, ring, attempt)
        own = group[comm.rank]
        keeper, ward = _neighbours(ring, own)
        whole = [self.reducer.reduced[unit].delivered for unit in range(len(self.reducer.units))]
        mine = [one if isinstance(one, SparseVector) else None for one in whole]
        self._leaves_some = any(one is not None for one in mine)
        if not keeper:
            self.copied = Copied(tuple(group), ring, [], [], [])
            return
        above, below = group.index(keeper), group.index(ward)
        residuals = self.reducer.residuals
        *held, has = await _numbers(comm, below, 4)
        sizes = [_CODEC.nbytes(r.accumulated.numel(), r.accumulated.numel()) for r in residuals]
        payloads = [await comm.irecv(below, n, "copy", Raw("value")) for n in sizes if has]
        known = await _numbers(comm, above, 3)
        delivered, subtract = list[SparseVector | None](), list[SparseVector | None]()
        if self._rest is not None and (self._keeper, known) == (keeper, [own, *self._applied]):
            self._tell(comm, above, mine)
            delivered = mine
        if has and (self._ward, held) == (ward, [own, *self._applied]):
            counts = await _numbers(comm, below, len(residuals))
            for residual, count in zip(residuals, counts, strict=True):
                if count < 0:
                    subtract.append(None)
                    continue
                size, dtype = residual.accumulated.numel(), residual.accumulated.dtype
                nbytes = Coo().nbytes(count, size, dtype)
                raw = await comm.irecv(below, nbytes, "copy", Raw("value"))
                subtract.append(Coo().decode(raw, size))
        else:
            payloads = []
        for operation in self._sending:
            await operation
        self._sending.clear()
        self.copied = Copied(tuple(group), ring, delivered, payloads, subtract)

    def _mark(self, other: int, *has: bool) -> Tensor:
        """Return whose copy this rank has, or who has its own, and of when it is."""
        return torch.tensor([other, *self._applied, *has], dtype=torch.int64)

    def _tell(
        self, comm: Communicator, dest: int, delivered: Sequence[SparseVector | None]
    ) -> None:
        """Send what was delivered of every unit; None where nothing is left, or only its rounding."""
        counts = [-1 if one is None else one.nnz for one in delivered]
        self._send(comm, dest, torch.tensor(counts, dtype=torch.int64))
        for one in delivered:
            if one is not None:
                self._send(comm, dest, Coo().encode(one).payload)

    def _send(self, comm: Communicator, dest: int, payload: Tensor) -> None:
        raw = payload.cpu().view(torch.uint8)
        self._sending.append(comm.isend(raw, dest, "copy", Raw("value")))

    # ---- when it is applied ------------------------------------------------------------------------

    def conclude(self, step: int, attempt: int, copied: Copied | None = None) -> None:
        """Bring the copies to the end of a step that was applied, and take over those of absent ranks.

        ``copied`` is what the attempt that was applied has exchanged, by default the last one.
        """
        this, factor, own = copied or self.copied, self.reducer.scale / self._scale, self._own
        assert this is not None
        names = "keepers", "taken", "_applied", "_scale", "_keeper", "_ward", "_rest"
        fields = {name: getattr(self, name) for name in names}
        lost = [one for one in self.keepers if one not in this.group]
        lost = [one for one in lost if self.keepers[one] in this.ring]
        if takes := own in [self.keepers[one] for one in lost]:
            self._add(self._theirs, factor)
        taken = [one for one in [*self.taken, *lost] if one not in this.group]
        self.taken = dict.fromkeys(taken[-_KNOWN:])
        rest = self._rest if this.delivered and self._rest is not None else []
        mine = _Change(self._mine, rest, this.delivered, factor)
        theirs = _Change(self._theirs, this.payloads, this.subtract, factor)
        residuals = self.reducer.residuals
        self._mine, self._theirs = mine.make(residuals), theirs.make(residuals)
        self._concluded = _Concluded(fields, mine, theirs, takes)
        self._keeper, self._ward = _neighbours(this.ring, own)
        self.keepers = {one: _neighbours(this.ring, one)[0] for one in this.ring}
        self._applied, self._scale = (step, attempt), self.reducer.scale
        self.copied = self._rest = self._started = self.exposed = None

    def take_back(self) -> None:
        """Undo the last ``conclude``: others have not applied that step."""
        if self._concluded is None:
            return
        fields, mine, theirs, takes = self._concluded
        self._mine, self._theirs, self._concluded = mine.undo(), theirs.undo(), None
        for name, value in fields.items():
            setattr(self, name, value)
        if takes:
            self._add(self._theirs, -self.reducer.scale / self._scale)

    def known(self) -> list[int]:
        """Return what a rank that was away is told: two counts, pairs of the keepers, absent ranks."""
        pairs = [number for pair in self.keepers.items() for number in pair]
        return [len(pairs), len(self.taken), *pairs, *self.taken]

    def return_to(self, numbers: Sequence[int], own: int) -> None:
        """Go on with the others: give up what was taken over, and hold what they have told."""
        pairs, absent, rest = numbers[0], numbers[1], list(numbers[2:])
        self.keepers = dict(zip(rest[:pairs:2], rest[1:pairs:2], strict=True))
        self.taken = dict.fromkeys(rest[pairs : pairs + absent])
        if own in self.taken:
            self._add(self._mine, -self.reducer.scale / self._scale)
            self._mine = [None] * len(self._mine)
        self._keeper = self._ward = 0  # copies begin again with the next step that is applied
        self._rest = self._started = self.exposed = self._concluded = None

    def _add(self, copies: Sequence[Tensor | None], factor: float) -> None:
        """Add copies to this rank's residual, multiplied."""
        for residual, copy in zip(self.reducer.residuals, copies, strict=True):
            if copy is not None:
                residual.add(slice(None), copy * factor)


def _neighbours(ring: Sequence[int], own: int) -> tuple[int, int]:
    """Return a rank's keeper and its ward; 0 where it has none.

    Example:
        >>> _neighbours([3, 5, 8], 8), _neighbours([3, 5, 8], 4), _neighbours([3], 3)
        ((3, 5), (0, 0), (0, 0))
    """
    if own not in ring or len(ring) < 2:
        return 0, 0
    at = ring.index(own)
    return ring[(at + 1) % len(ring)], ring[at - 1]


async def _numbers(comm: Communicator, source: int, count: int) -> list[int]:
    raw = await comm.irecv(source, 8 * count, "copy", Raw("value"))
    numbers: list[int] = raw.clone().view(torch.int64).tolist()
    return numbers
