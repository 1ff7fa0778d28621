"""Detect the rank of a process under torchrun, MPI (``mpiexec``) or Slurm (``srun``).

``init_process_group`` initialises ``torch.distributed`` under any of them.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from sparsync.errors import ConfigurationError, DeadlineError, first_line
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.driver import run
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.rendezvous import GlooPlace, check_places, convene, host_of_rank_0

__all__ = [
    "Placement",
    "connect_mpi",
    "destroy_process_group",
    "detect",
    "first_host",
    "init_process_group",
    "slurm_port",
]

Launcher = Literal["torchrun", "mpi", "slurm"]

# For each launcher, the variables with a process's rank, the world size, and the rank on this host (of
# several, the first that is set counts).  Inner launchers come first: if srun starts torchrun, the
# variables of both are set, and torchrun's are right.
_LAUNCHERS: tuple[tuple[Launcher, str, str, str], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # The variables in the next rows are set by, in this order: Open MPI; MVAPICH2; MPICH and Intel MPI,
    # Cray's PALS, and Slurm's pmi2 (srun --mpi=pmi2), each with its own rank on this host; Slurm's pmix
    # (two rows)
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK SLURM_LOCALID"),
    ("mpi", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpi", "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")

# seconds after which gloo's threads have certainly released the tensors of a finished call
_RELEASED: Final = 0.05


@dataclass(frozen=True)
class Placement:
    """The position of a process among the ranks of its job."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host; 0 if the launcher does not provide it
    host: str | None  # rank 0's host, if known (MASTER_ADDR, or Slurm's first host)
    launcher: Launcher


def detect(environ: Mapping[str, str] | None = None) -> Placement | None:
    """Return the position of this process, read from the variables that its launcher has set.

    The innermost launcher takes precedence: srun or mpiexec may start torchrun's ranks, and srun may
    start mpiexec's.  Slurm's batch script is not a rank, but the processes that it starts with
    ``srun`` are.

    Returns:
        None if no launcher started this process.

    Raises:
        ConfigurationError: the launcher's numbers are not a valid rank and world size.

    Example:
        >>> here = detect({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"})
        >>> here.rank, here.world_size, here.launcher
        (2, 4, 'mpi')
    """
    environ = os.environ if environ is None else environ
    # sbatch also sets SLURM_PROCID in its script, but the script is not part of a job step
    in_script = "SLURM_SUBMIT_DIR" in environ and "SLURM_STEP_ID" not in environ
    for launcher, *names in _LAUNCHERS:
        if names[0] in environ and names[1] in environ and not (launcher == "slurm" and in_script):
            break
    else:
        return None
    rank, world_size = _number(environ, names[0]), _number(environ, names[1])
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{names[0]}={rank} and {names[1]}={world_size} make no sense; a rank is in "
            "[0, world size). Start all processes with one torchrun, mpiexec or srun"
        )
    local = next((name for name in names[2].split() if name in environ), None)
    local_rank = 0 if local is None else _number(environ, local)
    host = environ.get("MASTER_ADDR")
    nodes = next((environ[name] for name in _HOSTS if environ.get(name)), None)
    # torchrun sets MASTER_ADDR itself, because its rank 0 need not be on Slurm's first host
    if not host and nodes is not None and launcher != "torchrun":
        host = first_host(nodes)
    return Placement(rank, world_size, local_rank, host, launcher)


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation.

    Raises:
        ConfigurationError: ``nodes`` is not in that notation.

    Example:
        >>> first_host("node[003-005,9],login1"), first_host("a1,b2"), first_host("r[1-2]n[07,9]-ib")
        ('node003', 'a1', 'r1n07-ib')
    """
    # the first item ends at the first comma outside brackets; in each bracket, only the first number
    # counts
    part = re.match(r"(?:[^,\[\]\s]|\[\d+[\d,-]*\])+(?=,|$)", nodes)
    if part is None:
        raise ConfigurationError(
            f"SLURM_NODELIST is {nodes!r}; expected hosts such as node[003-005,9]. "
            "Or set MASTER_ADDR to rank 0's host"
        )
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", part[0])


def connect_mpi(timeout: float = 300.0) -> Communicator:
    """Connect the ranks that mpiexec (or srun, with MPI) has started, without ``torch.distributed``.

    Raises:
        ConfigurationError: mpi4py or MPI is missing, or MPI's ranks differ from the launcher's.
    """
    here, comm = detect(), MpiCommunicator(timeout=timeout)
    # if mpiexec belongs to another MPI than mpi4py's, every process is alone in its MPI world, and would
    # train alone
    if here is not None and (here.rank, here.world_size) != (comm.rank, comm.world_size):
        comm.close()
        raise ConfigurationError(
            f"the launcher ({here.launcher}) made this rank {here.rank} of {here.world_size}, MPI "
            f"knows {comm.world_size}; use the mpiexec of the MPI that mpi4py uses, or srun --mpi="
        )
    return comm


def init_process_group(backend: str = "gloo", *, timeout: float = 300.0) -> Placement:
    """Initialise ``torch.distributed`` in every rank started by torchrun, mpiexec or srun.

    Rank 0 listens at MASTER_ADDR and MASTER_PORT if both are set.  Otherwise, under MPI, it listens on
    its own host at a free port, sent to the others by mpi4py.  Under Slurm, it listens on the job's first
    host at a port derived from the job's number.

    Args:
        backend: the backend of the default group.
        timeout: seconds that ranks wait for each other, now and in the group's operations.

    Returns:
        The position of this process.

    Raises:
        ConfigurationError: no launcher started this process, rank 0's address is unknown, or
            ``GLOO_SOCKET_IFNAME`` selects no interface, or one that other ranks cannot reach.
        PeerError: another rank's ``GLOO_SOCKET_IFNAME`` selects no interface.
        DeadlineError: not all ranks arrived in time.
    """
    here, timeout = detect(), check_timeout(timeout)
    if here is None:
        raise ConfigurationError(
            "no launcher started this process (neither RANK and WORLD_SIZE, nor PMI_RANK, "
            "OMPI_COMM_WORLD_RANK or SLURM_PROCID is set); start it with torchrun, mpiexec or srun"
        )
    wait_at_most = timedelta(seconds=timeout)
    try:
        store = _meet(here, timeout)
        place = _listening(store, here, timeout) if "gloo" in backend else nullcontext()
        with place:
            dist.init_process_group(
                backend,
                store=store,
                rank=here.rank,
                world_size=here.world_size,
                timeout=wait_at_most,
            )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise DeadlineError(
            f"rank {here.rank} of {here.world_size} ({here.launcher}) did not meet the others within "
            f"{timeout:g} s ({first_line(error)}); were all started by one command?"
        ) from error
    return here


def _listening(store: Store, here: Placement, timeout: float) -> AbstractContextManager[None]:
    """Return a context in which gloo listens where all ranks can reach it.

    gloo itself accepts only names in ``GLOO_SOCKET_IFNAME``.  If the variable is not set, it listens on
    loopback when the machine's own name maps to 127.0.1.1.  gloo raises some of its errors only after
    minutes, and none of them mentions the variable or the interfaces.
    """
    cards = convene(
        store,
        here.rank,
        here.world_size,
        lambda: asdict(GlooPlace.here()),
        timeout,
        "init_process_group",
    )
    places = {rank: GlooPlace.of(card) for rank, card in enumerate(cards)}
    return places[here.rank].listening(several=check_places(places))


def destroy_process_group() -> None:
    """Leave ``torch.distributed`` at the end of a program.

    gloo's threads release the tensors of the last call shortly after the call has returned, and need the
    interpreter to do so.  If the interpreter is exiting by then, the process aborts ("terminate called
    without an active exception").  The threads end when the last reference to their group is dropped.
    So this function also collects reference cycles; do not keep a reference to the group.
    """
    dist.destroy_process_group()
    # If a DDP model holds the last reference, its destructor (torch 2.13) joins these threads without
    # releasing the interpreter.  If a thread were still waiting for the interpreter, both would wait
    # forever.
    time.sleep(_RELEASED)
    gc.collect()


def _meet(here: Placement, timeout: float) -> Store:
    """Return the job's store, served by rank 0 or, under torchrun, possibly by an agent."""
    if here.launcher == "torchrun":
        served, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        served.set_timeout(timedelta(seconds=timeout))
        # If torchrun restarts ranks with a static rendezvous, it keeps the store, which still holds the
        # addresses of the ranks that have ended (torch 2.13).  gloo would try to connect to them.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"restart {restarts}", served)

    def store(host: str, port: int) -> TCPStore:
        return TCPStore(
            host,
            port,
            here.world_size,
            is_master=here.rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )

    if here.host is not None and "MASTER_PORT" in os.environ:
        return store(here.host, _number(os.environ, "MASTER_PORT"))
    if here.launcher == "mpi" and "MASTER_ADDR" not in os.environ:
        # if mpi4py is missing or belongs to another MPI, a scheduler may still provide rank 0's address
        with suppress(ConfigurationError), connect_mpi(timeout) as comm:
            # let rank 0's system choose a free port, because a port computed by all ranks might be taken
            host = host_of_rank_0(comm)
            own = store(host, 0) if here.rank == 0 else None
            mine = torch.tensor([own.port if own is not None else 0], device="cpu")
            port = int(run(comm.allgather(mine, "port"))[0])
            return own if own is not None else store(host, port)
    if here.host is not None and "SLURM_JOB_ID" in os.environ:
        return store(here.host, slurm_port(os.environ))
    raise ConfigurationError(
        f"rank {here.rank} ({here.launcher}) cannot know where rank 0 listens: set MASTER_ADDR and "
        "MASTER_PORT, or pip install 'sparsync[mpi]' and start with the mpiexec of mpi4py's MPI"
    )


def slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port for a job step: all of its tasks get the same one, the next job gets another.

    It is below 32,768, where Linux starts its ephemeral ports.
    """
    step = environ.get("SLURM_STEP_ID", "0")
    number = _number(environ, "SLURM_JOB_ID") + (int(step) if step.isdigit() else 0)
    return 20_000 + number % 10_000


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigurationError(
            f"{name} is {environ[name]!r}; the launcher sets it to a whole number"
        ) from error
