"""Make one decision for all parts of a replica: shards, pipeline stages, tensor-parallel ranks.

Ranks that exchange with each other see the same totals and make the same decision without a message.
Ranks that hold other parts of the same replica see different totals.  If one part refuses a step, all
parts must refuse it.

Without DDP, the ranks also agree on the parameters that any of them used.  A gradient must not be None
on one rank and zeros on another: weight decay and momentum skip None, so replicas would drift apart, and
a norm over shards would wait for the ranks where the gradient is None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

from sparsync.errors import CommunicationError, PeerError
from sparsync.feedback.step import Proposal
from sparsync.sparse import DenseVector
from sparsync.transports.agree import Outcome, worst
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run

__all__ = ["PartsConsensus"]

# A part's step has one of three outcomes: all totals are finite, a total contains NaN or Inf, or the
# exchange raised an error.  An error is the worst, because that part has no total to apply.
_FINE, _BROKEN, _FAILED = 0, 1, 2


@final
class PartsConsensus:
    """Asks the other parts of this replica before a step is committed (``sparsync.feedback.step``).

    Args:
        parts: the ranks that hold the parts of this replica, including this one; all of them must
            construct the consensus together.
        keys: a 64-bit number for each parameter of this part, by name.  The order is the same on all
            replicas of the part, and the number is the same on all parts that hold the parameter.  With
            None, the use of parameters is not tracked.

    Attributes:
        used: names of the parameters that have a gradient, once a step is committed.
        came: for every replica of this part, whether it used any parameter in the open step.

    Cost: the cost of ``worst`` over the parts, i.e. 9 bytes per part and step.  With keys, one more byte
    per parameter, which an allgather sends to all replicas.  If there is a parameter that no rank used,
    a second allgather sends these bytes to all parts.
    """

    def __init__(self, parts: Communicator, keys: Mapping[str, int] | None = None) -> None:
        self.parts, self._names = parts, list(keys or ())
        mine = torch.tensor(list((keys or {}).values()), dtype=torch.int64, device="cpu")
        every = mine
        if keys is not None:
            # Parts hold different parameters, but all build the same sorted list of keys, so a position
            # in it means the same parameter everywhere.  An allgather needs equal lengths, so short lists
            # repeat their first key, which ``unique`` drops.
            counts = run(parts.allgather(torch.tensor([len(mine)], device="cpu"), "groups"))
            padding = mine[:1].expand(int(torch.stack(counts).max()) - len(mine))
            every = torch.unique(
                torch.cat(run(parts.allgather(torch.cat([mine, padding]), "groups")))
            )
        self._places = torch.searchsorted(every, mine)
        # which of all parts' parameters the step used, as far as this part knows
        self._marks = torch.zeros(len(every), dtype=torch.bool, device="cpu")
        self.used: set[str] = set()
        self.came = torch.ones(1, dtype=torch.bool, device="cpu")

    async def share_used(self, replicas: Communicator, used: Collection[str]) -> None:
        """Exchange with the other replicas of this part which parameters each rank used."""
        mine = torch.tensor([name in used for name in self._names], dtype=torch.bool, device="cpu")
        everyone = torch.stack(await replicas.allgather(mine, "used"))
        self.came = everyone.any(1)
        # the marks cover only this part; ``_ask`` sends them to the other parts with the outcome
        self._marks.zero_()
        self._marks[self._places] = everyone.any(0)

    def __call__(self, proposal: Proposal) -> str | None:
        """Return the name of a parameter that is not finite on any part, or None to apply the step.

        Raises:
            PeerError: the exchange of another part failed.
        """
        # a message is sent even if all totals are finite here, because other parts may have failed
        broken = proposal.broken()
        found = self._ask(proposal.step, _FINE if broken is None else _BROKEN, broken or "")
        if found.severity == _FAILED:
            raise PeerError(
                f"rank {proposal.rank}, {proposal.place}: {_failure(found)}; no part applied the step"
            )
        broken, marks = found.words if found.severity else None, found.marks
        if broken is not None:  # "propagate" makes every gradient NaN; other policies leave none
            marks = torch.ones_like(marks)
        # A parameter that was not used in this step may still receive a delayed residual, on any part.
        # This branch sends a message.  All parts have received the same marks, so either all of them take
        # it or none does.
        elif not bool(marks.all()):
            mine = torch.zeros_like(marks)
            mine[self._places] = self._delivered(proposal, self._named(~marks))
            marks |= torch.stack(run(self.parts.allgather(mine, "verdict"))).any(0)
        self.used = self._named(marks)
        return broken

    def fail(self, step: int) -> None:
        """Tell the other parts that this part's exchange failed, so that none commits or waits."""
        # if the other parts have died too, only the first error must be reported
        with suppress(CommunicationError):
            self._ask(step, _FAILED, "")

    def on_any(self, here: bool) -> bool:
        """Return whether ``here`` is true on this part or any other.

        Raises:
            PeerError: another part failed, and called ``fail`` instead of this method.
        """
        found = self._ask(self.parts.ledger.step, _BROKEN if here else _FINE, "")
        if found.severity == _FAILED:
            raise PeerError(_failure(found))
        return found.severity > _FINE

    def _ask(self, step: int, outcome: int, name: str) -> Outcome:
        # the parts' communicator has its own ledger, which must name the reducer's step in errors
        self.parts.ledger.begin_step(step)
        return run(worst([self.parts], outcome, name, "verdict", self._marks))

    def _named(self, marks: Tensor) -> set[str]:
        """Return the marked parameters held by this part."""
        pairs = zip(self._names, marks[self._places].tolist(), strict=True)
        return {name for name, marked in pairs if marked}

    def _delivered(self, proposal: Proposal, names: Collection[str]) -> Tensor:
        """Mark the parameters of this part that are in ``names`` and receive a nonzero value."""
        found = set()
        for unit, total in zip(proposal.units, proposal.totals, strict=True):
            for slot in (slot for slot in unit.slots if slot.name in names):
                end = slot.start + slot.size
                if isinstance(total, DenseVector):
                    values = total.values[slot.start : end]
                else:
                    values = total.split([slot.start, end])[0].values
                if bool(values.any()):
                    found.add(slot.name)
        return torch.tensor([name in found for name in self._names], dtype=torch.bool, device="cpu")


def _failure(found: Outcome) -> str:
    return f"the exchange of part {found.rank} of this replica failed; its own error says why"
