"""What is under way: sends that the queue did not take yet, receives that wait."""

from __future__ import annotations

import time
from typing import Final, final

import torch
import zmq
from torch import Tensor

from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.base import Operation
from sparsync.transports.ledger import Ledger
from sparsync.transports.zmq.link import Link, Parcel
from sparsync.transports.zmq.mailbox import Claim, Expected
from sparsync.transports.zmq.mesh import Mesh

__all__ = ["Receive", "Send", "staged"]

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


@final
class Receive(Operation):
    """A receive that makes everything advance while it waits.

    Attributes:
        claim: what it waits for, and its place in the mailboxes.
    """

    def __init__(self, expected: Expected, mesh: Mesh, ledger: Ledger, timeout: float) -> None:
        self.mesh, self.ledger, self.timeout = mesh, ledger, timeout
        self.deadline: float | None = None  # from the first wait on
        self.claim = Claim(expected, mesh.phases)
        mesh.mailboxes.post(self.claim)
        self._settled()

    @property
    def source(self) -> int:
        """The sender's rank, once done."""
        assert self.claim.message is not None, "source is known when the operation is done"
        return self.claim.message.source

    @property
    def step(self) -> int:
        """The sender's step, once done."""
        assert self.claim.message is not None, "step is known when the operation is done"
        return self.claim.message.step

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return earlier when another receive got its message.

        So whoever drives several operations can go on with the other one.
        """
        if not self._settled():
            handed = self.mesh.mailboxes.handed
            now = time.monotonic()
            until = now + seconds
            if seconds > 0 and self.deadline is None:
                self.deadline = now + self.timeout
            while True:
                self.mesh.check_open()
                self.mesh.advance(until - now)
                now = time.monotonic()
                if self._settled() or until <= now or self.mesh.mailboxes.handed != handed:
                    break
            if not self._settled() and self.deadline is not None and now >= self.deadline:
                raise _late(self.mesh, str(self.claim.expected), self.timeout)
        if self.claim.error is not None:
            raise self.claim.error
        return self.done

    def wait(self) -> None:
        """Block until the message is here."""
        while not self.poll(self.timeout):
            pass

    def _settled(self) -> bool:
        """Take over what the mailboxes have for this receive; tell whether it has ended."""
        message = self.claim.message
        if message is not None and not self.done:
            self.result, self.done = message.payload, True
            self.ledger.received(self.claim.expected.phase, message.payload.numel())
        return self.done or self.claim.error is not None


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
