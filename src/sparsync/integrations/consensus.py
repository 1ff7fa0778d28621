"""One decision for all parts of a replica: shards, stages and whoever else holds other parameters.

Ranks that exchange with each other see the same totals and decide alike without a message.  Ranks that
hold other parts of the same replica do not: if one part refuses a step, all must.

Without DDP they also agree which parameters anybody used.  A gradient must not be None on one rank and
zeros on another: weight decay and momentum skip None, so replicas would drift apart, and norms over
shards would wait for shards that have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final, final

import torch
from torch import Tensor

from sparsync.errors import CommunicationError, PeerError
from sparsync.feedback.step import Proposal
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.units import Slot

__all__ = ["KEY_BYTES", "PartsConsensus"]

KEY_BYTES: Final = 8
_NAME_BYTES: Final = 120  # of a parameter's name that travel
_FINE, _BROKEN, _FAILED = 0, 1, 2


@final
class PartsConsensus:
    """Asks the other parts of this replica before a step is committed (``sparsync.feedback.step``).

    Args:
        parts: the ranks that hold them, this one included; all construct it together.
        keys: of this part's parameters by name, in the same order on all its replicas; a parameter has
            the same key, of ``KEY_BYTES`` bytes, on all parts that hold it.  None: whether parameters
            are used is not asked.

    Attributes:
        used: names of the parameters that have a gradient, once a step is committed.

    Cost: an allgather of 121 bytes per part and step.  With keys a bit per parameter more; another
    allgather of these bits over the replicas, under way with the exchanges; and one more over the parts
    if nobody used some parameter.
    """

    def __init__(self, parts: Communicator, keys: Mapping[str, bytes] | None = None) -> None:
        self.parts = parts
        everywhere = [] if keys is None else sorted(_gathered(parts, list(keys.values())))
        place = {key: i for i, key in enumerate(everywhere)}
        self._place = {name: place[key] for name, key in (keys or {}).items()}
        self._names, self._count = list(self._place), len(everywhere)
        self.used: set[str] = set()
        self._marks = self._packed(())  # parameters that some replica of this part has used

    async def share_used(self, replicas: Communicator, used: Collection[str]) -> None:
        """Learn from the other replicas of this part which parameters they used.

        Args:
            replicas: a channel to them.
            used: names of the parameters that this rank used.
        """
        mine = _packed((i for i, name in enumerate(self._names) if name in used), len(self._names))
        everyone = await replicas.allgather(_tensor(mine), "used")
        marks = _merged(bytes(theirs.tolist()) for theirs in everyone)
        self._marks = self._packed(name for i, name in enumerate(self._names) if marks >> i & 1)

    def __call__(self, proposal: Proposal) -> str | None:
        """Return the name of a parameter that is not finite, on whatever part; None: apply the step.

        Raises:
            PeerError: the exchange of another part failed.
        """
        broken = proposal.broken()
        outcome = _FINE if broken is None else _BROKEN
        answers = self._ask(proposal.step, outcome, broken or "")
        for rank, (theirs, name, _) in enumerate(answers):
            if theirs == _FAILED:
                raise PeerError(
                    f"rank {proposal.rank}, step {proposal.step}: the exchange of part {rank} of this "
                    "replica failed, its own error says why; no part applied the step"
                )
            if theirs == _BROKEN and broken is None:
                broken = name
        marks = _merged(marks for _, _, marks in answers)
        complete = (1 << self._count) - 1
        if broken:  # every gradient becomes NaN, or none is left
            marks = complete
        elif marks != complete:  # every part sees that
            unused = {name for name in self._names if not marks >> self._place[name] & 1}
            mine = self._packed(_delivered(proposal, unused))
            everyone = run(self.parts.allgather(_tensor(mine), "verdict"))
            marks |= _merged(bytes(theirs.tolist()) for theirs in everyone)
        self.used = {name for name in self._names if marks >> self._place[name] & 1}
        return broken

    def fail(self, step: int) -> None:
        """Tell the other parts that this one's exchange failed, so that none commits or waits."""
        with suppress(CommunicationError):  # they may be gone, too: the first error counts
            self._ask(step, _FAILED, "")

    def _ask(self, step: int, outcome: int, name: str) -> list[tuple[int, str, bytes]]:
        """Return every part's outcome, name and marks."""
        self.parts.ledger.begin_step(step)
        text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        mine = _tensor(bytes([outcome, *text, *self._marks]))
        answers = []
        for theirs in run(self.parts.allgather(mine, "verdict")):
            message = bytes(theirs.tolist())
            text, marks = message[1 : 1 + _NAME_BYTES], message[1 + _NAME_BYTES :]
            answers.append((message[0], text.rstrip(b"\0").decode(errors="ignore"), marks))
        return answers

    def _packed(self, names: Iterable[str]) -> bytes:
        return _packed((self._place[name] for name in names), self._count)


def _gathered(parts: Communicator, keys: list[bytes]) -> set[bytes]:
    """Return the keys of all parts."""
    counts = [int(n) for n in run(parts.allgather(torch.tensor([len(keys)]), "groups"))]
    mine = _tensor(b"".join(keys).ljust(max(counts) * KEY_BYTES, b"\0"))
    everyone = [bytes(theirs.tolist()) for theirs in run(parts.allgather(mine, "groups"))]
    return {
        theirs[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        for theirs, count in zip(everyone, counts, strict=True)
        for at in range(count)
    }


def _delivered(proposal: Proposal, names: Collection[str]) -> list[str]:
    """Return the parameters of which a residual arrives in this step."""
    return [
        slot.name
        for unit, total in zip(proposal.units, proposal.totals, strict=True)
        for slot in unit.slots
        if slot.name in names and _any(total, slot)
    ]


def _any(total: Vector, slot: Slot) -> bool:
    end = slot.start + slot.size
    if isinstance(total, DenseVector):
        return bool(total.values[slot.start : end].any())
    return bool(total.split([slot.start, end])[0].values.any())


def _packed(places: Iterable[int], count: int) -> bytes:
    return sum(1 << place for place in places).to_bytes(-(-count // 8), "little")


def _merged(messages: Iterable[bytes]) -> int:
    marks = 0
    for message in messages:
        marks |= int.from_bytes(message, "little")
    return marks


def _tensor(message: bytes) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)
