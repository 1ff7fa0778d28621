"""Run one function on P local processes, or on the ranks that a launcher started.

Local processes are forked from a server that has already imported torch, because the import would take
each rank seconds.  Alternatively, ``mpiexec`` starts them as ``python -m sparsync.cli.launch SOCKET``.
All messages except the measured ones go over gloo.  Forked ranks may be placed in a ``Lab``; then all
messages cross its shaped links.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sparsync.cli.lab import Lab, Seat
from sparsync.cli.values import check_memory, out_of_memory
from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    SparsyncError,
    require,
)
from sparsync.state import packed, unpacked
from sparsync.transports.communicator import check_timeout
from sparsync.transports.launchers import destroy_process_group, detect, init_process_group
from sparsync.transports.rendezvous import machine

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # not on Windows

__all__ = [
    "RankError",
    "StartLine",
    "check_local_ranks",
    "ending_with_parent",
    "fork_server",
    "gather",
    "launch",
    "launched_ranks",
    "leads",
    "mpiexec_command",
    "on_one_thread",
]

T = TypeVar("T")

_HOST = "127.0.0.1"
_NANOSECONDS = 1e9
_RANK_BYTES = 64 << 20  # minimum memory of a forked rank
# seconds from the last rank's arrival to the common start: 15 times what gloo needs for 8 ranks
_AHEAD = 0.05


class RankError(CommunicationError):
    """One or more local ranks failed; the message lists all of their errors."""


def launched_ranks(default: int) -> int:
    """Return the launcher's number of ranks, or ``default`` without a launcher."""
    here = detect()
    return default if here is None else here.world_size


def leads() -> bool:
    """Return whether this process reports for all ranks, as a launcher's rank 0 or the only process."""
    here = detect()
    return here is None or here.rank == 0


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Limit torch to one thread: virtual ranks take turns, so more threads would only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
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
        function: a function that can be imported from its module.
        world_size: number of local processes; under a launcher, the launcher's number of ranks.
        args: picklable arguments.
        timeout: seconds that gloo waits for a peer.
        grace: seconds that the other ranks have to end by themselves after one has failed.
        lab: an open lab with ``world_size`` ranks, in which they run; with None, they use loopback.
        mpi: whether ``mpiexec`` starts the ranks, so that MPI also connects them.

    Returns:
        The result of rank 0; None on the other ranks of a launcher.

    Raises:
        RankError: a rank failed or died; the message contains every rank's error, and no rank is
            left running.
    """
    require(world_size >= 1, f"ranks is {world_size}; give at least 1")
    check_timeout(timeout)
    inside = detect() is not None
    alone = "start one process, the lab's ranks are made by it"
    require(lab is None or not inside, f"a lab inside a launcher's rank; {alone}")
    places, present = lab.ranks if lab else world_size, launched_ranks(world_size)
    both = "give both the same number"
    require(places == world_size, f"a lab of {places} ranks for {world_size} processes; {both}")
    require(
        present == world_size,
        f"--ranks {world_size} under a launcher of {present} processes; omit --ranks or give {present}",
    )
    if inside:
        return _in_launched_group(function, args, timeout)
    check_local_ranks()
    check_memory(
        f"{world_size} local ranks", _RANK_BYTES * world_size, "give fewer --ranks, or a launcher"
    )
    with (
        _under_mpiexec(world_size, (function, args, timeout), grace)
        if mpi
        else _forked(world_size, (function, args, timeout), lab)
    ) as (pipes, how_it_died):
        return _collect(world_size, pipes, how_it_died, grace)


def check_local_ranks() -> None:
    """Refuse to start ranks on a system without a fork server, i.e. on Windows."""
    require(
        "forkserver" in multiprocessing.get_all_start_methods(),
        f"{sys.platform} cannot fork local ranks; run in WSL2, which is Linux",
    )


def _in_launched_group(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    """Call ``function(*args)`` on a launcher's rank in a gloo group; return its result on rank 0."""
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; mpiexec and srun do not
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launched_ranks(1)))
    init_process_group(timeout=timeout)
    try:
        result = function(*args)
        return result if dist.get_rank() == 0 else None
    finally:
        destroy_process_group()


# ---- the parent ------------------------------------------------------------------------------------

Pipes = tuple[Mapping[int, Connection], Callable[[int], str]]
"""A pipe per rank for its result or error, and a function that describes a rank that sent neither."""


def fork_server(*imports: str) -> ForkServerContext:
    """Start the server that forks processes, which import these modules only once; return its context.

    The server and the processes ignore Ctrl-C from the start.  A terminal sends Ctrl-C to all processes,
    but only the command should react to it; the command then ends the other processes.
    """
    from multiprocessing import forkserver, resource_tracker  # not on Windows

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    # first of all, because starting the tracker unblocks SIGINT
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def _forked(world_size: int, call: tuple[Any, ...], lab: Lab | None) -> Iterator[Pipes]:
    # the parent serves the store on a port chosen by the system, so that jobs do not race for ports and
    # no port is blocked after a crash
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = fork_server("sparsync.cli.forked")
    processes, pipes = [], {}
    for rank in range(world_size):
        pipes[rank], theirs = context.Pipe(duplex=False)
        place = rank, world_size, store.port, lab.seat(rank) if lab else None, dict(os.environ)
        process = context.Process(target=_be_forked, args=(theirs, place, *call), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)

    def how_it_died(rank: int) -> str:
        processes[rank].join()
        return f"died with exit code {processes[rank].exitcode}"

    try:
        yield pipes, how_it_died
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()


@contextmanager
def _under_mpiexec(world_size: int, call: tuple[Any, ...], grace: float) -> Iterator[Pipes]:
    """Start the ranks with ``mpiexec``; they share this process's standard output and error."""
    command = mpiexec_command(world_size)
    pipes: dict[int, Connection] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sparsync-mpi-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        path = f"{folder}/socket"  # in a private folder
        server.bind(path)
        server.listen(world_size)
        server.settimeout(0.1)
        # Each rank has one thread.  Pass Python's copy of the environment, because an MPI library
        # initialised in this process may have added variables, in C, that would confuse the MPI of the
        # ranks.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = [sys.executable, "-m", "sparsync.cli.launch", path]
        process = subprocess.Popen([*command, *child], env=environ)

        def how_it_died(rank: int) -> str:
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            return f"died or was ended by mpiexec, whose exit code is {process.returncode}"

        try:
            while len(pipes) < world_size and process.poll() is None:
                with suppress(TimeoutError, ConnectionError, EOFError):
                    pipe = Connection(server.accept()[0].detach())
                    pipes[pipe.recv()] = pipe
                    # send the path first, because unpickling the call needs it
                    pipe.send((sys.path, world_size))
                    pipe.send(call)
            yield pipes, how_it_died
        finally:
            for pipe in pipes.values():
                pipe.close()  # releases ranks that have failed (``_be_started_by_mpiexec``)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            process.terminate()
            process.wait()


def _collect(
    world_size: int,
    pipes: Mapping[int, Connection],
    how_it_died: Callable[[int], str],
    grace: float,
) -> Any:
    """Return the result of rank 0; after the first failure, wait at most ``grace`` more seconds."""
    results: dict[int, Any] = {}
    failures = {rank: how_it_died(rank) for rank in range(world_size) if rank not in pipes}
    deadline: float | None = None
    while len(results) + len(failures) < world_size:
        if failures and deadline is None:
            deadline = time.monotonic() + grace
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        silent = {r: pipe for r, pipe in pipes.items() if r not in results and r not in failures}
        ready = wait(list(silent.values()), timeout=left)
        if not ready:
            break
        for rank, pipe in silent.items():
            if pipe in ready:
                try:
                    done, value = pipe.recv()
                except (EOFError, ConnectionError):
                    done, value = False, how_it_died(rank)
                (results if done else failures)[rank] = value
    if not failures:
        return results[0]
    lines = [f"rank {rank}: {failures[rank]}" for rank in sorted(failures)]
    hung = world_size - len(results) - len(failures)
    if hung:
        lines.append(f"{hung} rank(s) did not end within {grace:g} s and were terminated")
    raise RankError("\n".join(lines))


def mpiexec_command(ranks: int) -> list[str]:
    """Return the command that starts this many local processes, even on fewer cores.

    The ``mpiexec`` next to this Python takes precedence: it belongs to the environment's MPI library.
    """
    own = Path(sys.executable).parent / "mpiexec"
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise ConfigurationError(
            "no mpiexec here; pip install 'sparsync[mpi]' brings one, or install an MPI and put its "
            "mpiexec on PATH"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    command = [found, "-n", str(ranks)]
    if "Open MPI" in version.stdout or "OpenRTE" in version.stdout:
        command.append("--oversubscribe")
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


# ---- a rank ----------------------------------------------------------------------------------------


def _be_forked(
    pipe: Connection,
    place: tuple[int, int, int, Seat | None, dict[str, str]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
) -> None:
    """Run a forked rank; a rank that fails exits immediately, so that the other ranks notice."""
    rank, world_size, port, seat, environ = place
    os.environ.update(environ)  # the fork server's environment dates from its own start
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    def run() -> Any:
        at_most = timedelta(seconds=timeout)
        # connect before entering the lab, so that the store's traffic stays outside and is not counted
        try:
            store = TCPStore(_HOST, port, is_master=False, timeout=at_most)
            if seat is not None:
                seat.enter()
            dist.init_process_group("gloo", None, at_most, world_size, rank, store)
        except SparsyncError:
            raise  # from the lab
        except RuntimeError as error:  # from the store or gloo; a C++ stack follows its first line
            raise DeadlineError(
                f"did not connect to the other ranks within {timeout:g} s "
                f"({str(error).partition(chr(10))[0]}); raise --timeout"
            ) from error
        result = function(*args)
        destroy_process_group()
        return result if rank == 0 else None

    with ending_with_parent():
        if not _report(pipe, run):
            os._exit(1)  # a broken group must not block the interpreter's exit


@contextmanager
def ending_with_parent() -> Iterator[None]:
    """Exit silently when the parent ends, because the errors that then follow would only be noise."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except (OSError, EOFError):
        parent.join(1.0)  # the parent may be about to end
        if not parent.is_alive():
            os._exit(1)
        raise


def _be_started_by_mpiexec(path: str) -> None:
    """Run a rank that mpiexec started.

    A rank that fails waits for the parent: if it exited, mpiexec would end all others before they could
    report their errors.
    """
    here = detect()
    pipe = Client(path, "AF_UNIX")
    pipe.send(0 if here is None else here.rank)
    sys.path, world_size = pipe.recv()
    function, args, timeout = pipe.recv()

    def run() -> Any:
        if launched_ranks(1) != world_size:
            raise ConfigurationError(
                f"mpiexec was to start {world_size} ranks, this is one of {launched_ranks(1)}; "
                "its launcher is not known here"
            )
        return _in_launched_group(function, args, timeout)

    if not _report(pipe, run):
        pipe.poll(None)  # wait until the parent has all reports
        os._exit(1)


def _report(pipe: Connection, run: Callable[[], Any]) -> bool:
    """Call ``run``; send its result or error, and whether it succeeded; return whether it did."""
    try:
        pipe.send((True, run()))
    except KeyboardInterrupt:
        os._exit(130)
    except SparsyncError as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return False
    except dist.DistError as error:  # a C++ stack follows its first line
        pipe.send((False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        return False
    except Exception as error:
        if out_of_memory(error):
            pipe.send((False, "out of memory; give smaller sizes, or fewer ranks"))
            return False
        import traceback

        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        return False
    return True


# ---- all ranks together ----------------------------------------------------------------------------


def gather(mine: T, classes: Sequence[type[Any]] = ()) -> list[T]:
    """Return every rank's value, in rank order; every rank of the default group must call this.

    ``torch.distributed.all_gather_object`` would unpickle anything that arrives.  This function uses
    torch's weights-only reader, which accepts only plain values, tensors and objects of ``classes``.
    """
    raw = torch.frombuffer(packed(mine), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(raw)]))
    longest = int(max(lengths))
    everyone = [raw.new_empty(longest) for _ in lengths]
    dist.all_gather(everyone, torch.nn.functional.pad(raw, (0, longest - len(raw))))
    return [
        unpacked(one[: int(length)].numpy(), classes)
        for one, length in zip(everyone, lengths, strict=True)
    ]


@final
class StartLine:
    """Starts all ranks of one machine at an agreed time of their common clock.

    With more ranks than cores, a barrier would release the ranks milliseconds apart, and the difference
    would look like communication time.  Ranks on several machines share no clock, so they still use a
    barrier.  ``group`` contains all ranks; it must not be the group that is measured.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.one_machine = group, len(set(gather(machine()))) == 1

    def wait(self) -> float:
        """Wait for the agreed start; return the ``time.perf_counter`` time of the actual start."""
        if not self.one_machine:
            dist.barrier(group=self.group)
            return time.perf_counter()
        moment = torch.tensor([round((time.perf_counter() + _AHEAD) * _NANOSECONDS)])
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self.group)
        start = max(int(moment) / _NANOSECONDS, time.perf_counter())
        time.sleep(max(start - time.perf_counter(), 0.0))
        return start

    def elapsed(self, starts: Tensor, ends: Tensor) -> float:
        """Return the seconds from the common start to the last end, given `[P]` times in nanoseconds."""
        if self.one_machine:
            return float(ends.max() - starts.max()) / _NANOSECONDS
        return float((ends - starts).max()) / _NANOSECONDS


if __name__ == "__main__":
    gc.freeze()  # nothing imported is garbage, and the last collections of a rank would look through it
    _be_started_by_mpiexec(sys.argv[1])
