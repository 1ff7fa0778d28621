"""Where messages meet the receives that wait for them: by source and channel, in the order sent."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, final

from torch import Tensor

from sparsync.errors import CommunicationError, PeerError
from sparsync.transports.zmq.header import Phases

__all__ = ["Claim", "Expected", "Mailboxes", "Message"]


class Message(NamedTuple):
    """One message that arrived.  ``step``, ``phase`` (a number): what its sender was doing."""

    source: int
    tag: int
    step: int
    phase: int
    payload: Tensor


class Expected(NamedTuple):
    """What a receive is for.

    Attributes:
        rank: who waits.
        source: from whom; None: from anyone.
        tag: channel.
        step: the waiting rank's; a message of another step is refused (unless ``source`` is None).
        phase: name.
        capacity: bytes that the payload may have.
        exact: it must have all of them.
    """

    rank: int
    source: int | None
    tag: int
    step: int
    phase: str
    capacity: int
    exact: bool

    def __str__(self) -> str:
        sender = "any rank" if self.source is None else f"rank {self.source}"
        return f"rank {self.rank}, step {self.step}: message from {sender} in phase '{self.phase}'"


@final
class Claim:
    """A receive's place in the mailboxes: the message that it got, or why it gets none."""

    def __init__(self, expected: Expected, phases: Phases) -> None:
        self.expected, self.phases = expected, phases
        self.number = phases.number(expected.phase)
        self.message: Message | None = None
        self.error: CommunicationError | None = None

    def take(self, message: Message) -> None:
        """End with this message, or with the error that it does not fit."""
        expected, nbytes = self.expected, message.payload.numel()
        same_step = message.step == expected.step or expected.source is None
        if message.phase != self.number or not same_step:
            self.error = PeerError(
                f"{expected}: rank {message.source} sent one of step {message.step}, phase "
                f"{self.phases.name(message.phase)}; the ranks are not in the same call"
            )
        elif nbytes > expected.capacity or (expected.exact and nbytes < expected.capacity):
            most = "exactly" if expected.exact else "at most"
            self.error = PeerError(
                f"{expected}: rank {message.source} sent {nbytes} bytes where {most} "
                f"{expected.capacity} can be; the ranks disagree on sizes"
            )
        else:
            self.message = message


@final
class Mailboxes:
    """All messages that nobody has received and all receives that wait.

    Args:
        limit: bytes that unclaimed messages may take together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unclaimed = 0  # bytes
        self.handed = 0  # messages that met a receive that waited
        self._arrived: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
        self._waiting: dict[tuple[int | None, int], deque[Claim]] = {}
        self._expected: dict[tuple[int, int], int] = {}
        self._count = 0

    def next_sequence(self, source: int, tag: int) -> int:
        """Return the number that the next message of a source and channel must have."""
        return self._expected.get((source, tag), 0)

    def deliver(self, message: Message) -> bool:
        """Hand a message to the receive that waits for it, or keep it; False: there is no room."""
        key = message.source, message.tag
        waiting = self._waiting.get(key) or self._waiting.get((None, message.tag))
        nbytes = message.payload.numel()
        if not waiting and self.unclaimed + nbytes > self.limit:
            return False
        self._expected[key] = self._expected.get(key, 0) + 1
        if waiting:
            waiting.popleft().take(message)
            self.handed += 1
            return True
        self.unclaimed += nbytes
        self._count += 1
        self._arrived.setdefault(key, deque()).append((self._count, message))
        return True

    def post(self, claim: Claim) -> None:
        """Give a receive the message that arrived first for it, or let it wait.

        A message goes to a receive that names its source before one that takes any.
        """
        source, tag = claim.expected.source, claim.expected.tag
        if source is None:
            boxes = [box for (_, t), box in self._arrived.items() if t == tag and box]
            box = min(boxes, key=lambda b: b[0][0], default=None)
        else:
            box = self._arrived.get((source, tag))
        if box:
            message = box.popleft()[1]
            self.unclaimed -= message.payload.numel()
            claim.take(message)
        else:
            self._waiting.setdefault((source, tag), deque()).append(claim)

    def waiting_for(self) -> set[int]:
        """Return the ranks that receives name."""
        return {s for (s, _), waiting in self._waiting.items() if waiting and s is not None}

    def fail(self, source: int | None, reason: str) -> None:
        """End every receive that names this source (None: those that take any) with an error."""
        for (waited, _), waiting in self._waiting.items():
            if waited == source:
                while waiting:
                    claim = waiting.popleft()
                    claim.error = PeerError(f"{claim.expected} will not come: {reason}")
