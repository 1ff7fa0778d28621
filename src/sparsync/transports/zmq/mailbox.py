"""Messages between ranks: their 56-byte header, and the mailboxes that match them with receives."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from torch import Tensor

from sparsync.errors import CommunicationError, PeerError, WireFormatError
from sparsync.transports.agree import unequal_steps
from sparsync.transports.ledger import place

__all__ = ["HEADER_BYTES", "NO_LOCAL_STEP", "Claim", "Header", "Mailboxes"]

MAGIC: Final = b"sz"
VERSION: Final = 2
# magic, version, flags, source, job, tag, phase, step, local step, sequence, length
LAYOUT: Final = struct.Struct("<2sBBIQIIqqQQ")
HEADER_BYTES: Final = LAYOUT.size

HELLO: Final = 1  # flag: a link was opened; no payload
APART: Final = 2  # flag: the payload is in a separate frame
GIVE_UP: Final = 4  # flag: the sender has stopped waiting; no payload
NO_LOCAL_STEP: Final = -1

# Phases that other ranks may be in while this rank is in an exchange.  Messages carry only a phase's
# number, so this rank must know the name in advance to report it in an error.
_SAVES: Final = "checkpoint"
_ELSEWHERE: Final = (
    *("agreement", "average", "barrier", "checkpoint", "contributions", "finish", "sentinel"),
    *("max", "min", "settle"),
)


class Header(NamedTuple):
    """The header of a message, which the receiver reads before the payload.

    Example:
        >>> raw = Header(0, 3, 7, 1, 9, 5, -1, 0, 16).pack()
        >>> len(raw), Header.parse(raw).source, Header.parse(raw).length
        (56, 3, 16)
    """

    flags: int  # ``HELLO``, ``GIVE_UP``, ``APART``, or 0 if the payload follows in the same frame
    source: int  # rank of the sender
    job: int  # number of the group, drawn by rank 0; messages with another number are refused
    tag: int  # channel
    phase: int  # CRC-32 of the phase's name
    step: int  # the sender's ``ledger.step``
    local_step: int  # the sender's ``ledger.local_step``, for errors; or ``NO_LOCAL_STEP``
    sequence: int  # number of this message among those of its source and tag, from 0
    length: int  # bytes of payload

    def pack(self) -> bytes:
        """Write the header."""
        return LAYOUT.pack(MAGIC, VERSION, *self)

    @classmethod
    def parse(cls, frame: bytes | memoryview) -> Header:
        """Read the header at the start of ``frame``.

        Raises:
            WireFormatError: the frame is too short, or belongs to another protocol or version.
        """
        if len(frame) < HEADER_BYTES:
            raise WireFormatError(
                f"a frame of {len(frame)} bytes is too short for a header of {HEADER_BYTES}; "
                "sparsync did not send it"
            )
        magic, version, *rest = LAYOUT.unpack_from(frame)
        if magic != MAGIC or version != VERSION or rest[0] not in (0, HELLO, APART, GIVE_UP):
            raise WireFormatError(
                f"a frame starts with {bytes(frame[:4]).hex()}, not with {MAGIC.hex()} and version "
                f"{VERSION}; all ranks need the same version of sparsync"
            )
        return cls(*rest)


@final
@dataclass(eq=False)
class Claim:
    """A posted receive; once it has ended, it holds its message or an error."""

    rank: int
    source: int | None  # None: any rank, at any step
    tag: int
    step: int
    phase: str
    capacity: int  # bytes
    exact: bool  # a message must have exactly this many bytes, not fewer
    local_step: int | None = None  # for errors
    sender: int | None = None
    payload: Tensor | None = None
    error: CommunicationError | None = None

    def __str__(self) -> str:
        sender = "any rank" if self.source is None else f"rank {self.source}"
        where = f"rank {self.rank}, {place(self.step, self.local_step)}"
        return f"{where}: message from {sender} in phase '{self.phase}'"


@final
class Mailboxes:
    """All unclaimed messages that have arrived, up to ``limit`` bytes, and all waiting receives."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unclaimed = 0  # bytes of messages that no receive has claimed
        self.handed = 0  # number of messages given to a waiting receive
        self.broken = ""  # the reason why no wait for any source can succeed any more
        self._phases: dict[int, str] = {}  # number on the wire -> name, for errors
        for name in _ELSEWHERE:
            self.phase_number(name)
        self._arrived: dict[tuple[int, int], deque[tuple[int, Header, Tensor]]] = {}
        self._waiting: dict[tuple[int | None, int], deque[Claim]] = {}
        self._expected: dict[tuple[int, int], int] = {}
        self._count = 0

    def phase_number(self, name: str) -> int:
        """Return the 32-bit number that represents a phase in a header."""
        number = zlib.crc32(name.encode())
        self._phases[number] = name
        return number

    def next_sequence(self, source: int, tag: int) -> int:
        """Return the number that the next message from this source on this channel must have."""
        return self._expected.get((source, tag), 0)

    def deliver(self, header: Header, payload: Tensor) -> bool:
        """Give a message to the receive that waits for it, or keep it; False if there is no room."""
        # receives that name the source take precedence over receives from any source
        key, nbytes = (header.source, header.tag), payload.numel()
        waiting = self._waiting.get(key) or self._waiting.get((None, header.tag))
        if not waiting and self.unclaimed + nbytes > self.limit:
            return False
        self._expected[key] = self._expected.get(key, 0) + 1
        if waiting:
            self._give(header, payload, waiting.popleft())
            self.handed += 1
        else:
            self.unclaimed += nbytes
            self._count += 1
            self._arrived.setdefault(key, deque()).append((self._count, header, payload))
        return True

    def post(self, claim: Claim) -> None:
        """Give a receive the first message that has arrived for it, or let it wait.

        Receives that name a source take precedence over receives from any source.
        """
        if claim.source is None:
            boxes = [box for (_, tag), box in self._arrived.items() if tag == claim.tag and box]
            box = min(boxes, key=lambda b: b[0][0], default=None)
        else:
            box = self._arrived.get((claim.source, claim.tag))
        if box:
            _, header, payload = box.popleft()
            self.unclaimed -= payload.numel()
            self._give(header, payload, claim)
        elif self.broken:
            claim.error = PeerError(f"{claim} will not come: {self.broken}")
        else:
            self._waiting.setdefault((claim.source, claim.tag), deque()).append(claim)

    def fail(self, source: int | None, reason: str) -> None:
        """End every receive from ``source`` with an error; None ends the receives from any source."""
        for (waited, _), waiting in self._waiting.items():
            while waited == source and waiting:
                claim = waiting.popleft()
                claim.error = PeerError(f"{claim} will not come: {reason}")

    def break_off(self, reason: str) -> None:
        """End every waiting receive with an error, and later ones whose message has not arrived yet."""
        self.broken = self.broken or reason
        for source in {source for source, _ in self._waiting}:
            self.fail(source, self.broken)

    def _give(self, header: Header, payload: Tensor, claim: Claim) -> None:
        """End a receive with this message, or with an error if the message does not fit."""
        nbytes = payload.numel()
        # a message from a different call is an error, and is never kept for later: the ranks are in
        # different calls, and would sum unrelated values
        same_step = header.step == claim.step or claim.source is None
        if header.phase != self.phase_number(claim.phase) or not same_step:
            name = self._phases.get(header.phase)
            phase = f"number {header.phase:#x}" if name is None else f"'{name}'"
            local = None if header.local_step == NO_LOCAL_STEP else header.local_step
            apart = _apart(claim, name, local) or "the ranks are not in the same call"
            claim.error = PeerError(
                f"{claim}: rank {header.source} sent one of {place(header.step, local)}, phase {phase}; "
                f"{apart}"
            )
        elif nbytes > claim.capacity or (claim.exact and nbytes < claim.capacity):
            most = "exactly" if claim.exact else "at most"
            claim.error = PeerError(
                f"{claim}: rank {header.source} sent {nbytes} bytes where {most} "
                f"{claim.capacity} can be; the ranks disagree on sizes"
            )
        else:
            claim.sender, claim.payload = header.source, payload


def _apart(claim: Claim, phase: str | None, local_step: int | None) -> str:
    """Explain how two ranks' calls differ if only one of them finishes, or only one saves or loads."""
    if (claim.phase == _SAVES) != (phase == _SAVES):
        return (
            "only one of the two saves or loads a checkpoint: call save() and load() on all ranks, after "
            "the same step, not on one rank alone"
        )
    if (
        claim.local_step is None
        or local_step is None
        or (claim.phase == "finish") == (phase == "finish")
    ):
        return ""
    # count finished steps: an exchange's messages carry the number of the local step before it, but the
    # messages of ``finish`` carry the number of the next local step
    here = claim.local_step + (claim.phase != "finish")
    there = local_step + (phase != "finish")
    counts = unequal_steps(min(here, there), max(here, there), here)
    return f"only one of the two is in finish(): {counts}"
