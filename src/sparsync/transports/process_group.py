"""Connect the ranks of a process group over ``torch.distributed`` itself, over ZeroMQ or over MPI."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    PeerError,
    require,
)
from sparsync.transports.communicator import Communicator, ReduceOp, check_timeout
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing, Ledger, Parts
from sparsync.transports.rendezvous import GlooPlace, check_places, check_sockets, convene, store_of

if TYPE_CHECKING:
    from sparsync.transports.actors import Actor, Host

__all__ = [
    "NEVER",
    "TRANSPORTS",
    "Groups",
    "RollCall",
    "TorchCommunicator",
    "break_off",
    "check_group",
    "check_transport",
    "collectives_of",
    "connect_group",
]

# public since torch 2.14, which warns about the older name
_set_timeout: Final[Any] = (
    getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
)

_PATIENCE: Final = 1.0  # seconds that the other ranks have to report after one rank's failure
_LOOK: Final = 0.02  # seconds between checks of the store
NEVER: Final = 2**30  # a tag that no gloo channel uses; reserved for ``break_off``
_AT_ONCE: Final = timedelta(milliseconds=1)
TRANSPORTS = ("auto", "torch", "zmq", "mpi")


def connect_group(
    group: dist.ProcessGroup | None = None,
    *,
    transport: str = "auto",
    timeout: float = 300.0,
    connect_timeout: float = 60.0,
    **sockets: Any,
) -> Communicator:
    """Connect the ranks of a process group; this is collective.

    Args:
        group: the process group whose members are the ranks; None for the default group.
        transport: "torch" (gloo), "zmq" (a separate mesh), "mpi" (for ranks started by mpiexec), or
            "auto", which means zmq.  Sparse exchanges over zmq took 5 to 10 % less time than over gloo,
            and sent fewer bytes, because gloo's messages are padded (``benchmarks/lab_exchange.md``).
        timeout: seconds that any wait may take.
        connect_timeout: seconds that opening zmq's connections may take.
        sockets: for zmq: ``interface``, ``port_range``, ``advertise`` and ``curve_keys``.

    Raises:
        ConfigurationError: the transport is unknown, settings for zmq's sockets are given although the
            transport is not zmq, or this rank is not in the group.
        DeadlineError: names the ranks that did not arrive in time.
    """
    check_transport(transport, sockets)
    check_group("group", group)
    over_torch = TorchCommunicator(group, timeout=timeout)
    rank, world_size = over_torch.rank, over_torch.world_size
    if transport == "torch" or world_size == 1:
        return over_torch
    if transport == "mpi":
        from sparsync.transports.mpi import MpiCommunicator  # most jobs have no MPI

        return MpiCommunicator.over(over_torch, timeout=timeout)
    # imported here, because groups over gloo and MPI do not need pyzmq
    from sparsync.transports.zmq import ZmqCommunicator

    return ZmqCommunicator(
        rank,
        world_size,
        store=store_of(group),
        timeout=timeout,
        connect_timeout=connect_timeout,
        **sockets,
    )


def check_group(name: str, group: Any) -> None:
    """Refuse a value that is not a process group, or a group without this rank.

    Args:
        name: the name of the argument, for the message.
        group: the value; None stands for the default group.
    """
    require(
        group != dist.GroupMember.NON_GROUP_MEMBER,
        f"{name} is the value that torch.distributed.new_group() returns on ranks outside of the new "
        "group; give a group that contains this rank",
    )
    if group is None or not dist.is_initialized():
        return
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(
            f"{name} is {group!r}; give a process group that is not destroyed, e.g. one of "
            "torch.distributed.new_group(), or mesh.get_group()"
        ) from None


def collectives_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of collectives that have begun on a group, or 0 if its backend does not count.

    Cost: 0.2 us.
    """
    if not dist.is_initialized():
        return 0
    own: Any = group or distributed_c10d._get_default_group()
    with suppress(RuntimeError):  # MPI does not count, nor does a group of several backends
        return int(own._get_sequence_number_for_group())
    return 0


def check_transport(transport: str, sockets: Mapping[str, Any]) -> None:
    """Refuse an unknown transport, and settings of zmq's sockets that are wrong or given without zmq."""
    if transport not in TRANSPORTS:
        raise ConfigurationError(
            f"unknown transport {transport!r}; choose one of {', '.join(TRANSPORTS)}"
        )
    given = ", ".join(name for name, value in sockets.items() if value is not None)
    if given and transport in ("torch", "mpi"):
        other = "gloo" if transport == "torch" else "MPI"
        raise ConfigurationError(
            f"{given}: for transport='zmq'; {other} neither encrypts nor authenticates, and chooses its "
            "own sockets"
        )
    check_sockets(sockets)


@final
class TorchCommunicator(Communicator):
    """One rank of a process group, or of the default group if ``group`` is None.

    With gloo, CUDA tensors are staged through host memory.  NCCL serves only the native collectives: it
    has no channels, both sides of a message must know its length, and a pair of ranks that both receive
    before they send waits forever.

    Args:
        group: the process group.
        timeout: seconds that any wait may take.
        device: the GPU of this rank for NCCL; None means the current one.
        ledger: counts the traffic; None means a new one.
    """

    pads = True
    tags = NEVER

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        device: torch.device | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is not initialised; call init_process_group() first, "
                "or run under torchrun"
            )
        timeout = check_timeout(timeout)
        if dist.get_backend(group) != "nccl":
            device = torch.device("cpu")
        elif device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self.group, self.timeout = group, timeout
        self.ledger = ledger or self.ledger
        # Private functions are called, because torch has no public way to read a group's timeout.  If
        # that is shorter than ``timeout``, gloo ends a collective at the group's timeout, and its error
        # does not say so.
        own = group or distributed_c10d._get_default_group()
        options = getattr(own._get_backend(self.device), "options", None)
        longest = options._timeout.total_seconds() if options is not None else timeout
        self.patience = min(timeout, longest)
        self.roll = RollCall(group, self.rank, self.world_size)

    def host(self, actor: Actor) -> Host:
        """Run an actor over ZeroMQ; the ranks rendezvous in the store; errors name missing ranks."""
        # imported here, because most groups run no actor and do not need pyzmq
        from sparsync.transports.zmq import host_over

        return host_over(actor, self, store_of(self.group))

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start ``isend``; gloo reads the payload's memory until the operation is done."""
        payload, where = payload.contiguous(), f"send to rank {dest} in phase '{phase}'"
        self._check_messages(where)
        if payload.numel() == 0:
            return Finished()
        with _named(self, where):
            work = dist.isend(payload, group=self.group, group_dst=dest, tag=self.tag)
        # gloo reads the payload until the request ends, so the default argument ``keep`` keeps it alive
        return _Call(self, where, lambda keep=payload: work)  # type: ignore[misc]

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start ``irecv`` into a buffer of ``capacity`` bytes; the message's header states its length.

        gloo accepts a message shorter than the buffer, and does not report its length.
        """
        where = f"message from rank {source} in phase '{phase}'"
        self._check_messages(where)
        buffer, work = torch.empty(capacity, dtype=torch.uint8, device=self.device), None
        if capacity:
            with _named(self, where):
                work = dist.irecv(buffer, group=self.group, group_src=source, tag=self.tag)

        def finish() -> Tensor:
            payload = framing.first(buffer, capacity)
            self.ledger.received(phase, payload.numel())
            return payload

        return _Call(self, where, lambda: work, finish)

    def _check_messages(self, where: str) -> None:
        if self.device.type == "cuda":
            raise ConfigurationError(
                f"rank {self.rank}: {where} would go over NCCL, which serves only native collectives; "
                "use transport='zmq', or a group of gloo's"
            )

    def abort(self) -> None:
        """End all waits for this group's messages and collectives."""
        super().abort()
        own = self.group
        if own is None:  # the default group belongs to the program, which may continue to use it
            return
        if self.device.type == "cuda":
            own.abort()
        else:
            break_off(own, self.world_size)

    def under_way(self, phase: str, work: Any) -> Operation:
        """Wrap a native collective started with ``async_op`` in an operation."""
        return _Call(self, f"phase '{phase}'", lambda: work, among_all=True, started=True)

    async def allreduce(
        self, tensor: Tensor, phase: str, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> Tensor:
        """Use the native allreduce; the ledger counts 2 n (P - 1) / P as sent and received."""
        if self.world_size == 1 or tensor.numel() == 0:
            return tensor if in_place else tensor.clone()
        result = tensor.to(self.device, copy=not in_place)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        await _Call(
            self,
            f"allreduce in phase '{phase}'",
            lambda: dist.all_reduce(result, reduce_op[op], group=self.group, async_op=True),
            among_all=True,
        )
        self.ledger.reduced(phase, result, self.world_size)
        return tensor.copy_(result) if in_place else result.to(tensor.device)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Use the native call, with each message padded to its sender's capacity.

        This is a single call with one message to every rank, because gloo's point-to-point messages take
        4 ms or more per round.
        """
        rank, own = self.rank, capacities[self.rank]
        others = [r for r in range(self.world_size) if r != rank]
        if not others:
            return list(payloads)
        # zero the rows, because the padding is also sent and must not reveal the memory's former content
        rows = torch.zeros(len(others), own, dtype=torch.uint8, device=self.device)
        parts, padding, known = Parts(), 0, dict[int, Parts]()
        for row, dest in zip(rows, others, strict=True):
            payload = payloads[dest]
            length = payload.numel()
            if length > own:
                raise ConfigurationError(
                    f"rank {rank}, phase '{phase}': a message of {length} bytes exceeds this rank's "
                    f"capacity of {own} for each other rank"
                )
            row[:length] = payload
            if id(payload) not in known:  # all ranks are often sent the same payload
                known[id(payload)] = framing.parts(row[:length])
            parts, padding = parts + known[id(payload)], padding + own - length
        sizes = [capacities[r] if r != rank else 0 for r in range(self.world_size)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sent_sizes = [own if r != rank else 0 for r in range(self.world_size)]
        await _Call(
            self,
            f"alltoallv in phase '{phase}'",
            lambda: dist.all_to_all_single(
                received, rows.view(-1), sizes, sent_sizes, group=self.group, async_op=True
            ),
            among_all=True,
        )
        # padding is counted, because the ledger records the bytes on the links
        self.ledger.sent(phase, rows.numel(), parts + Parts(control=padding), len(others))
        self.ledger.received(phase, received.numel(), len(others))
        blocks = list(torch.split(received, sizes))
        if framing.variable:
            blocks = [b if r == rank else framing.first(b, sizes[r]) for r, b in enumerate(blocks)]
        blocks[rank] = payloads[rank]
        return blocks


@contextmanager
def _named(comm: TorchCommunicator, where: str, *, among_all: bool = False) -> Iterator[None]:
    """Convert a torch error into one that names rank, phase and step.

    Args:
        comm: communicator of this rank.
        where: the operation in progress and its peer, in words.
        among_all: whether the operation involves all ranks, so that all other ranks are its peers.
    """
    started = time.monotonic()
    comm.check_open()
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        comm.check_open()  # if this process aborted the wait, no peer is to blame
        seconds = time.monotonic() - started
        first_line = (str(error) or type(error).__name__).splitlines()[0].split(". This is ")[0]
        place = f"rank {comm.rank}, {comm.ledger.place()}: {where}"
        alive, gone = "is that rank alive?", "the peer is gone or broke off"
        if among_all:
            gone = comm.roll.missing()
            alive = f"{gone}."
        else:
            # report this rank's failure without waiting: once this rank ends, the other ranks'
            # collectives fail, and these ranks then look for such reports
            comm.roll.missing(patience=0.0)
        # gloo does not report whether its deadline has passed, so check the clock
        if seconds > 0.95 * comm.patience:
            raise DeadlineError(
                f"{place} did not complete within {comm.timeout:g} s; {alive} "
                "Raise timeout= if it is only slow"
            ) from error
        raise PeerError(f"{place} failed after {seconds:.1f} s: {gone} ({first_line})") from error


def break_off(gloo: Any, world_size: int) -> None:
    """Close a gloo group's connections, so that other threads' and peers' waits end with an error.

    gloo closes a connection when a wait on it times out; up to torch 2.7, there is no other way to close
    one.
    """
    for peer in range(world_size):
        # provoke a timeout: wait for a message that no rank ever sends
        with suppress(RuntimeError, ValueError):  # the peer has disconnected, or is this rank
            gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, NEVER).wait(_AT_ONCE)


@final
class _Call(Operation):
    """A native request in flight, or a collective that starts at the first wait for it.

    All ranks must start a group's collectives in the same order.  If several channels are in flight, a
    rank waits only for the oldest, which is the same one on all ranks.

    Args:
        comm: communicator of this rank.
        where: as in ``_named``.
        start: returns the request, or None if there is nothing to wait for.
        finish: returns the result once the request is done.
        among_all: as in ``_named``.
        started: whether the request is already in flight, so that ``start`` may be called at any time to
            inspect it.
    """

    def __init__(
        self,
        comm: TorchCommunicator,
        where: str,
        start: Callable[[], Any],
        finish: Callable[[], Tensor] | None = None,
        *,
        among_all: bool = False,
        started: bool = False,
    ) -> None:
        self.comm, self.where, self.start, self.finish = comm, where, start, finish
        self.among_all, self.started = among_all, started

    def wait(self) -> None:
        with _named(self.comm, self.where, among_all=self.among_all):
            work = self.start()
            if work is not None:
                work.wait(timedelta(seconds=self.comm.timeout))
        if self.finish is not None:
            self.result = self.finish()
        self.done = True

    def poll(self, seconds: float) -> bool:
        work = self.start() if self.started and not self.done else None
        over = self.started and (work is None or work.is_completed())
        if not self.done and (seconds > 0 or over):
            self.wait()
        return self.done


@final
class RollCall:
    """Finds out which ranks are missing after a native collective has failed; gloo does not say.

    A rank whose exchange has failed reports this in the group's store; a dead or stuck rank does not.
    Live ranks may report late, so the missing ranks may include others besides the one to blame.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        self._group, self._rank, self._world_size = group, rank, world_size

    def missing(self, patience: float = _PATIENCE) -> str:
        """Report that this rank's exchange has failed; name the ranks that do not report in time."""
        missing = set(range(self._world_size))

        def ask() -> None:
            # an error means that the store is lost, or that the group was destroyed
            with suppress(RuntimeError, KeyError, ValueError):
                store = PrefixStore("sparsync/failed", store_of(self._group))
                store.set(str(self._rank), "failed")
                until = time.monotonic() + patience
                while missing and time.monotonic() < until:
                    missing.difference_update([r for r in missing if store.check([str(r)])])
                    time.sleep(_LOOK)

        # use a separate thread, which can be abandoned: if the store's host is stuck too, a call lasts
        # until the store's timeout
        thread = threading.Thread(target=ask, name="sparsync-roll-call", daemon=True)
        thread.start()
        thread.join(2 * _PATIENCE)
        if self._rank in missing:
            return "the rank to blame is unknown: the store does not answer; its host may be down"
        if not missing:
            return "all ranks are there: a connection between them is lost, or too slow"
        return f"no word from rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"


@final
class Groups:
    """Creates process groups among the ranks that attach a model, and destroys them.

    All methods are collective over ``world``; None means all ranks.
    """

    def __init__(
        self, world: dist.ProcessGroup | None, timeout: float, connect_timeout: float = 60.0
    ) -> None:
        self.world, self.timeout, self._connect_timeout = world, timeout, connect_timeout
        self._all = dist.get_world_size(world) == dist.get_world_size()
        self._made: list[dist.ProcessGroup] = []
        self._pid = os.getpid()

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks of the world, in rank order.

        The ranks rendezvous in the store, because gloo would not report which rank is missing.
        """
        return [card["numbers"] for card in self._cards(lambda: {"numbers": list(numbers)})]

    def _cards(self, ready: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        rank, size = dist.get_rank(self.world), dist.get_world_size(self.world)
        return convene(store_of(self.world), rank, size, ready, self.timeout, "attach")

    def make(self, ranks: Sequence[int], backend: str | None = "gloo") -> dist.ProcessGroup:
        """Return a group that consists of these global ranks, this one included.

        This is collective; the groups that any two ranks ask for must be equal or disjoint.

        Raises:
            ConfigurationError: the interface configured for gloo does not exist, or another rank's
                interface cannot reach it.
            CommunicationError: a rank of the group has died, is late, or cannot be reached.
        """

        def ready() -> dict[str, Any]:
            return {"numbers": list(ranks), "place": asdict(GlooPlace.here())}

        cards = self._cards(ready)
        world = dist.get_process_group_ranks(self.world or dist.group.WORLD)
        places = {
            rank: GlooPlace.of(card["place"]) for rank, card in zip(world, cards, strict=True)
        }
        several = check_places(places)
        place = places[dist.get_rank()]
        every = sorted({tuple(card["numbers"]) for card in cards})
        # By default, all ranks of the job must call ``new_group``.  Ranks outside of ``world`` never get
        # here.  If there are any, local synchronisation is used: only the members must call it then.
        options: Any = {} if self._all else {"use_local_synchronization": True}
        seconds = min(self.timeout, self._connect_timeout)
        for members in every if self._all else [tuple(ranks)]:
            started = time.monotonic()
            try:
                with place.listening(several=several):
                    group = dist.new_group(
                        list(members), timedelta(seconds=seconds), backend, **options
                    )
            except RuntimeError as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                told = ", ".join(f"rank {rank} at {places[rank].at}" for rank in members)
                raise PeerError(
                    f"rank {dist.get_rank()}, phase 'attach': gloo could not connect ranks "
                    f"{list(members)}, and gave up after {time.monotonic() - started:.1f} s "
                    f"(connect_timeout= is {self._connect_timeout:g} s): one of them has ended, or "
                    f"cannot be reached ({told}); let gloo's ports in through the firewalls between "
                    f"them, or set GLOO_SOCKET_IFNAME to the interface that leads to the others "
                    f"({reason})"
                ) from error
            if dist.get_rank() in members:
                # until here, the timeout has limited connecting; from now on, it limits waits
                _set_timeout(timedelta(seconds=self.timeout), group)
                self._made.append(group)
        return self._made[-1]

    def abort(self) -> None:
        """End other threads' waits in all of the groups."""
        for group in self._made:
            if group.name() == "gloo":
                break_off(group, group.size())
            else:
                group.abort()

    def close(self) -> None:
        """Destroy the groups; a forked child leaves them to its parent."""
        if os.getpid() != self._pid:
            return
        made, self._made = self._made, []
        names = distributed_c10d._world.pg_names
        for group in made:
            # The program may have destroyed all groups, and even made the default group again.
            if (name := names.get(group)) is None:
                continue
            dist.destroy_process_group(group)
            if not self._all:
                # torch names such a group after its ranks and the number of existing groups.  A later
                # group with the same name would find this group's addresses in the store.  A registered
                # dummy object keeps the name taken.
                names[_Reserved()] = name  # type: ignore[index]


class _Reserved:
    """Keeps the name of a destroyed group taken, so that no other group gets it."""

    def shutdown(self) -> None:
        """Do nothing; torch calls this on every group."""
