"""Run one function on P local processes, or inside the ranks that a launcher started.

Local processes are forked from a server that has imported torch once (seconds for each rank, if every
one did it), or started by ``mpiexec``; everything but the measured messages goes over gloo.  Forked
ranks may be placed in a ``Lab``: then all of it crosses its shaped links.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sparsync.cli.lab import Lab, Seat
from sparsync.cli.mpiexec import in_group, run_under_mpiexec
from sparsync.errors import CommunicationError, ConfigurationError, SparsyncError
from sparsync.transports.communicator import check_timeout
from sparsync.transports.launchers import destroy_process_group, detect

__all__ = [
    "RankError",
    "StartLine",
    "gather",
    "launch",
    "launched",
    "launched_ranks",
    "leads",
    "on_one_thread",
]

T = TypeVar("T")

_HOST = "127.0.0.1"
_NANOSECONDS = 1e9


class RankError(CommunicationError):
    """One or more local ranks failed; lists what each of them said."""


def launched() -> bool:
    """Tell whether torchrun, mpiexec or srun started this process as one of several ranks."""
    return detect() is not None


def launched_ranks(default: int) -> int:
    """Return the launcher's number of ranks; ``default`` without one."""
    here = detect()
    return default if here is None else here.world_size


def leads() -> bool:
    """Tell whether this process speaks for all ranks: rank 0 of a launcher, or the only process."""
    here = detect()
    return here is None or here.rank == 0


def on_one_thread(function: Callable[[], T]) -> T:
    """Call ``function`` with one thread of torch: virtual ranks take turns, more threads would wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    grace: float = 20.0,
    lab: Lab | None = None,
    mpi: bool = False,
) -> Any:
    """Call ``function(*args)`` on every rank, with ``torch.distributed`` (gloo) initialised.

    Args:
        function: importable from its module.
        world_size: number of local processes; under a launcher it must be the launcher's.
        args: picklable.
        timeout: seconds that gloo waits for a peer.
        grace: seconds that the other ranks have to end by themselves when one has failed.
        lab: an open lab of ``world_size`` ranks to put them in; None: they talk over loopback.
        mpi: let ``mpiexec`` start them, so that MPI connects them, too.

    Returns:
        What rank 0 returned; None in the other ranks of a launcher.

    Raises:
        RankError: a rank failed or died; every rank's error is named, none is left running.
    """
    if world_size < 1:
        raise ConfigurationError(f"ranks is {world_size}; give at least 1")
    check_timeout(timeout)
    if lab is not None:
        _check_lab(lab, world_size)
    if launched():
        return _inside_launcher(function, world_size, args, timeout)
    if mpi:
        results, failures = run_under_mpiexec(function, world_size, args, timeout, grace)
        return _result(world_size, results, failures, grace)
    # the parent serves the store on a port that the system chose: no race, no stuck port
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    # torch comes with sparsync; every optimizer imports torch._dynamo, 3 s for each rank that makes one
    context.set_forkserver_preload(["sparsync", "torch._dynamo"])
    processes, pipes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        place = _Place(rank, world_size, store.port, lab.seat(rank) if lab else None, timeout)
        call = (place, theirs, dict(os.environ), function, args)
        process = context.Process(target=_child, args=call, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        return _collect(processes, pipes, grace)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()


def _check_lab(lab: Lab, world_size: int) -> None:
    if launched():
        raise ConfigurationError(
            "a lab inside a launcher's rank; start one process, the lab's ranks are made by it"
        )
    if lab.ranks != world_size:
        raise ConfigurationError(
            f"a lab of {lab.ranks} ranks for {world_size} processes; give both the same number"
        )


def _inside_launcher(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
) -> Any:
    present = launched_ranks(world_size)
    if present != world_size:
        raise ConfigurationError(
            f"--ranks {world_size} under a launcher of {present} processes; "
            f"omit --ranks or give {present}"
        )
    return in_group(function, args, timeout)


class _Place(NamedTuple):
    """A forked rank's place: what it needs to join the others."""

    rank: int
    world_size: int
    port: int  # of the store
    seat: Seat | None  # in a lab
    timeout: float


def _child(
    place: _Place,
    pipe: Connection,
    environ: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    _die_with_parent()
    os.environ.update(environ)  # the server has that of its own start
    rank, world_size, port, seat, timeout = place
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        at_most = timedelta(seconds=timeout)
        # connected before entering the lab: the store stays outside, off the wire and uncounted
        store = TCPStore(_HOST, port, is_master=False, timeout=at_most)
        if seat is not None:
            seat.enter()
        dist.init_process_group("gloo", None, at_most, world_size, rank, store)
        result = function(*args)
        destroy_process_group()
        pipe.send(("done", result if rank == 0 else None))
    except KeyboardInterrupt:
        os._exit(130)
    except SparsyncError as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)  # a broken group must not block the interpreter's exit
    except Exception as error:
        import traceback

        pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)


def _die_with_parent() -> None:
    """End this process when the parent is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _collect(processes: list[Any], pipes: list[Connection], grace: float) -> Any:
    """Wait for all ranks; after the first failure, for ``grace`` seconds more."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline: float | None = None
    while len(results) + len(failures) < len(processes):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        open_ranks = [r for r in range(len(pipes)) if r not in results and r not in failures]
        ready = wait([pipes[r] for r in open_ranks], timeout=left)
        if not ready:
            break
        for rank in open_ranks:
            if pipes[rank] not in ready:
                continue
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                kind, value = "failed", f"died with exit code {processes[rank].exitcode}"
            (results if kind == "done" else failures)[rank] = value
        if failures and deadline is None:
            deadline = time.monotonic() + grace
    return _result(len(processes), results, failures, grace)


def _result(
    world_size: int, results: dict[int, Any], failures: dict[int, str], grace: float
) -> Any:
    """Return what rank 0 returned, or say what every rank said."""
    if failures:
        lines = [f"rank {rank}: {failures[rank]}" for rank in sorted(failures)]
        hung = world_size - len(results) - len(failures)
        if hung:
            lines.append(f"{hung} rank(s) did not end within {grace:g} s and were terminated")
        raise RankError("\n".join(lines))
    return results[0]


def gather(mine: T, classes: Sequence[type[Any]] = ()) -> list[T]:
    """Return every rank's value, in rank order; every rank of the default group calls it.

    ``torch.distributed.all_gather_object`` would unpickle whatever arrives.  Here torch's
    weights-only reader takes plain values, tensors and objects of ``classes``, and refuses the rest.
    """
    written = io.BytesIO()
    torch.save(mine, written)
    raw = written.getvalue()
    longest = torch.tensor([len(raw)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest), dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(raw)]))
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded)
    with torch.serialization.safe_globals(list(classes)):
        return [
            torch.load(io.BytesIO(bytes(one[: int(length)].numpy())), weights_only=True)
            for one, length in zip(everyone, lengths, strict=True)
        ]


@final
class StartLine:
    """Start all ranks at an agreed time; a barrier would release them one by one.

    On one machine the ranks agree on a moment of the clock that they share, a little ahead, and
    sleep until then: a barrier releases them milliseconds apart where they outnumber the cores, and
    that would be taken for communication.  Elsewhere it is a barrier.

    Args:
        group: of all ranks, not the one that is measured.
        one_machine: the ranks share a clock.
        ahead: seconds from the last arrival to the start; long enough for the agreement to reach
            everyone: 15 times what gloo takes among 8 ranks on 2 cores.
    """

    def __init__(self, group: dist.ProcessGroup, *, one_machine: bool, ahead: float = 0.05) -> None:
        self.group, self.one_machine, self.ahead = group, one_machine, ahead

    def wait(self) -> float:
        """Return this rank's start, by ``time.perf_counter``; every rank calls it.

        It is the agreed moment; or, where the agreement arrives too late, when it arrives.
        """
        if not self.one_machine:
            dist.barrier(group=self.group)
            return time.perf_counter()
        moment = torch.tensor([round((time.perf_counter() + self.ahead) * _NANOSECONDS)])
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self.group)
        start = max(int(moment) / _NANOSECONDS, time.perf_counter())
        time.sleep(max(start - time.perf_counter(), 0.0))
        return start

    def elapsed(self, starts: Tensor, ends: Tensor) -> float:
        """Return the seconds from all ranks' start to the last one's end, given `[P]` nanoseconds."""
        if self.one_machine:
            return float(ends.max() - starts.max()) / _NANOSECONDS
        return float((ends - starts).max()) / _NANOSECONDS
