"""The simulated rank, and ``simulate``: run one async program on P of them."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.transports.actors import Actor, Host, Reply
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing, Ledger
from sparsync.transports.sim.network import Fault, Network, Port, SimOperation, Weight
from sparsync.transports.sim.topology import Links, PortName, Topology

__all__ = ["Prices", "SimCommunicator", "Simulation", "simulate"]

T = TypeVar("T")

_ACTOR_TAG = 2**31  # a channel that no unit of a model uses
# The number of objects that may be created between two garbage collections.  It is large, because the
# many messages in flight are all objects, and none of them is garbage.
_YOUNG = 100_000


@dataclass(frozen=True)
class Prices:
    """The ranks' work for messages, in addition to the network's time: packing and unpacking."""

    weigh: Callable[[Tensor, Framing], Weight]  # returns the size charged for a message
    # s per entry, charged to the rank that creates a message but not to ranks that forward it
    encode: float = 0.0
    decode: float = 0.0  # s per entry, to unpack and sum it, charged to every rank that receives it
    gamma: float = 0.0  # s per byte of dense sums, instead of the network's


@final
class SimCommunicator(Communicator):
    """One virtual rank."""

    def __init__(self, rank: int, network: Network[Any], prices: Prices | None = None) -> None:
        super().__init__(rank, network.world_size, torch.device("cpu"))
        self.network, self.prices = network, prices
        # remember the last packed payload, because packing a payload for several ranks is charged once
        self._packed: Tensor | None = None
        self._passes_on = False

    @property
    def now(self) -> float:
        """Virtual time in seconds at which the work charged to this rank is done."""
        return self.network.now_of(self.rank)

    async def compute(self, seconds: float) -> None:
        """Compute for ``seconds`` of virtual time.

        Work that this rank's other coroutines charge in the meantime comes first and delays the end.
        """
        if not seconds >= 0:
            raise ConfigurationError(f"compute: {seconds} s cannot pass; give seconds >= 0")
        end, worked = self.now + seconds, self.network.worked
        # A rank has one processor, so work that is charged during this wait delays the end.  The loop is
        # needed, because more work may be charged during the delay.
        while end > self.now:
            before = worked[self.rank]
            await self.network.until(end, f"{seconds} s of computation")
            end += worked[self.rank] - before

    def charge(self, stage: str, seconds: float) -> None:
        """Charge this rank for work, which delays all it does next; count it under a stage."""
        if seconds > 0:
            self.network.charge(self.rank, seconds)
            self.ledger.spent(stage, seconds)

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        """Charge ``gamma`` seconds per byte reduced.

        With ``prices``, only dense sums are charged here, because the price of unpacking includes
        summing.
        """
        if self.prices is None:
            self.charge("unpack", self.network.links.gamma * nbytes)
        elif dense:
            self.charge("unpack", self.prices.gamma * nbytes)
        return Finished()

    def spawn(self, program: Coroutine[Operation, None, Any]) -> Operation:
        """Run another coroutine of this rank concurrently; return an operation that ends with it."""
        return self.network.start(self.rank, program).end

    def host(self, actor: Actor) -> Host:
        """Run an actor on this virtual rank."""
        return _SimHost(actor, self.network, self.rank, _ACTOR_TAG)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Hand the payload to the network."""
        weight = None
        if self.prices is not None:
            weight = self.prices.weigh(payload, framing)
            if payload is not self._packed and not self._passes_on:
                self._pack(payload, weight)
        return self.network.send(self.rank, dest, payload, phase, self.tag, weight)

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Post a receive, which the ledger counts when it is awaited."""
        receive = _Receive("message from rank", source, phase)
        receive.comm = self
        self.network.receive(receive, (source, self.rank, self.tag), capacity)
        return receive

    async def allgatherv(
        self,
        payload: Tensor,
        capacities: Sequence[int],
        phase: str,
        framing: Framing,
        *,
        ring: bool = False,
    ) -> list[Tensor]:
        """Collect one message per rank; only this rank's own is packed here, the others are forwarded."""
        handle = self
        # set the mark on a copy of the handle, because this rank's other coroutines may meanwhile send
        # messages that they pack themselves
        if self.prices is not None and self.world_size > 1:
            self._pack(payload, self.prices.weigh(payload, framing))
            handle = copy.copy(self)
            handle._passes_on = True
        call = super(SimCommunicator, handle).allgatherv
        return await call(payload, capacities, phase, framing, ring=ring)

    def _pack(self, payload: Tensor, weight: Weight) -> None:
        assert self.prices is not None
        self._packed = payload
        self.charge("pack", self.prices.encode * weight.entries)


class _Receive(SimOperation):
    """A receive that the ledger of ``comm`` counts when it is awaited."""

    comm: SimCommunicator
    booked = False

    def __await__(self) -> Any:
        yield from super().__await__()
        if not self.booked:
            self.booked = True
            # charge the work at the await, not on arrival: a rank unpacks a message when it needs it
            comm = self.comm
            comm.ledger.received(self.phase, self.result.numel())
            if comm.prices is not None:
                comm.charge("unpack", comm.prices.decode * self.entries)
        return self.result


@final
class _SimHost(Host):
    """Runs one virtual rank's actor on the event queue; the actor's work takes no time."""

    def __init__(self, actor: Actor, network: Network[Any], rank: int, tag: int) -> None:
        self.rank, self.world_size = rank, network.world_size
        self._actor, self._network, self._tag = actor, network, tag
        self._planned: float | None = None
        actor.meet(self)
        network.serve(rank, tag, self._receive)

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._network.now

    def send(self, dest: int, payload: Tensor) -> None:
        """Hand a message to the network."""
        self._network.send(self.rank, dest, payload, "average", self._tag)

    def call(self, function: Callable[[], None]) -> None:
        """Call the function immediately, because a simulation has a single thread."""
        function()
        self._plan()

    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Call the function immediately; the wait is an operation of the event queue."""
        operation = SimOperation(where())
        self.call(lambda: function(lambda value: self._network.complete(operation, value)))
        return operation

    def close(self) -> None:
        """Do nothing, because the network ends with the simulation."""

    def _receive(self, source: int, payload: Tensor) -> None:
        self._actor.receive(source, payload)
        self._plan()

    def _plan(self) -> None:
        # ``due`` may have changed to a later time since a tick was planned; a tick that comes too early
        # only plans the next one
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


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """The outcome of a simulated run.

    Attributes:
        results: the value that each rank returned, in rank order.
        seconds: virtual time from the start until the last rank has ended.
        ledgers: the ledgers of all ranks, in rank order.
        sending: bytes and seconds of each sending port, by phase.
        receiving: the same for each receiving port.
    """

    results: list[T]
    seconds: float
    ledgers: list[Ledger]
    sending: Mapping[PortName, Port] = field(default_factory=dict)
    receiving: Mapping[PortName, Port] = field(default_factory=dict)


def simulate(
    program: Callable[[SimCommunicator], Coroutine[Any, Any, T]],
    world_size: int,
    *,
    links: Topology = Links(),  # noqa: B008 (frozen)
    faults: Sequence[Fault] = (),
    prices: Prices | None = None,
) -> Simulation[T]:
    """Run ``program(comm)`` on ``world_size`` virtual ranks, in one thread, under a virtual clock.

    Args:
        program: an ``async def`` that takes a communicator and awaits only its operations.
        world_size: number of virtual ranks, >= 1.
        links: latency, bandwidth and reduction speed of the simulated network; see ``topology``.
        faults: ranks that stall, or die.
        prices: costs of packing and unpacking messages; None if both are free.

    Raises:
        DeadlockError: ranks wait for each other; the message says which rank waits for which, and in
            which phase.

    Cost: 20 to 40 microseconds per message.

    Example:
        >>> async def program(comm):
        ...     return (await comm.allreduce(torch.tensor([float(comm.rank)]), "demo")).item()
        >>> simulate(program, world_size=4).results
        [6.0, 6.0, 6.0, 6.0]
    """
    if world_size < 1:
        raise ConfigurationError(f"simulate: world_size is {world_size}; give at least 1 rank")
    network: Network[T] = Network(world_size, links, faults)
    comms = [SimCommunicator(rank, network, prices) for rank in range(world_size)]
    programs: list[Any] = [program(comm) for comm in comms]
    if not all(inspect.iscoroutine(p) for p in programs):
        raise ConfigurationError(
            f"simulate: the program returned {type(programs[0]).__name__}; give an async def function"
        )
    with _fewer_collections():
        results = network.run(programs)
    ledgers = [comm.ledger for comm in comms]
    return Simulation(results, network.now, ledgers, network.sending, network.receiving)


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Collect cyclic garbage less often; by default, collections take a third of the time."""
    young, *older = gc.get_threshold()
    # a threshold of 0 means that the caller has disabled collection
    gc.set_threshold(max(young, _YOUNG) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
