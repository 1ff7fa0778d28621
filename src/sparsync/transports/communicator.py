"""The interface between algorithms and networks: ``Communicator``, one rank's handle on a group.

Algorithms are ``async def`` functions that await these calls; the drivers in ``driver`` resume them.
"""

from __future__ import annotations

import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from sparsync.errors import (
    ConfigurationError,
    DisagreementError,
    NonFiniteGradientError,
    first_line,
)
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing, Ledger, Raw, Several

__all__ = ["Communicator", "ReduceOp", "bytes_of", "check_timeout", "rounds"]

_PIECE = 1 << 21  # bytes of a vector that ``allreduce`` exchanges at a time

C = TypeVar("C", bound="Communicator")
ReduceOp = Literal["sum", "max", "min"]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as 1-D bytes: a view of a contiguous tensor, otherwise a copy.

    Example:
        >>> bytes_of(torch.tensor([[1, 256]], dtype=torch.int16)).tolist()
        [1, 0, 0, 1]
    """
    # ``view`` to another element size refuses a last stride other than 1.  A tensor of at most one
    # element may have any stride and still count as contiguous, so ``contiguous`` and ``reshape`` keep
    # its stride.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return a timeout in seconds; refuse one that would never expire.

    Args:
        seconds: as given by the caller.
        name: name of the caller's argument, for the error.

    Raises:
        ConfigurationError: the value is not a number in (0, 10^6]; every wait must end.
    """
    # The zmq transport waits twice the timeout for a sign of life, and libzmq stores milliseconds in 32
    # bits, which is enough for 2 x 10^6 s.  NaN is refused, because both comparisons with it are false.
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= 1e6:
        raise ConfigurationError(
            f"{name} is {seconds!r}; give seconds > 0 and at most 10^6 (12 days): every wait ends"
        )
    return float(seconds)


def rounds(world_size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(skip, count)`` for every round, widest first: ``count`` blocks go to ``rank + skip``.

    The counts add up to P - 1, because the blocks of all ranks but one are sent once.

    Example:
        >>> list(rounds(6)), sum(count for _, count in rounds(6))
        ([(3, 3), (2, 1), (1, 1)], 5)
    """
    wide = world_size
    while wide > 1:
        skip = (wide + 1) // 2
        yield skip, wide - skip
        wide = skip


class Communicator(ABC):
    """One rank's handle on a group: point-to-point calls, and the collectives built from them.

    Attributes:
        rank: this rank, in ``[0, world_size)``.
        world_size: number of ranks P; 1 is legal and never communicates.
        device: the device of all payloads (tensors on another device are copied to it).
        ledger: counts the traffic of all channels.
        tag: the channel of this handle's messages; see ``channel``.
        companions: threads, actors and memories that other modules have attached to this group;
            ``close`` ends them.
        aborted: set by ``abort``; shared by all channels.
        broken: the errors that interrupted calls within ``exchange``; shared by all channels.
        pads: whether ``alltoallv`` pads every message to its sender's capacity.
        tags: number of channels supported by the transport.
        timeout: seconds that any wait may take.

    All payloads are 1-D ``torch.uint8``.  Messages between two ranks on one channel arrive in the order
    sent.  All ranks must call the collectives of a channel in the same order.  Each collective documents
    its cost.
    """

    pads: ClassVar[bool] = False
    tags: int = 2**32  # the 32 bits in ZeroMQ's message header; other transports may have fewer
    timeout: float = 300.0

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.ledger = Ledger()
        self.tag = 0
        self.companions: dict[str, Any] = {}  # closed with this communicator
        self.aborted = threading.Event()
        self.broken: list[str] = []

    def channel(self: C, tag: int) -> C:
        """Return a handle on the same group, whose messages never mix with those of other channels.

        With one channel per unit, several units can be in flight together.
        """
        if not 0 <= tag < self.tags:
            raise ConfigurationError(
                f"channel {tag} does not exist; this transport has tags from 0 to {self.tags - 1}"
            )
        # a shallow copy: links, ledger, companions, ``aborted`` and ``broken`` are shared, so traffic is
        # counted in one place, and an abort ends the waits on all channels
        twin = copy.copy(self)
        twin.tag = tag
        return twin

    def apart(self: C) -> C:
        """Return a handle on this channel with a separate ledger and no companions."""
        twin = copy.copy(self)
        twin.ledger, twin.companions = Ledger(), {}
        return twin

    def abort(self) -> None:
        """Make other threads' waits end soon, with an error; afterwards only ``close`` is allowed.

        While another thread is in a call, this is the only method that may be called.  Messages that
        were already submitted are still sent.
        """
        self.aborted.set()

    def check_open(self) -> None:
        """Refuse new operations and waits after ``abort``."""
        if self.aborted.is_set():
            raise ConfigurationError(
                f"rank {self.rank}: this communicator is closed; make a new one"
            )

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Return a context for one exchange, which refuses to start if an earlier one was interrupted.

        If an exchange is interrupted, every rank stops at a different point.  Messages of this exchange
        may still arrive, and the next exchange would take them for its own.  To prevent this, the
        context records the error.  Errors that all ranks raise together, after they have received all
        messages, do no harm and are not recorded.
        """
        self.check_whole()
        try:
            yield
        except (DisagreementError, NonFiniteGradientError):
            raise
        except BaseException as error:
            if self.world_size > 1:
                self.broken.append(first_line(error))
            raise

    def check_whole(self) -> None:
        """Refuse a new exchange after an earlier one was interrupted."""
        if self.broken:
            raise ConfigurationError(
                f"rank {self.rank}: an earlier exchange broke off ({self.broken[0]}), and its messages "
                "may still arrive; on all ranks close(), connect or attach again, and load"
            )

    def share_broken(self, other: Communicator) -> None:
        """Share the record of interrupted calls with another group, because the exchanges are linked."""
        self.broken = other.broken

    def close(self) -> None:
        """End the companions, and release the transport's own sockets; a second call does nothing."""
        while self.companions:
            self.companions.popitem()[1].close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- provided by a transport -------------------------------------------------------------

    @abstractmethod
    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start sending; the payload must not change until the operation is done."""

    @abstractmethod
    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start receiving at most ``capacity`` bytes."""

    @property
    def now(self) -> float:
        """Seconds on the clock of this rank: the machine's clock, or the simulator's."""
        return time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time spent in this context under a stage, one of ``ledger.STAGES``.

        No time is recorded twice: the time that inner stages or other units in flight have recorded in
        the meantime is subtracted.
        """
        start, booked = self.now, self.ledger.booked
        try:
            yield
        finally:
            elsewhere = self.ledger.booked - booked
            self.ledger.spent(name, max(self.now - start - elsewhere, 0.0))

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        """Account for summing a message of ``nbytes``; this takes time only in the simulator."""
        return Finished()

    # ---- point to point ------------------------------------------------------------------------

    def isend(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send without waiting.  Await the result before changing ``payload``."""
        self._check_peer(dest, "send to")
        payload = payload.to(self.device)
        self.ledger.sent(phase, payload.numel(), framing.parts(payload))
        return self.start_send(payload, dest, phase, framing)

    def irecv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Receive without waiting.  Await the result, exactly the bytes that were sent."""
        self._check_peer(source, "receive from")
        return self.start_recv(source, capacity, phase, framing)

    def _check_peer(self, peer: int, verb: str) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ConfigurationError(
                f"rank {self.rank} cannot {verb} rank {peer}; "
                f"name another rank in [0, {self.world_size})"
            )

    # ---- collectives, from point-to-point; a transport may override them with a native call -----
    #
    # Logarithmic collectives run on a circulant graph: with skips s_0 = P, s_{i+1} = ceil(s_i / 2)
    # down to 1 there are ceil(log2 P) rounds, and every block crosses each rank's port once.  For P
    # a power of two these are the rounds and volumes of recursive doubling and halving.
    #
    # References: Bruck et al., IEEE TPDS 1997 (allgather); Träff, "Optimal, Non-pipelined
    # Reduce-scatter and Allreduce Algorithms", 2024 (the circulant reduce-scatter).

    async def allreduce(
        self, tensor: Tensor, phase: str, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> Tensor:
        """Return the element-wise reduction over ranks, equal on all of them; any shape and dtype.

        With ``in_place``, ``tensor``, which must be contiguous, is overwritten and returned; after an
        error, part of it may be overwritten.

        This is a reduce-scatter, then an allgather: 2 ceil(log2 P) messages per 2 MiB, and
        2 n (P - 1) / P elements.  A piece of 2 MiB consists of the same columns of all blocks.  So the
        order in which an element is summed depends only on its block, not on the number of pieces, and
        the buffer stays small.
        """
        world_size, size = self.world_size, tensor.numel()
        operations: dict[ReduceOp, Callable[..., Tensor]]
        operations = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
        total = tensor if in_place else tensor.new_empty(tensor.shape)
        width = -(-size // world_size)  # elements of a block; rank r sums block r
        full = size // max(width, 1)  # number of blocks without padding
        given, rest = _rows(tensor.reshape(-1), full, width)
        rows, last = _rows(total.view(-1), full, width)
        step = min(max(_PIECE // (world_size * tensor.element_size()), 1), width)
        buffer = tensor.new_empty(world_size, step)
        for start in range(0, max(width, 1), max(step, 1)):
            columns = slice(start, min(start + step, width))
            blocks, end = buffer[:, : columns.stop - start], last[columns]
            # ``in_place`` is safe: input and output are handled piece by piece, and no column is read
            # after it was written
            blocks[:full] = given[:, columns]
            blocks[full:].zero_()  # padding, which is reduced as well but never copied out
            blocks[full : full + 1, : end.numel()] = rest[columns]
            await self._reduce_blocks(blocks, phase, operations[op])
            rows[:, columns] = blocks[:full]
            last[columns] = blocks[full : full + 1, : end.numel()].reshape(-1)
        return total

    async def _reduce_blocks(
        self, blocks: Tensor, phase: str, combine: Callable[..., Tensor]
    ) -> None:
        """Allreduce P blocks, `[P, width]`, in place."""
        world_size = self.world_size
        # This is the reduce-scatter.  The tree along which block r is summed depends on P and r, but not
        # on the order of arrival.  Only rank r has the sum, and the allgather copies it, so all ranks
        # get the same bits.
        for skip, count in rounds(world_size):
            theirs = await self._swap(blocks, self.rank + skip, count, skip, phase)
            for i, block in enumerate(theirs):
                mine = blocks[(self.rank + i) % world_size]
                combine(mine, block, out=mine)
            await self.work(theirs.numel() * theirs.element_size(), dense=True)
        # the allgather uses the same graph in reverse, from the narrowest round to the widest
        for skip, count in reversed(list(rounds(world_size))):
            theirs = await self._swap(blocks, self.rank, count, -skip, phase)
            for i, block in enumerate(theirs):
                blocks[(self.rank + skip + i) % world_size] = block

    async def _swap(self, blocks: Tensor, first: int, count: int, skip: int, phase: str) -> Tensor:
        """Send ``count`` blocks from block ``first`` on to ``rank + skip``; receive the same number."""
        framing = Raw("value" if blocks.is_floating_point() else "control")
        world_size, width = blocks.shape
        first %= world_size
        ends = blocks[first : first + count], blocks[: max(first + count - world_size, 0)]
        payload = torch.cat(ends).view(-1).view(torch.uint8)
        source, dest = (self.rank - skip) % world_size, (self.rank + skip) % world_size
        receiving = self.irecv(source, payload.numel(), phase, framing)
        sending = self.isend(payload, dest, phase, framing)
        theirs: Tensor = await receiving
        await sending
        return theirs.to(blocks.device).view(blocks.dtype).view(count, width)

    async def allgather(self, tensor: Tensor, phase: str) -> list[Tensor]:
        """Collect one tensor of the same shape and dtype from every rank, in rank order."""
        payload = bytes_of(tensor)
        framing = Raw("value" if tensor.is_floating_point() else "control")
        blocks = await self.allgatherv(payload, [payload.numel()] * self.world_size, phase, framing)
        # clone, because a received block may start at any byte of its message, and ``view`` to a wider
        # dtype needs an aligned offset
        return [b.to(tensor.device).clone().view(tensor.dtype).view(tensor.shape) for b in blocks]

    async def allgatherv(
        self,
        payload: Tensor,
        capacities: Sequence[int],
        phase: str,
        framing: Framing,
        *,
        ring: bool = False,
    ) -> list[Tensor]:
        """Collect one message per rank, of at most ``capacities[rank]`` bytes, in rank order.

        Cost: ceil(log2 P) messages; every rank receives the bytes of all other ranks.  A rank sends its
        own message in every round, and forwards a received message in the rounds after its arrival.  If
        one message is much longer than the others, its owner thus sends it ceil(log2 P) times.  With
        ``ring`` there are P - 1 messages, and no rank sends any message twice.
        """
        world_size, rank = self.world_size, self.rank
        blocks = [payload.to(self.device)]  # blocks[i] belongs to rank + i; on a ring, to rank - i
        if ring:
            source, dest = (rank - 1) % world_size, (rank + 1) % world_size
            for hop in range(1, world_size):
                most = capacities[(rank - hop) % world_size]
                receiving = self.irecv(source, most, phase, framing)
                sending = self.isend(blocks[-1], dest, phase, framing)
                blocks.append(await receiving)
                await sending
            return [blocks[(rank - r) % world_size] for r in range(world_size)]
        for skip, count in reversed(list(rounds(world_size))):
            # several messages are sent as one; each contains its length, so no round is needed for sizes
            around = [capacities[(rank + i) % world_size] for i in range(skip + count)]
            outgoing, expected = Several(framing, around[:count]), Several(framing, around[skip:])
            source, dest = (rank + skip) % world_size, (rank - skip) % world_size
            receiving = self.irecv(source, sum(around[skip:]), phase, expected)
            sending = self.isend(torch.cat(blocks[:count]), dest, phase, outgoing)
            blocks += expected.cut(await receiving)
            await sending
        return [blocks[(r - rank) % world_size] for r in range(world_size)]

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Send ``payloads[r]`` to each rank r; return the messages received, in rank order.

        ``capacities[r]`` is the maximum number of bytes that rank r sends to any one rank.  The list is
        the same on all ranks, so a transport may use a native call with padded messages.  Destinations
        are rotated (rank + 1, rank + 2, ...).
        """
        world_size, rank = self.world_size, self.rank
        receiving, sending = {}, []
        # destinations are rotated, as in Ok-Topk, Figure 2b: if all ranks sent to rank 0 first,
        # then to rank 1, each round would flood one port while all others are idle (2a)
        for shift in range(1, world_size):
            source, dest = (rank - shift) % world_size, (rank + shift) % world_size
            receiving[source] = self.irecv(source, capacities[source], phase, framing)
            sending.append(self.isend(payloads[dest], dest, phase, framing))
        received = {rank: payloads[rank].to(self.device)}
        for source, operation in receiving.items():
            received[source] = await operation
        for operation in sending:
            await operation
        return [received[r] for r in range(world_size)]

    async def barrier(self) -> None:
        """Return once every rank has called this."""
        await self.allgather(torch.zeros(1, dtype=torch.uint8, device="cpu"), "barrier")


def _rows(flat: Tensor, full: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the full blocks, `[full, width]`, and the elements that follow them (views)."""
    return flat[: full * width].view(full, width), flat[full * width :]
