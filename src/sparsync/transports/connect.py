"""Choose the transport that carries the bytes of a process group."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from sparsync.errors import ConfigurationError
from sparsync.transports.communicator import Communicator
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.process_group import TorchCommunicator
from sparsync.transports.rendezvous import store_of

__all__ = ["TRANSPORTS", "check_transport", "connect_group"]

TRANSPORTS = ("auto", "torch", "zmq", "mpi")


def connect_group(
    group: dist.ProcessGroup | None = None,
    *,
    transport: str = "auto",
    timeout: float = 300.0,
    curve_keys: Path | str | None = None,
) -> Communicator:
    """Connect the ranks of a process group; all of them call it.

    Args:
        group: its members are the ranks; None for the default group.
        transport: "torch" (gloo), "zmq" (a mesh of its own), "mpi" (the ranks are
            mpiexec's), or "auto": zmq, over which sparse exchanges took 5 to 10 % less time and
            fewer bytes than over gloo, whose messages are padded (``benchmarks/lab_exchange.md``).
        timeout: seconds that any wait may take.
        curve_keys: folder with one certificate per rank: zmq encrypts, and refuses ranks without a
            listed key.

    Raises:
        ConfigurationError: an unknown transport, or keys for one that does not encrypt.
        DeadlineError: names the ranks that did not arrive in time.
    """
    check_transport(transport, curve_keys)
    over_torch = TorchCommunicator(group, timeout=timeout)
    rank, world_size = over_torch.rank, over_torch.world_size
    if transport == "torch" or world_size == 1:
        return over_torch
    if transport == "mpi":
        return MpiCommunicator.over(over_torch, timeout=timeout)
    # pyzmq is imported when it is needed
    from sparsync.transports.zmq import ZmqCommunicator

    return ZmqCommunicator(
        rank, world_size, store=store_of(group), timeout=timeout, curve_keys=curve_keys
    )


def check_transport(transport: str, curve_keys: Path | str | None) -> None:
    """Refuse an unknown transport, or keys for one that does not encrypt."""
    if transport not in TRANSPORTS:
        raise ConfigurationError(
            f"unknown transport {transport!r}; choose one of {', '.join(TRANSPORTS)}"
        )
    if curve_keys is not None and transport in ("torch", "mpi"):
        other = "gloo" if transport == "torch" else "MPI"
        raise ConfigurationError(
            f"curve_keys work with transport='zmq'; {other} neither encrypts nor authenticates"
        )
