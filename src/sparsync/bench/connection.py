"""Which transport carries a bench or a training, checked before any rank starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator, check_timeout
from sparsync.transports.connect import TRANSPORTS, check_transport, connect_group
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.torch import TorchCommunicator

__all__ = ["TRANSPORTS", "Connection", "transport_of"]

_NATIVE = "dense"  # always measured as a native allreduce: the baseline that everybody has


def transport_of(comm: Communicator) -> str:
    """Name what carries a communicator's messages between processes."""
    if isinstance(comm, TorchCommunicator):
        return "torch"
    return "mpi" if isinstance(comm, MpiCommunicator) else "zmq"


@dataclass(frozen=True)
class Connection:
    """How ranks are connected.

    Attributes:
        transport: "torch" (gloo), "zmq", "mpi", or "auto": the library's default.
        timeout: seconds that a rank waits for another.
        curve_keys: folder of keys; zmq then encrypts, and refuses ranks without a listed key.
    """

    transport: str = "auto"
    timeout: float = 300.0
    curve_keys: Path | None = None

    def __post_init__(self) -> None:
        check_transport(self.transport, self.curve_keys)
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
        check_timeout(self.timeout)

    @contextmanager
    def open(self, algorithm: str) -> Iterator[Communicator]:
        """Connect this process's rank; every rank calls it.

        "dense" goes through gloo's native allreduce, whatever the transport of the others; over MPI
        through MPI's, whose ranks of one machine share memory, which gloo's do not.
        """
        native = algorithm == _NATIVE and self.transport != "mpi"
        comm = connect_group(
            transport="torch" if native else self.transport,
            timeout=self.timeout,
            curve_keys=None if native else self.curve_keys,
        )
        try:
            yield comm
        finally:
            if not isinstance(comm, TorchCommunicator):
                comm.close()
