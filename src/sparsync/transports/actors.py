"""Actors: state machines that answer messages while their rank computes.

An actor has no threads, sockets or clocks.  Its host passes messages and the time to it, and sends its
replies.  So the same actor can run on a thread alongside training (``ZmqHost``) and in the simulator,
where every interleaving can be replayed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparsync.transports.driver import Operation

__all__ = ["Actor", "Host", "HostsActors", "Reply"]

Reply = Callable[[Any], None]  # called once, with the value that ends a rank's wait for its actor


class Actor(ABC):
    """A state machine that a host runs, one call at a time; no call may block."""

    host: Host
    due: float | None = None  # when to call ``tick``, on the host's clock; None: never

    def meet(self, host: Host) -> None:
        """Store the host; the host calls this before any other method."""
        self.host = host

    @abstractmethod
    def receive(self, source: int, payload: Tensor) -> None:
        """Handle a message; messages from one source arrive in the order sent."""

    @abstractmethod
    def tick(self) -> None:
        """Do the work that is due; the host calls this once its clock has reached ``due``."""

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """Handle the permanent loss of a peer."""


class Host(ABC):
    """Runs one actor on one rank."""

    rank: int
    world_size: int

    @property
    def now(self) -> float:
        """Seconds on a clock that never goes backwards."""
        return time.monotonic()

    @abstractmethod
    def send(self, dest: int, payload: Tensor) -> None:
        """Send a message from the actor and return immediately; the payload must never change again."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` soon, between two calls of the actor; return immediately."""

    @abstractmethod
    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Run ``function(reply)`` as ``call`` does; the operation's result is ``reply``'s argument.

        ``reply`` may be called immediately or later; ``where`` names the wait in errors.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop running the actor."""


@runtime_checkable
class HostsActors(Protocol):
    """A communicator that can run an actor alongside each rank, as model averaging requires."""

    def host(self, actor: Actor) -> Host:
        """Run an actor alongside this rank; this is collective."""
