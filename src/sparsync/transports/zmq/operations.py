"""What is under way: sends that the queue did not take yet, receives that wait."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, final

import torch
import zmq
from torch import Tensor

from sparsync.errors import CommunicationError, DeadlineError, PeerError
from sparsync.transports.base import Operation
from sparsync.transports.ledger import Ledger
from sparsync.transports.zmq.link import Link
from sparsync.transports.zmq.mailbox import Claim, Expected, Message
from sparsync.transports.zmq.mesh import Mesh
from sparsync.transports.zmq.parcel import Parcel

__all__ = ["Gathered", "Receive", "Send", "staged"]

MEMORY_TICK: Final = 0.002  # seconds between looks at what arrives, while waiting for own memory


@final
class Send(Operation):
    """A message that ZeroMQ has not taken yet, or whose memory it still reads."""

    def __init__(self, mesh: Mesh, link: Link, parcel: Parcel, where: str, timeout: float) -> None:
        self.mesh, self.link, self.parcel, self.timeout = mesh, link, parcel, timeout
        self.where = f"rank {mesh.rank}, {where}"
        self.deadline: float | None = None  # from the first wait on

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``; what arrives meanwhile is taken in."""
        now = time.monotonic()
        until = now + seconds
        if seconds > 0 and self.deadline is None:
            self.deadline = now + self.timeout
        while not self._settled():
            now = time.monotonic()
            if self.deadline is not None and now >= self.deadline:
                raise _late(self.mesh, self.where, self.timeout)
            self.mesh.check_open()
            if self.parcel.tracker is not None:
                self._wait_for_memory(max(min(until - now, MEMORY_TICK), 0.0))
            else:
                self.mesh.advance(until - now)
            if until <= now:
                return self._settled()
        return True

    def wait(self) -> None:
        """Block until the payload may change."""
        while not self.poll(self.timeout):
            pass

    def _wait_for_memory(self, seconds: float) -> None:
        assert self.parcel.tracker is not None
        try:
            self.parcel.tracker.wait(seconds)
        except zmq.NotDone:
            self.mesh.advance(0.0)

    def _settled(self) -> bool:
        if not self.done and self.link.lost:
            raise PeerError(f"{self.where} failed: {self.link.lost}")
        self.done = self.done or self.parcel.done
        return self.done


class _Arrivals(Operation):
    """Receives that make everything advance while they wait.

    Attributes:
        claims: what is waited for, and its places in the mailboxes.
    """

    def __init__(self, expected: Sequence[Expected], mesh: Mesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.deadline: float | None = None  # from the first wait on
        self.claims = [Claim(one, mesh.phases) for one in expected]
        for claim in self.claims:
            mesh.mailboxes.post(claim)
        self._waiting = self.claims
        self._error: CommunicationError | None = None
        self._settled()

    @abstractmethod
    def _finish(self) -> None:
        """Take the messages over; all are here."""

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return earlier when another operation got its message.

        So whoever drives several operations can go on with the other one.
        """
        if not self._settled():
            mailboxes = self.mesh.mailboxes
            others = mailboxes.handed + len(self._waiting)  # constant while only own ones arrive
            now = time.monotonic()
            until = now + seconds
            if seconds > 0 and self.deadline is None:
                self.deadline = now + self.timeout
            while True:
                self.mesh.check_open()
                self.mesh.advance(until - now, len(self._waiting))
                now = time.monotonic()
                settled = self._settled()
                if settled or until <= now or mailboxes.handed + len(self._waiting) != others:
                    break
            if not settled and self.deadline is not None and now >= self.deadline:
                raise _late(self.mesh, str(self._waiting[0].expected), self.timeout)
        if self._error is not None:
            raise self._error
        return self.done

    def wait(self) -> None:
        """Block until all is here."""
        while not self.poll(self.timeout):
            pass

    def _settled(self) -> bool:
        """Look what the mailboxes have for these receives; tell whether the wait has ended."""
        if self.done or self._error is not None:
            return True
        waiting = []
        for claim in self._waiting:
            if claim.error is not None:
                self._error = claim.error
            elif claim.message is None:
                waiting.append(claim)
        self._waiting = waiting
        if not waiting and self._error is None:
            self._finish()
            self.done = True
        return self.done or self._error is not None


@final
class Receive(_Arrivals):
    """One receive; its result is the payload."""

    def __init__(self, expected: Expected, mesh: Mesh, ledger: Ledger, timeout: float) -> None:
        self.ledger = ledger
        super().__init__([expected], mesh, timeout)

    @property
    def claim(self) -> Claim:
        """What it waits for, and its place in the mailboxes."""
        return self.claims[0]

    @property
    def source(self) -> int:
        """The sender's rank, once done."""
        return self._message().source

    @property
    def step(self) -> int:
        """The sender's step, once done."""
        return self._message().step

    def _message(self) -> Message:
        message = self.claim.message
        assert message is not None, "whose message it is, is known when the operation is done"
        return message

    def _finish(self) -> None:
        self.result = self._message().payload
        self.ledger.received(self.claim.expected.phase, self.result.numel())


@final
class Gathered(_Arrivals):
    """A receive from each of several ranks, in any order; ``payloads`` has them by rank."""

    def __init__(
        self, expected: Sequence[Expected], mesh: Mesh, ledger: Ledger, timeout: float
    ) -> None:
        self.ledger = ledger
        self.payloads: dict[int, Tensor] = {}
        super().__init__(expected, mesh, timeout)

    def _finish(self) -> None:
        for claim in self.claims:
            assert claim.message is not None, "all are here"
            self.payloads[claim.message.source] = claim.message.payload
        if self.claims:
            nbytes = sum(payload.numel() for payload in self.payloads.values())
            self.ledger.received(self.claims[0].expected.phase, nbytes, len(self.claims))


def _late(mesh: Mesh, where: str, seconds: float) -> DeadlineError:
    """Say that a wait ran past its deadline, and what was refused meanwhile."""
    refused = ", ".join(f"{count} {reason}" for reason, count in mesh.refusals().items())
    hint = f" (refused meanwhile: {refused})" if refused else ""
    return DeadlineError(
        f"{where} did not complete within {seconds:g} s; is that rank alive? "
        f"Raise timeout= if it is only slow{hint}"
    )


def staged(payload: Tensor) -> Tensor:
    """Return the payload in host memory; from CUDA through pinned memory, which torch reuses.

    Waits for this payload's stream alone, not for the device.
    """
    if payload.device.type == "cpu":
        return payload
    pinned = torch.empty_like(payload, device="cpu", pin_memory=payload.is_cuda)
    pinned.copy_(payload, non_blocking=True)
    if payload.is_cuda:
        torch.cuda.current_stream(payload.device).synchronize()
    return pinned
