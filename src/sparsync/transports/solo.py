"""A world of one: the same algorithms, no peer, no message."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import DeadlockError
from sparsync.transports.actors import Actor, Host, Signal
from sparsync.transports.base import Communicator, Operation
from sparsync.transports.framing import Framing

__all__ = ["SoloCommunicator", "SoloHost"]


@final
class SoloCommunicator(Communicator):
    """The communicator of a single process without ``torch.distributed``."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"))

    def host(self, actor: Actor) -> Host:
        """Run an actor that nobody writes to."""
        return SoloHost(actor)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Never reached: there is no rank to send to (``isend`` refuses first)."""
        raise AssertionError("a world of one sends nothing")

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Never reached: there is no rank to receive from (``irecv`` refuses first)."""
        raise AssertionError("a world of one receives nothing")


@final
class SoloHost(Host):
    """Calls an actor at once; nobody writes to it."""

    rank, world_size = 0, 1

    def __init__(self, actor: Actor) -> None:
        actor.port = self

    @property
    def now(self) -> float:
        """Read the monotonic clock."""
        return time.monotonic()

    def send(self, dest: int, payload: Tensor) -> None:
        """Never reached."""
        raise AssertionError("a world of one sends nothing")

    def call(self, function: Callable[[], None]) -> None:
        """Call at once."""
        function()

    def signal(self, where: Callable[[], str]) -> Signal:
        """Return a signal that must be set before it is awaited."""
        return _SoloSignal(where)

    def close(self) -> None:
        """Nothing runs."""


@final
class _SoloSignal(Signal):
    """A signal that is set before anybody waits."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where

    def set(self, value: Any) -> None:
        self.value, self.done = value, True

    def wait(self) -> None:
        if not self.done:
            raise DeadlockError(f"{self.where()} waits for itself")
