"""The seam between algorithms and networks: ``Communicator`` and the awaitable ``Operation``.

Algorithms are ``async def`` over these calls and never learn who drives them:

``run(coroutine)`` blocks until each awaited operation is done (real transports), the engine does the
same on one ordered background thread, the simulator interleaves many ranks on one event queue.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.transports import primitives
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Ledger

if TYPE_CHECKING:
    from sparsync.transports.actors import Actor, Host
__all__ = [
    "Closeable",
    "Communicator",
    "Finished",
    "Operation",
    "ReduceOp",
    "Subgroup",
    "check_timeout",
    "run",
]

T = TypeVar("T")
C = TypeVar("C", bound="Communicator")
ReduceOp = Literal["sum", "max", "min"]


def check_timeout(seconds: float) -> float:
    """Return a deadline in seconds, or refuse one that no clock can count.

    Raises:
        ConfigurationError: not a number in (0, 10^6]: waits must end.
    """
    if not isinstance(seconds, int | float) or not 0 < seconds <= 1e6:
        raise ConfigurationError(
            f"timeout is {seconds!r}; give seconds > 0 and at most 10^6 (12 days): every wait ends"
        )
    return float(seconds)


class Closeable(Protocol):
    """What can be ended."""

    def close(self) -> None:
        """End it."""


class Operation(ABC):
    """A send or receive under way.  ``await`` it for its result: the bytes received, or None."""

    done: bool = False
    result: Tensor | None = None

    @abstractmethod
    def wait(self) -> None:
        """Block until done (real transports); raise a ``CommunicationError`` if it cannot be."""

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds`` (0: not at all); tell whether it is done; raise as ``wait``.

        A transport that cannot look without waiting says False to 0 and waits to the end otherwise.
        """
        if not self.done and seconds > 0:
            self.wait()
        return self.done

    def __await__(self) -> Generator[Operation, None, Any]:
        if not self.done:
            yield self
        return self.result


@final
class Finished(Operation):
    """An operation that needed no network."""

    def __init__(self, result: Tensor | None = None) -> None:
        self.done, self.result = True, result

    def wait(self) -> None:
        """Return at once."""


def run(coroutine: Coroutine[Operation, None, T]) -> T:
    """Drive an algorithm to its end, blocking at each operation that it awaits."""
    error: BaseException | None = None
    while True:
        try:
            operation = coroutine.throw(error) if error else coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        error = None
        try:
            operation.wait()
        except BaseException as caught:
            error = caught


class Communicator(ABC):
    """One rank's handle on a group: point-to-point calls, and the collectives built from them.

    Attributes:
        rank: this rank, in ``[0, world_size)``.
        world_size: number of ranks P; 1 is legal and never communicates.
        device: where payloads must live (CUDA tensors are staged to it).
        ledger: what was sent and received.
        tag: the channel of this handle's messages; see ``channel``.
        companions: what others made for this group (a background thread); ``close`` ends them.
        pads: ``alltoallv`` sends every message at its sender's capacity.

    All payloads are 1-D ``torch.uint8``.  Messages between two ranks on one channel arrive in the
    order sent.  Ranks call collectives of one channel in the same order.  Cost: each method says so
    in `primitives`.
    """

    pads: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.ledger = Ledger()
        self.tag = 0
        self.companions: dict[str, Closeable] = {}

    def channel(self, tag: int) -> Communicator:
        """Return a handle on the same group, links and ledger whose messages never meet others'.

        Channels are what lets several units be in flight: each unit has its own.
        """
        twin = copy.copy(self)
        twin.tag = tag
        return twin

    def close(self) -> None:
        """End the companions; release sockets, if the transport has its own.  Twice is legal."""
        while self.companions:
            self.companions.popitem()[1].close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- what a transport provides -------------------------------------------------------------

    @abstractmethod
    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Begin to send; the payload must not change until the operation is done."""

    @abstractmethod
    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Begin to receive at most ``capacity`` bytes."""

    @property
    def now(self) -> float:
        """Seconds by this rank's clock: the machine's, or the simulator's."""
        return time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the time that passes under a stage, one of ``ledger.STAGES``.

        No moment is booked twice: what is booked meanwhile, by stages inside or by other units in
        flight, is left out.
        """
        start, booked = self.now, self.ledger.booked
        try:
            yield
        finally:
            elsewhere = self.ledger.booked - booked
            self.ledger.spent(name, max(self.now - start - elsewhere, 0.0))

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        """Account for reducing a (dense) message of so many bytes: virtual time in the simulator."""
        return Finished()

    def host(self, actor: Actor) -> Host:
        """Run an actor beside this rank, on its own channel; all ranks call it together."""
        raise ConfigurationError(f"{type(self).__name__} runs no actors; use zmq or torch (gloo)")

    # ---- point to point ------------------------------------------------------------------------

    def isend(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send without waiting.  Await the result before changing ``payload``."""
        self._check_peer(dest, "send to")
        payload = payload.to(self.device)
        self.ledger.sent(phase, payload.numel(), framing.parts(payload))
        return self.start_send(payload, dest, phase, framing)

    def irecv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Receive without waiting.  Await the result for exactly the bytes that were sent."""
        self._check_peer(source, "receive from")
        return self.start_recv(source, capacity, phase, framing)

    def _check_peer(self, peer: int, verb: str) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ConfigurationError(
                f"rank {self.rank} cannot {verb} rank {peer}; "
                f"name another rank in [0, {self.world_size})"
            )

    # ---- collectives, from point-to-point; a transport may override them with a native call -----

    async def allreduce(self, tensor: Tensor, phase: str, op: ReduceOp = "sum") -> Tensor:
        """Reduce element-wise over ranks; `[m]`, any dtype.  Returns a new tensor, equal on all."""
        return await primitives.allreduce(self, tensor, phase, op)

    async def allgather(self, tensor: Tensor, phase: str) -> list[Tensor]:
        """Collect one tensor of the same shape and dtype from every rank, in rank order."""
        return await primitives.allgather(self, tensor, phase)

    async def allgatherv(
        self, payload: Tensor, capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Collect one message per rank, of at most ``capacities[rank]`` bytes, in rank order."""
        return await primitives.dissemination_allgatherv(self, payload, capacities, phase, framing)

    async def ring_allgatherv(
        self, payload: Tensor, capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Do as ``allgatherv``, on a ring: P - 1 rounds, but nobody sends more than the total."""
        return await primitives.ring_allgatherv(self, payload, capacities, phase, framing)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Send ``payloads[r]`` to each rank r; return what each rank sent here, in rank order.

        ``capacities[r]`` is the most that rank r sends to any one; the list is the same on all ranks,
        so that a transport may use a native call with padded messages.
        """
        return await primitives.alltoallv(self, payloads, capacities, phase, framing)

    async def barrier(self) -> None:
        """Return when every rank has called."""
        await self.allgather(torch.zeros(1, dtype=torch.uint8), "barrier")

    async def split(self, color: int, key: int = 0) -> Subgroup:
        """Form one group per ``color``; ranks inside are ordered by ``(key, rank)``."""
        mine = torch.tensor([color, key], dtype=torch.int64)
        entries = [t.tolist() for t in await self.allgather(mine, "split")]
        members = [r for r in range(self.world_size) if entries[r][0] == color]
        return Subgroup(self, sorted(members, key=lambda r: (entries[r][1], r)))


@final
class Subgroup(Communicator):
    """Some ranks of a parent communicator, renumbered; shares its links and its ledger."""

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        if parent.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ConfigurationError(
                f"Subgroup: ranks {list(ranks)} must be distinct and contain rank {parent.rank}"
            )
        super().__init__(list(ranks).index(parent.rank), len(ranks), parent.device)
        self.parent, self.ranks, self.ledger = parent, list(ranks), parent.ledger
        self.tag = parent.tag

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send through the parent."""
        return self.parent.channel(self.tag).start_send(payload, self.ranks[dest], phase, framing)

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Receive through the parent."""
        source = self.ranks[source]
        return self.parent.channel(self.tag).start_recv(source, capacity, phase, framing)

    @property
    def now(self) -> float:
        """Ask the parent."""
        return self.parent.now

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        """Account through the parent."""
        return self.parent.work(nbytes, dense=dense)
