"""The library without a model: ``connect`` to the ranks, ``allreduce`` a vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sparsync.collectives.agreement import agree
from sparsync.collectives.base import Reduced
from sparsync.errors import ConfigurationError
from sparsync.presets import Algorithm, resolve
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.base import Communicator, run
from sparsync.transports.solo import SoloCommunicator

__all__ = ["allreduce", "connect"]


def connect(
    timeout: float = 300.0, *, transport: str = "torch", curve_keys: Path | str | None = None
) -> Communicator:
    """Return this process's communicator: torch.distributed's default group, or a world of one.

    Args:
        timeout: seconds that any wait may take before it fails with an error.
        transport: "torch" (the group's own backend) or "zmq" (sockets of its own: ``close`` it).
        curve_keys: folder with one certificate per rank, for an encrypted zmq.

    Example:
        >>> comm = connect()
        >>> comm.rank, comm.world_size
        (0, 1)
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SoloCommunicator()
    from sparsync.transports.connect import connect_group

    return connect_group(transport=transport, timeout=timeout, curve_keys=curve_keys)


def allreduce(
    vector: Tensor | Vector,
    comm: Communicator,
    algorithm: str | Algorithm = "budgeted",
    *,
    k: int | None = None,
    **options: Any,
) -> Reduced:
    """Sum a vector over ranks, once; every rank calls it.

    Stateless: every call is an exact step (thresholds and boundaries are made anew).  Training keeps
    them from step to step: use ``attach``.

    Args:
        vector: a 1-D tensor or a dense or sparse vector, of which the k largest entries are taken.
            Size and dtype are equal on all ranks.
        comm: from ``connect``; a simulated communicator cannot block (see ``sparsync.simulate``).
        algorithm: a preset's name or an ``Algorithm``.
        k: entries asked for, per rank and in the total; equal on all ranks.  Default: the size.
        options: of the preset.

    Returns:
        ``total``, bit-identical on every rank, and ``delivered``, this rank's share of it.

    Raises:
        ConfigurationError: unknown algorithm or option, a vector that is not 1-D, k < 0.
        PeerError: ranks disagree on size, dtype, algorithm or k; a peer died.

    Cost: that of the algorithm, and one small allgather to compare the call.

    Example:
        >>> import torch
        >>> reduced = allreduce(torch.tensor([1.0, -5.0, 2.0]), connect(), k=1)
        >>> reduced.total.to_dense().tolist()
        [0.0, -5.0, 0.0]
    """
    chosen = resolve(algorithm, **options)
    if not isinstance(vector, Tensor | SparseVector | DenseVector):
        raise ConfigurationError(
            f"allreduce: got {type(vector).__name__}; give a 1-D tensor, a SparseVector or a "
            "DenseVector"
        )
    size = vector.numel() if isinstance(vector, Tensor) else vector.size
    if k is None:
        k = size
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise ConfigurationError(
            f"k is {k!r}; give the number of entries to take, a whole number >= 0"
        )
    return run(_allreduce(vector, comm, chosen, size, k, options))


async def _allreduce(
    vector: Tensor | Vector,
    comm: Communicator,
    algorithm: Algorithm,
    size: int,
    k: int,
    options: dict[str, Any],
) -> Reduced:
    ready = _ready(vector, k, algorithm)
    await agree(
        comm,
        {
            "size": size,
            "dtype": ready.values.dtype,
            "algorithm": algorithm.name,
            "k": k,
            "options": sorted(options.items(), key=lambda item: item[0]),
        },
    )
    return await algorithm.make_collective().reduce(comm, ready, k, step=0)


def _ready(vector: Tensor | Vector, k: int, algorithm: Algorithm) -> Vector:
    """Select from a tensor; check what is given as a vector."""
    if isinstance(vector, SparseVector):
        return vector.check()
    values = vector.values if isinstance(vector, DenseVector) else vector
    if values.dim() != 1:
        raise ConfigurationError(
            f"allreduce: the tensor has shape {tuple(values.shape)}; flatten it first"
        )
    if isinstance(vector, DenseVector):
        return vector
    # step 0 opens every period, so the selection is exact; a sum over ranks is not differentiated
    return algorithm.make_selector().select(vector.detach(), k, step=0)
