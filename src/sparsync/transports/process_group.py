"""The ``Communicator`` over ``torch.distributed``: gloo, and NCCL by the same calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.errors import CommunicationError, ConfigurationError, DeadlineError, PeerError
from sparsync.transports.actors import Actor, Host, ThreadHost
from sparsync.transports.communicator import Communicator, ReduceOp, check_timeout
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Framing, Parts
from sparsync.transports.store import RollCall, gather, store_of

__all__ = ["TorchCommunicator"]

_LENGTH_BYTES = 8
_HEAD: Final = 3  # tags of an actor's messages: lengths, then bodies
_BODY: Final = 4
_FAREWELL: Final = 5.0  # seconds; a thread left in gloo may abort the process at its exit
_FOREVER = timedelta(days=300)  # a wait that times out would end a group of gloo's


@final
class TorchCommunicator(Communicator):
    """One rank of a process group.

    Args:
        group: a process group; None for the default one.
        timeout: seconds that any wait may take before it fails with an error.
        announce_lengths: send each message's length ahead of it.  NCCL needs that (both sides must
            name the same size); gloo does not (it receives into a larger buffer).  Default: by
            backend.

    CUDA tensors are staged through host memory when the backend is gloo.
    """

    pads = True

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        announce_lengths: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is not initialised; call init_process_group() first, "
                "or run under torchrun"
            )
        timeout = check_timeout(timeout)
        backend = dist.get_backend(group)
        on_gpu = backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        super().__init__(dist.get_rank(group), dist.get_world_size(group), torch.device(device))
        self.group, self.timeout = group, timeout
        own = group or dist.distributed_c10d._get_default_group()
        options = getattr(own._get_backend(self.device), "options", None)
        # gloo ends a collective at the group's own timeout, if that is shorter
        longest = options._timeout.total_seconds() if options is not None else timeout
        self._patience = min(timeout, longest)
        self.roll = RollCall(group, self.rank, self.world_size)
        self.announce_lengths = on_gpu if announce_lengths is None else announce_lengths

    def ran_out(self, seconds: float) -> bool:
        """Tell whether a wait that failed after ``seconds`` ran into its deadline; gloo does not say."""
        return seconds > 0.95 * self._patience

    def host(self, actor: Actor) -> Host:
        """Run an actor on a thread of its own, over a process group of its own (gloo)."""
        members = None if self.group is None else dist.get_process_group_ranks(self.group)
        with _named(self, "a process group for actors", among_all=True):
            gather(store_of(self.group), self.rank, self.world_size, b"", self.timeout)
            group = dist.new_group(
                members, timeout=_FOREVER, backend="gloo", use_local_synchronization=bool(members)
            )
        assert isinstance(group, dist.ProcessGroup)
        return _TorchHost(actor, self, group)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start ``isend``, after the length where that is announced."""
        where = f"send to rank {dest} in phase '{phase}'"
        payload = payload.contiguous()
        works = []
        with _named(self, where):
            if self.announce_lengths and framing.variable:
                length = torch.tensor([payload.numel()], device=self.device)
                self.ledger.sent(phase, _LENGTH_BYTES, Parts(header=_LENGTH_BYTES), messages=0)
                works.append(dist.isend(length, group=self.group, group_dst=dest, tag=self.tag))
            if payload.numel():
                works.append(dist.isend(payload, group=self.group, group_dst=dest, tag=self.tag))
        # gloo reads the payload's memory until the operation is done
        return _Call(self, where, lambda keep=payload: works)  # type: ignore[misc]

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start ``irecv`` into a buffer of ``capacity`` bytes, or into the announced length."""
        where = f"message from rank {source} in phase '{phase}'"
        return _Receive(self, where, source, capacity, phase, framing)

    async def allreduce(self, tensor: Tensor, phase: str, op: ReduceOp = "sum") -> Tensor:
        """Use the native allreduce; booked as 2 n (P - 1) / P sent and received."""
        if self.world_size == 1 or tensor.numel() == 0:
            return tensor.clone()
        result = tensor.to(self.device, copy=True)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        await _Call(
            self,
            f"allreduce in phase '{phase}'",
            lambda: [dist.all_reduce(result, reduce_op[op], group=self.group, async_op=True)],
            among_all=True,
        )
        self.ledger.reduced(phase, result, self.world_size)
        return result.to(tensor.device)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Use the native call, each message padded to its sender's capacity.

        A message per rank and a call per phase; point to point, gloo takes 4 ms a round and more.
        """
        rank, own = self.rank, capacities[self.rank]
        others = [r for r in range(self.world_size) if r != rank]
        if not others:
            return list(payloads)
        rows = torch.zeros(len(others), own, dtype=torch.uint8, device=self.device)
        parts, padding, known = Parts(), 0, dict[int, Parts]()
        for row, dest in zip(rows, others, strict=True):
            payload = payloads[dest]
            length = payload.numel()
            if length > own:
                raise ConfigurationError(
                    f"rank {rank}, phase '{phase}': a message of {length} bytes exceeds what this "
                    f"rank may send to one other, {own}"
                )
            row[:length] = payload
            if id(payload) not in known:  # often all ranks get the same
                known[id(payload)] = framing.parts(payload)
            parts, padding = parts + known[id(payload)], padding + own - length
        sizes = [capacities[r] if r != rank else 0 for r in range(self.world_size)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sent_sizes = [own if r != rank else 0 for r in range(self.world_size)]
        await _Call(
            self,
            f"alltoallv in phase '{phase}'",
            lambda: [
                dist.all_to_all_single(
                    received, rows.view(-1), sizes, sent_sizes, group=self.group, async_op=True
                )
            ],
            among_all=True,
        )
        self.ledger.sent(phase, rows.numel(), parts + Parts(control=padding), len(others))
        self.ledger.received(phase, received.numel(), len(others))
        blocks = list(torch.split(received, sizes))
        if framing.variable:
            blocks = [b if r == rank else b[: framing.length(b)] for r, b in enumerate(blocks)]
        blocks[rank] = payloads[rank]
        return blocks


@final
class _named:
    """Turns an error of torch into one that names rank, phase and step.

    Args:
        comm: of this rank.
        where: what was under way, and with which rank.
        among_all: with all of them: those that are missing are asked for.
    """

    def __init__(self, comm: TorchCommunicator, where: str, *, among_all: bool = False) -> None:
        self.comm, self.where, self.among_all = comm, where, among_all

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
            return
        rank, step = self.comm.rank, self.comm.ledger.step
        seconds = time.monotonic() - self.started
        first_line = (str(error) or type(error).__name__).splitlines()[0].split(". This is ")[0]
        place = f"rank {rank}, step {step}: {self.where}"
        alive, gone = "is that rank alive?", "the peer is gone or broke off"
        if self.among_all:
            gone = self.comm.roll.missing()
            alive = f"{gone}."
        else:
            self.comm.roll.answer()
        if self.comm.ran_out(seconds):
            raise DeadlineError(
                f"{place} did not complete within {self.comm.timeout:g} s; {alive} "
                "Raise timeout= if it is only slow"
            ) from error
        raise PeerError(f"{place} failed after {seconds:.1f} s: {gone} ({first_line})") from error


@final
class _Call(Operation):
    """Native requests: under way, or a collective that is started when it is waited for.

    A group's collectives must start in one order on all ranks.  Of several channels in flight only
    the oldest is waited for, which is the same on all ranks.
    """

    def __init__(
        self,
        comm: TorchCommunicator,
        where: str,
        start: Callable[[], Sequence[Any]],
        *,
        among_all: bool = False,
    ) -> None:
        self.comm, self.where, self.start, self.among_all = comm, where, start, among_all

    def wait(self) -> None:
        with _named(self.comm, self.where, among_all=self.among_all):
            for work in self.start():
                work.wait(timedelta(seconds=self.comm.timeout))
        self.done = True


@final
class _Receive(Operation):
    """A posted receive; the length is known from the framing or from its announcement."""

    def __init__(
        self,
        comm: TorchCommunicator,
        where: str,
        source: int,
        capacity: int,
        phase: str,
        framing: Framing,
    ) -> None:
        self.comm, self.where, self.source = comm, where, source
        self.capacity, self.phase, self.framing = capacity, phase, framing
        self.announced = comm.announce_lengths and framing.variable
        self.work: Any = None
        if self.announced:
            self.buffer = torch.zeros(1, dtype=torch.int64, device=comm.device)
        else:
            self.buffer = torch.empty(capacity, dtype=torch.uint8, device=comm.device)
        self._post()

    def _post(self) -> None:
        if self.buffer.numel():
            with _named(self.comm, self.where):
                self.work = dist.irecv(
                    self.buffer, group=self.comm.group, group_src=self.source, tag=self.comm.tag
                )

    def _finish(self) -> None:
        if self.work is not None:
            with _named(self.comm, self.where):
                self.work.wait(timedelta(seconds=self.comm.timeout))
        self.work = None

    def wait(self) -> None:
        self._finish()
        if self.announced:
            length = int(self.buffer)
            if not 0 <= length <= self.capacity:
                raise PeerError(
                    f"rank {self.comm.rank}, step {self.comm.ledger.step}: {self.where} announces "
                    f"{length} bytes where at most {self.capacity} can be"
                )
            self.buffer = torch.empty(length, dtype=torch.uint8, device=self.comm.device)
            self._post()
            self._finish()
            extra = _LENGTH_BYTES
        else:
            length = self.framing.length(self.buffer) if self.framing.variable else self.capacity
            extra = 0
        self.result = self.buffer[:length]
        self.comm.ledger.received(self.phase, length + extra)
        self.done = True


@final
class _TorchHost(ThreadHost):
    """Carries an actor's messages over a gloo group of its own, a thread per peer and direction.

    gloo's waits cannot be interrupted and a group is lost when one times out, so threads wait, without
    end: one per peer receives, one sends.  A peer's death ends its threads and no others.
    """

    def __init__(self, actor: Actor, comm: TorchCommunicator, group: dist.ProcessGroup) -> None:
        super().__init__(actor, comm.rank, comm.world_size, comm.timeout)
        self._group = group
        self._inbox: SimpleQueue[tuple[int, Tensor] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._outboxes: dict[int, SimpleQueue[Tensor | None]] = {}
        self._threads: list[threading.Thread] = []
        for peer in range(comm.world_size):
            if peer != comm.rank:
                self._outboxes[peer] = SimpleQueue()
                for work in (self._send_all, self._receive_all):
                    name = f"sparsync-peer-{peer}"
                    thread = threading.Thread(target=work, args=(peer,), name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
        self._thread.start()

    def send(self, dest: int, payload: Tensor) -> None:
        """Queue a message."""
        self._outboxes[dest].put(payload)

    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Take the next message."""
        try:
            if seconds > 0:
                return self._inbox.get(timeout=seconds)
            while (message := self._inbox.get_nowait()) is None:
                pass  # a wake
            return message
        except Empty:
            return None

    def deaths(self) -> list[tuple[int, str]]:
        """Return the peers whose connection has ended."""
        found = {}
        while not self._ended.empty():
            peer, reason = self._ended.get()
            found[peer] = reason
        return list(found.items())

    def wake(self) -> None:
        """Put nothing into the inbox."""
        self._inbox.put(None)

    def leave(self) -> None:
        """Send what is queued and a farewell, and wait a while for the peers' own."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        until = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(timeout=max(until - time.monotonic(), 0.0))

    def _send_all(self, peer: int) -> None:
        outbox = self._outboxes[peer]
        try:
            while True:
                payload = outbox.get()
                size = -1 if payload is None else payload.numel()
                dist.send(torch.tensor([size]), group=self._group, group_dst=peer, tag=_HEAD)
                if payload is None:
                    return
                dist.send(payload, group=self._group, group_dst=peer, tag=_BODY)
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            self._end(peer, error)

    def _receive_all(self, peer: int) -> None:
        head = torch.empty(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(head, group=self._group, group_src=peer, tag=_HEAD)
                if int(head) < 0:
                    self._ended.put((peer, "it has closed its communicator"))
                    self.wake()
                    return
                body = torch.empty(int(head), dtype=torch.uint8)
                dist.recv(body, group=self._group, group_src=peer, tag=_BODY)
                self._inbox.put((peer, body))
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            self._end(peer, error)

    def _end(self, peer: int, error: Exception) -> None:
        self._ended.put((peer, f"its connection ended ({str(error).splitlines()[0][:80]})"))
        self.wake()
