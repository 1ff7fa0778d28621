"""Run one function on P local processes, or inside the ranks that a launcher started.

Local processes are forked from a server that has imported torch once (which would take each rank
seconds), or started by ``mpiexec``, as ``python -m sparsync.cli.launch SOCKET``; everything but the
measured messages goes over gloo.  Forked ranks may be placed in a ``Lab``: then all messages cross its
shaped links.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
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
from typing import Any, TypeVar, final

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

__all__ = [
    "RankError",
    "StartLine",
    "gather",
    "launch",
    "launched_ranks",
    "leads",
    "machine",
    "mpiexec_command",
    "on_one_thread",
]

T = TypeVar("T")

_HOST = "127.0.0.1"
_NANOSECONDS = 1e9
_RANK_BYTES = 64 << 20  # memory of a forked rank's own, at least
_AHEAD = (
    0.05  # seconds from the last arrival to a start: 15 times as long as gloo takes for 8 ranks
)


class RankError(CommunicationError):
    """One or more local ranks failed; lists the error of each."""


def launched_ranks(default: int) -> int:
    """Return the launcher's number of ranks; ``default`` without one."""
    here = detect()
    return default if here is None else here.world_size


def leads() -> bool:
    """Tell whether this process speaks for all ranks: rank 0 of a launcher, or the only process."""
    here = detect()
    return here is None or here.rank == 0


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let torch have one thread: virtual ranks take turns, so more threads would only wait."""
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
        function: importable from its module.
        world_size: number of local processes; under a launcher it must be the launcher's.
        args: picklable.
        timeout: seconds that gloo waits for a peer.
        grace: seconds that the other ranks have to end by themselves when one has failed.
        lab: an open lab of ``world_size`` ranks to put them in; None: they talk over loopback.
        mpi: let ``mpiexec`` start them, so that MPI connects them as well.

    Returns:
        The result of rank 0; None in the other ranks of a launcher.

    Raises:
        RankError: a rank failed or died; every rank's error is named, none is left running.
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
    check_memory(
        f"{world_size} local ranks", _RANK_BYTES * world_size, "give fewer --ranks, or a launcher"
    )
    with (
        _under_mpiexec(world_size, (function, args, timeout), grace)
        if mpi
        else _forked(world_size, (function, args, timeout), lab)
    ) as (pipes, how_it_died):
        return _collect(world_size, pipes, how_it_died, grace)


def _in_launched_group(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    """Call ``function(*args)`` in a launcher's rank, in a gloo group; None on other ranks than 0."""
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
"""For every rank a pipe that brings its result or error; and a text on a rank whose pipe brings none."""


@contextmanager
def _forked(world_size: int, call: tuple[Any, ...], lab: Lab | None) -> Iterator[Pipes]:
    # the parent serves the store, on a port that the system chooses: no two jobs race for it, and none
    # is stuck after a crash
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    # torch comes with sparsync; making an optimizer imports torch._dynamo, which takes each rank 3 s
    context.set_forkserver_preload(["sparsync", "torch._dynamo"])
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
    """Start the ranks by ``mpiexec``; they share this process's standard output and error."""
    command = mpiexec_command(world_size)
    pipes: dict[int, Connection] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sparsync-mpi-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        path = f"{folder}/socket"  # in a folder of its own that others cannot enter
        server.bind(path)
        server.listen(world_size)
        server.settimeout(0.1)
        # One thread per rank; and the environment as Python knows it: an MPI library that this process
        # has initialised may have added variables, in C, that would confuse the ranks' own.
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
                    pipe.send((sys.path, world_size))  # before the call, which needs the path
                    pipe.send(call)
            yield pipes, how_it_died
        finally:
            for pipe in pipes.values():
                pipe.close()  # lets ranks end that have failed (``_be_started_by_mpiexec``)
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
    """Return the result of rank 0; after the first failure wait for ``grace`` seconds more."""
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
    """Return the command that starts this many local processes, however many cores there are.

    The ``mpiexec`` next to this Python is preferred: it belongs to the environment's own MPI library.
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
    """Be a rank that was forked; one that fails ends at once, so that the others notice."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    rank, world_size, port, seat, environ = place
    os.environ.update(environ)  # the fork server's environment is of the time when it was started
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    def run() -> Any:
        at_most = timedelta(seconds=timeout)
        # connected before entering the lab: the store stays outside, off the wire and uncounted
        try:
            store = TCPStore(_HOST, port, is_master=False, timeout=at_most)
            if seat is not None:
                seat.enter()
            dist.init_process_group("gloo", None, at_most, world_size, rank, store)
        except SparsyncError:
            raise  # an error of the lab
        except (
            RuntimeError
        ) as error:  # of the store or gloo; after its first line comes a stack of C++
            raise DeadlineError(
                f"did not connect to the other ranks within {timeout:g} s "
                f"({str(error).partition(chr(10))[0]}); raise --timeout"
            ) from error
        result = function(*args)
        destroy_process_group()
        return result if rank == 0 else None

    if not _report(pipe, run):
        os._exit(1)  # a broken group must not block the interpreter's exit


def _be_started_by_mpiexec(path: str) -> None:
    """Be a rank that mpiexec started.

    A rank that fails waits for the parent: its end would make mpiexec end all others before they can say
    why they failed.
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
        pipe.poll(None)  # until the parent has heard all
        os._exit(1)


def _report(pipe: Connection, run: Callable[[], Any]) -> bool:
    """Call ``run``; send whether it ended well, and its result or error; return whether it did."""
    try:
        pipe.send((True, run()))
    except KeyboardInterrupt:
        os._exit(130)
    except SparsyncError as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return False
    except dist.DistError as error:  # after its first line comes a stack of C++
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
    """Return every rank's value, in rank order; every rank of the default group calls it.

    ``torch.distributed.all_gather_object`` would unpickle anything that arrives.  Here torch's
    weights-only reader takes plain values, tensors and objects of ``classes``, and refuses the rest.
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


def machine() -> str:
    """Return a text that ranks of one machine have in common, in any container: the id of its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # of Linux
    return boot.read_text() if boot.exists() else socket.gethostname()


@final
class StartLine:
    """Start all ranks of one machine at an agreed moment of the clock that they share.

    A barrier releases them milliseconds apart where they outnumber the cores, which would be taken for
    communication; between several machines it is a barrier nevertheless.  ``group`` has all ranks, and is
    not the measured one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.one_machine = group, len(set(gather(machine()))) == 1

    def wait(self) -> float:
        """Wait for the start; return its time by ``time.perf_counter``, later if agreeing took longer."""
        if not self.one_machine:
            dist.barrier(group=self.group)
            return time.perf_counter()
        moment = torch.tensor([round((time.perf_counter() + _AHEAD) * _NANOSECONDS)])
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=self.group)
        start = max(int(moment) / _NANOSECONDS, time.perf_counter())
        time.sleep(max(start - time.perf_counter(), 0.0))
        return start

    def elapsed(self, starts: Tensor, ends: Tensor) -> float:
        """Return the seconds from all ranks' start to the last one's end, given `[P]` nanoseconds."""
        if self.one_machine:
            return float(ends.max() - starts.max()) / _NANOSECONDS
        return float((ends - starts).max()) / _NANOSECONDS


if __name__ == "__main__":
    _be_started_by_mpiexec(sys.argv[1])
