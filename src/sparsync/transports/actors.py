"""Actors answer messages whatever their rank computes; a host runs one and carries its messages.

An actor is a state machine without threads, sockets and clocks of its own: it is told what arrives
and what time it is, and says what to send.  So the same actor runs on a thread next to a training
(``ZmqHost``) and in the simulator, where every interleaving can be replayed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsync.transports.driver import Operation

__all__ = ["Actor", "Host", "Reply"]

Reply = Callable[[Any], None]  # ends what a rank awaits of its actor; called once


class Actor(ABC):
    """A state machine that a host runs: one call at a time, none of which may wait."""

    host: Host  # set by the host before the first call
    due: float | None = None  # when to call ``tick``, by the host's clock; None: not at all

    @abstractmethod
    def receive(self, source: int, payload: Tensor) -> None:
        """Take a message; those of one source come in the order sent."""

    @abstractmethod
    def tick(self) -> None:
        """Do what was due."""

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """Learn that a peer is gone for ever."""


class Host(ABC):
    """Runs one actor on one rank."""

    rank: int
    world_size: int

    @property
    def now(self) -> float:
        """Seconds, by a clock that never goes back."""
        return time.monotonic()

    @abstractmethod
    def send(self, dest: int, payload: Tensor) -> None:
        """Send a message of the actor's and return at once; the payload must not change any more."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` between the actor's calls, soon; returns at once."""

    @abstractmethod
    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Run ``function(reply)`` as ``call`` does; await the result for what ``reply`` is given.

        It may call ``reply`` at once or later; ``where`` says what the wait is for, in errors.
        """

    @abstractmethod
    def close(self) -> None:
        """End the actor."""
