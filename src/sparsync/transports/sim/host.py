"""Actors of virtual ranks: told of messages at the virtual time at which these arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from sparsync.transports.actors import Actor, Host, Signal
from sparsync.transports.base import Operation
from sparsync.transports.sim.messages import SimOperation
from sparsync.transports.sim.network import Network

__all__ = ["SimHost"]


@final
class SimHost(Host):
    """Runs one virtual rank's actor on the event queue; its own work takes no time."""

    def __init__(self, actor: Actor, network: Network[Any], rank: int, tag: int) -> None:
        self.rank, self.world_size = rank, network.world_size
        self._actor, self._network, self._tag = actor, network, tag
        self._planned: float | None = None
        actor.port = self
        network.serve(rank, tag, self._receive)

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._network.now

    def send(self, dest: int, payload: Tensor) -> None:
        """Hand a message to the network."""
        self._network.send(self.rank, dest, payload, "average", self._tag)

    def call(self, function: Callable[[], None]) -> None:
        """Call at once: a simulation is one thread."""
        function()
        self._plan()

    def signal(self, where: Callable[[], str]) -> Signal:
        """Return an operation of the event queue."""
        return _SimSignal(self._network, where())

    def close(self) -> None:
        """Do nothing: the network ends with the simulation."""

    def _receive(self, source: int, payload: Tensor) -> None:
        self._actor.receive(source, payload)
        self._plan()

    def _plan(self) -> None:
        due = self._actor.due
        if due is not None and due != self._planned:
            self._planned = due
            self._network.at(self.rank, due, self._tick)

    def _tick(self) -> None:
        due = self._actor.due
        if due is not None and self._network.now >= due:
            self._actor.tick()
        self._planned = None
        self._plan()


@final
class _SimSignal(Signal):
    """A signal that a virtual rank awaits."""

    def __init__(self, network: Network[Any], what: str) -> None:
        self._network, self._operation = network, SimOperation(what)

    def set(self, value: Any) -> None:
        self.value = value
        self._network.complete(self._operation)

    def wait(self) -> None:
        self._operation.wait()

    def __await__(self) -> Any:
        if not self.done:
            operation: Operation = self._operation
            yield from operation.__await__()
            self.done = True
        return self.result
