"""The simulated rank, and ``simulate``: run one async program on P of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.transports.actors import Actor, Host
from sparsync.transports.base import Communicator, Operation
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Ledger
from sparsync.transports.sim.host import SimHost
from sparsync.transports.sim.network import Fault, Links, Network

__all__ = ["SimCommunicator", "Simulation", "simulate"]

T = TypeVar("T")

_ACTOR_TAG = 2**31  # a channel that nobody else has


@final
class SimCommunicator(Communicator):
    """One virtual rank."""

    def __init__(self, rank: int, network: Network[Any]) -> None:
        super().__init__(rank, network.world_size, torch.device("cpu"))
        self.network = network

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.network.now

    def compute(self, seconds: float) -> Operation:
        """Let this rank compute for ``seconds`` of virtual time."""
        if not seconds >= 0:
            raise ConfigurationError(f"compute: {seconds} s cannot pass; give seconds >= 0")
        return self.network.delay(seconds, f"{seconds} s of computation")

    def work(self, nbytes: int) -> Operation:
        """Charge ``gamma`` seconds per byte reduced."""
        return self.network.delay(self.network.links.gamma * nbytes, "its own reduction")

    def host(self, actor: Actor) -> Host:
        """Run an actor on this virtual rank."""
        return SimHost(actor, self.network, self.rank, _ACTOR_TAG)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Hand the payload to the network."""
        return self.network.send(self.rank, dest, payload, phase, self.tag)

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Post a receive; booked in the ledger when it is done."""
        operation = self.network.receive(source, self.rank, capacity, phase, self.tag)
        return _Booked(operation, self.ledger, phase)


@final
class _Booked(Operation):
    """A receive that enters the ledger when awaited."""

    def __init__(self, operation: Operation, ledger: Ledger, phase: str) -> None:
        self.operation, self.ledger, self.phase = operation, ledger, phase

    def wait(self) -> None:
        self.operation.wait()

    def __await__(self) -> Any:
        if not self.done:
            self.result = yield from self.operation.__await__()
            self.ledger.received(self.phase, self.result.numel())
            self.done = True
        return self.result


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """What a simulated run gave.

    Attributes:
        results: what each rank returned, in rank order.
        seconds: virtual time from the start to the last rank's end.
        ledgers: each rank's traffic.
    """

    results: list[T]
    seconds: float
    ledgers: list[Ledger]


def simulate(
    program: Callable[[SimCommunicator], Coroutine[Any, Any, T]],
    world_size: int,
    *,
    links: Links = Links(),  # noqa: B008 (frozen)
    faults: Sequence[Fault] = (),
) -> Simulation[T]:
    """Run ``program(comm)`` on ``world_size`` virtual ranks, in one thread, under a virtual clock.

    Args:
        program: an ``async def`` that takes a communicator; awaits nothing but its operations.
        world_size: number of virtual ranks, >= 1.
        links: latency, bandwidth and reduction speed of the simulated network.
        faults: ranks that stand still, or die.

    Raises:
        DeadlockError: ranks wait for each other; says who waits for whom, in which phase.

    Cost: about 10 microseconds per message.

    Example:
        >>> async def program(comm):
        ...     return (await comm.allreduce(torch.tensor([float(comm.rank)]), "demo")).item()
        >>> simulate(program, world_size=4).results
        [6.0, 6.0, 6.0, 6.0]
    """
    if world_size < 1:
        raise ConfigurationError(f"simulate: world_size is {world_size}; give at least 1 rank")
    network: Network[T] = Network(world_size, links, faults)
    comms = [SimCommunicator(rank, network) for rank in range(world_size)]
    programs: list[Any] = [program(comm) for comm in comms]
    if not all(inspect.iscoroutine(p) for p in programs):
        raise ConfigurationError(
            f"simulate: the program returned {type(programs[0]).__name__}; give an async def function"
        )
    results = network.run(programs)
    return Simulation(results, network.now, [comm.ledger for comm in comms])
