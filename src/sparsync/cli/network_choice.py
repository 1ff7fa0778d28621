"""The network of a command: simulated, the machine's own or a lab's; checked before ranks start."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsync.cli.lab import Lab, ensure_privileges
from sparsync.cli.lab_links import MOST_RANKS, parse_links
from sparsync.cli.launch import launch
from sparsync.collectives.costs import WORD_BYTES
from sparsync.errors import ConfigurationError, require
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.launchers import detect
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.process_group import (
    TRANSPORTS,
    TorchCommunicator,
    check_transport,
    connect_group,
)
from sparsync.transports.sim import Links

__all__ = [
    "TRANSPORTS",
    "USUAL_NETWORK",
    "Connection",
    "parse_network",
    "parse_seconds",
    "transport_of",
]

_NATIVE = "dense"  # always a native allreduce: the baseline that is available to every job
_UNITS = MappingProxyType(
    {
        "bandwidth": MappingProxyType({"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}),
        # units per second
        "latency": MappingProxyType({"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}),
    }
)
_BITS_PER_BYTE = 8
_PER = MappingProxyType({"byte": 1, "word": WORD_BYTES})  # bytes
USUAL_NETWORK = "1gbit,50us"  # the default of sim


def parse_network(text: str) -> Links:
    """Parse a bandwidth and a latency, in either order, or alpha and beta, as in papers.

    Args:
        text: e.g. "100mbit,1ms", or "alpha=1ms,beta=320ns/word"; the units are bit, kbit, mbit,
            gbit (per second) and ns, us, ms, s, and beta is per byte or per word of 4 bytes.

    Raises:
        ConfigurationError: the message names the part that is wrong or missing.

    Example:
        >>> links = parse_network("1gbit,50us")
        >>> links.alpha, links.beta
        (5e-05, 8e-09)
        >>> parse_network("alpha=50us,beta=32ns/word") == links
        True
    """
    example = 'write a bandwidth and a latency, e.g. "1gbit,50us", or "alpha=50us,beta=32ns/word"'
    found: dict[str, float] = {}
    for part in text.lower().split(","):
        kind, seconds = _link_part(part.strip())
        if not kind or kind in found:
            raise ConfigurationError(f"network {text!r}: cannot read {part!r}; {example}")
        found[kind] = seconds
    for kind in _UNITS:
        require(kind in found, f"network {text!r} has no {kind}; {example}")
    moves = found["bandwidth"] < math.inf
    require(moves, f"network {text!r}: a bandwidth of 0 moves nothing; {example}")
    return Links(alpha=found["latency"], beta=found["bandwidth"])


def _link_part(part: str) -> tuple[str, float]:
    """Return "latency" and seconds per message, "bandwidth" and seconds per byte, or "" and 0."""
    number = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
    match = re.fullmatch(rf"(?:(alpha|beta)\s*=\s*)?{number}\s*([a-z]+)(?:/([a-z]+))?", part)
    if match is None:
        return "", 0.0
    name, value, unit, per = match[1], float(match[2]), match[3], match[4]
    bits, in_a_second = _UNITS["bandwidth"].get(unit), _UNITS["latency"].get(unit)
    if name is None and bits is not None and per in (None, "s"):
        return "bandwidth", _BITS_PER_BYTE / (value * bits) if value else math.inf
    if name != "beta" and in_a_second is not None and per is None:
        return "latency", value / in_a_second
    if name == "beta" and in_a_second is not None and per in _PER:
        return "bandwidth", value / in_a_second / _PER[per]
    return "", 0.0


def parse_seconds(text: str, option: str) -> float:
    """Parse a duration: a number followed by ns, us, ms or s.

    Example:
        >>> parse_seconds("80ms", "--rtt")
        0.08
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", text.strip().lower())
    if match is None:
        raise ConfigurationError(f"{option} {text!r} is not a duration; write it like 80ms")
    return float(match[1]) / _UNITS["latency"][match[2]]


def transport_of(comm: Communicator) -> str:
    """Return the name of the transport that carries a communicator's messages between processes."""
    if isinstance(comm, TorchCommunicator):
        return "torch"
    return "mpi" if isinstance(comm, MpiCommunicator) else "zmq"


@dataclass(frozen=True)
class Connection:
    """The options that determine how a command's ranks are connected; checks them."""

    transport: str | None = "auto"  # None: "sim", or "auto" in the lab
    timeout: float = 300.0
    curve_keys: Path | None = None
    lab: str | None = None  # the lab's links, as read by ``parse_links``
    simulates: bool = False  # whether the command can run on virtual ranks

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        self.bits_per_second  # noqa: B018  refuses a text that does not describe links
        if self.transport is None:
            object.__setattr__(self, "transport", "sim" if self.lab is None else "auto")
        choices = ", ".join(TRANSPORTS)
        known = not self.simulates or self.transport in ("sim", *TRANSPORTS)
        require(known, f"unknown transport {self.transport!r}; choose one of sim, {choices}")
        if self.simulated:
            option = "--lab" if self.lab else "--curve-keys"
            none = f"{option} needs real ranks, and --transport sim has none"
            require(not (self.lab or self.curve_keys), f"{none}; choose --transport {choices}")
            return
        if self.lab is not None and self.transport == "mpi":
            raise ConfigurationError(
                "--lab and --transport mpi do not go together: MPI ranks of one machine use shared "
                "memory and bypass the lab's links; choose zmq or torch"
            )
        check_transport(self.transport or "auto", {"curve_keys": self.curve_keys})
        if self.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            raise ConfigurationError(
                "transport mpi needs mpi4py and an MPI library: pip install 'sparsync[mpi]' brings "
                "both, and mpiexec"
            )
        if self.transport in ("auto", "zmq") and importlib.util.find_spec("zmq") is None:
            raise ConfigurationError(
                f"transport {self.transport} needs pyzmq: pip install pyzmq, or choose torch"
            )
        if self.curve_keys is not None and not self.curve_keys.is_dir():
            raise ConfigurationError(
                f"--curve-keys '{self.curve_keys}' is not a folder; name the one that holds the "
                "keys of all ranks"
            )

    @property
    def simulated(self) -> bool:
        """Whether the ranks and the clock are virtual."""
        return self.simulates and self.transport == "sim"

    @property
    def bits_per_second(self) -> int | None:
        """Lowest rate of the lab's links; None without a lab."""
        if self.lab is None:
            return None
        return min(min(one.up, one.down) for one in parse_links(self.lab, MOST_RANKS))

    def refuse_network(self, network: str) -> None:
        """Refuse a simulated network if the ranks are real."""
        require(
            self.simulated or network == USUAL_NETWORK,
            "--network describes the simulated network of --transport sim; leave it out, or shape "
            "real links "
            "with --lab",
        )

    def prepare(self) -> None:
        """Acquire the privileges for the lab, before anything is started or printed.

        Raises:
            ConfigurationError: the kernel does not allow a lab, or a launcher started this process.
        """
        if self.lab is not None:
            if detect():
                raise ConfigurationError(
                    "--lab starts its own ranks; start it as one process, without a launcher"
                )
            ensure_privileges()
        if self.simulated and detect():
            raise ConfigurationError("--transport sim needs no launcher; start it as one process")

    def start(self, function: Callable[..., Any], ranks: int, *args: Any) -> Any:
        """Call ``function(*args)`` on every rank, in the lab if there is one; see ``launch``."""
        options: dict[str, Any] = {"timeout": self.timeout, "mpi": self.transport == "mpi"}
        if self.lab is None:
            return launch(function, ranks, *args, **options)
        with Lab(ranks, self.lab) as lab:
            return launch(function, ranks, *args, lab=lab, **options)

    @contextmanager
    def open(self, algorithm: str) -> Iterator[Communicator]:
        """Connect this process's rank; every rank calls this.

        "dense" uses gloo's native allreduce, regardless of the other rows' transport.  With MPI, it uses
        MPI's own allreduce instead: MPI ranks on one machine communicate through shared memory, but gloo
        ranks do not.
        """
        native = algorithm == _NATIVE and self.transport != "mpi"
        comm = connect_group(
            transport="torch" if native or self.transport is None else self.transport,
            timeout=self.timeout,
            curve_keys=None if native else self.curve_keys,
        )
        try:
            yield comm
        finally:
            if not isinstance(comm, TorchCommunicator):
                comm.close()
