"""The facts about a rank and its machine that ``sparsync doctor`` compares."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import sparsync
from sparsync.errors import ConfigurationError, PeerError
from sparsync.kernels import native
from sparsync.transports.interfaces import own_interfaces, selected
from sparsync.transports.mpi import load_mpi
from sparsync.transports.rendezvous import machine

__all__ = ["Facts", "check_versions", "free_bytes", "local_facts", "some", "tcp_settings"]

_TCP: Final = ("tcp_wmem", "tcp_rmem", "tcp_adv_win_scale", "tcp_slow_start_after_idle")


@dataclass(frozen=True)
class Facts:
    """The facts about one rank."""

    sparsync: str  # version of sparsync
    torch: str
    python: str
    platform: str  # system and processor
    kernels: str  # instruction set of the native kernels; "torch": not in use
    built: bool  # whether native kernels are installed
    cores: int  # number of cores that this process may use
    threads: int  # number of threads that torch uses
    openmp: int  # number of loaded OpenMP runtimes
    backends: dict[str, str]  # installed transports and devices: name -> version, if it has one
    loopback: bool  # whether gloo listens on an address that no other host can reach
    machine: str  # digest that all ranks of a machine share
    network: str  # equal for ranks that share a network stack; containers may have their own
    host: str | None  # host name, if requested
    wall: float  # offset of the wall clock from the monotonic clock, in seconds
    mpi: str | None  # the MPI library, if MPI carries the messages
    # kernel settings that affect far links, if the kernel has them
    tcp: dict[str, tuple[int, ...]]
    congestion: str  # TCP's congestion control, e.g. "cubic"; empty: unknown
    # free bytes in the machine, and in the GPU that this rank would use; None if unknown
    memory: int | None
    device_memory: int | None


def local_facts(transport: str, *, hosts: bool = False) -> Facts:
    """Return the facts about this process, including the host name if ``hosts`` is set."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on all systems
    library = load_mpi().Get_library_version().splitlines()[0] if transport == "mpi" else None
    return Facts(
        sparsync=sparsync.__version__,
        # __version__ is a subclass of str, which ``gather`` refuses
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        kernels=native.chosen(),
        built=native.EXTENSION is not None,
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        openmp=_openmp_runtimes(Path("/proc/self/maps")),
        backends=_backends(),
        loopback=_on_loopback(os.environ),
        machine=_digest(machine()),
        network=_digest(_network_namespace() + socket.gethostname()),
        host=socket.gethostname() if hosts else None,
        wall=time.time() - time.perf_counter(),
        mpi=library,
        tcp=tcp_settings(),
        congestion=_text(Path("/proc/sys/net/ipv4/tcp_congestion_control")).strip(),
        memory=free_bytes(_text(Path("/proc/meminfo"))),
        device_memory=_device_bytes(int(os.environ.get("LOCAL_RANK", "0"))),
    )


def check_versions(everyone: Sequence[Facts]) -> None:
    """Refuse ranks that run different versions of sparsync.

    Raises:
        PeerError: the message names the versions and their ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        ranks.setdefault(facts.sparsync, []).append(rank)
    if len(ranks) > 1:
        said = "; ".join(f"{version} on {some(ranks[version])}" for version in sorted(ranks))
        raise PeerError(
            f"ranks run different versions of sparsync: {said}; install the same everywhere"
        )


def some(ranks: Sequence[int], *, most: int = 6) -> str:
    """Return a text that names these ranks, or only the first ``most`` of them."""
    more = ", ..." if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def _backends() -> dict[str, str]:
    """Return the installed transports and devices by name."""
    found = {}
    for name in ("gloo", "nccl", "mpi"):
        if dist.is_available() and getattr(dist, f"is_{name}_available")():
            found[f"torch.distributed {name}"] = ""
    if importlib.util.find_spec("zmq") is not None:
        import zmq

        found["zmq"] = zmq.zmq_version() + ("" if zmq.has("curve") else " without encryption")
    if importlib.util.find_spec("mpi4py") is not None:
        found["mpi4py"] = ""
    if torch.cuda.is_available():
        found["CUDA"] = f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = ""
    if native.EXTENSION is not None:
        found["native kernels"] = ", ".join(native.instruction_sets())
    return found


def tcp_settings(folder: Path = Path("/proc/sys/net/ipv4")) -> dict[str, tuple[int, ...]]:
    """Return the kernel's TCP settings that matter on far links, by name; omit any that it lacks.

    The settings belong to the process's network stack, so a container may have other settings than
    its host.
    """
    found = {}
    for name in _TCP:
        with suppress(OSError, ValueError):
            found[name] = tuple(int(number) for number in (folder / name).read_text().split())
    return found


def _text(file: Path) -> str:
    """Read a system file; return an empty text if it does not exist."""
    try:
        return file.read_text()
    except OSError:
        return ""


def free_bytes(meminfo: str) -> int | None:
    """Return the bytes that programs can still allocate without swapping; None except on Linux."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def _device_bytes(local_rank: int) -> int | None:
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(local_rank % torch.cuda.device_count())
    return int(free)


def _openmp_runtimes(maps: Path) -> int:
    """Count the OpenMP libraries in this process; 0 if unknown."""
    names = ("libgomp", "libiomp", "libomp")
    files = {line.split()[-1] for line in _text(maps).splitlines() if "/" in line}
    return len({file for file in files if Path(file).name.startswith(names)})


def _on_loopback(environ: Mapping[str, str]) -> bool:
    """Return whether gloo will listen on an address that no other host can reach."""
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        # attach refuses a value that selects no interface, and names the existing interfaces
        with suppress(ConfigurationError):
            return all(one.loopback for one in selected(interface, own_interfaces()))
        return False
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:  # the host cannot resolve its own name, so gloo falls back to loopback
        return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _network_namespace() -> str:
    stack = Path("/proc/self/ns/net")  # on Linux
    return str(stack.readlink()) if stack.is_symlink() else ""
