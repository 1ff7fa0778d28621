"""Equality: replicas compare their tensors without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from sparsync.collectives.agreement import agree
from sparsync.transports.base import Communicator

__all__ = ["check_equal_parameters", "digest"]


def digest(tensor: Tensor) -> str:
    """Return what two tensors share only if dtype, shape and all bits are equal.

    Example:
        >>> digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))
        False
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    state = hashlib.blake2b(raw.numpy().data, digest_size=8)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {state.hexdigest()}"


async def check_equal_parameters(
    comm: Communicator, parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Return when all ranks hold the same tensors, bit for bit.

    Args:
        comm: the group; all its ranks call it.
        parameters: names and tensors, as ``model.named_parameters()`` gives them.

    Raises:
        PeerError: names the first tensor that differs and the ranks that do; on all ranks.

    Cost: one reading of the tensors; two allgathers, of 8 bytes per tensor in the second.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     named = [("weight", torch.zeros(2)), ("bias", torch.ones(1) * (comm.rank // 2))]
        ...     await check_equal_parameters(comm, named)
        >>> try: simulate(program, 3)
        ... except Exception as error: str(error).split(" has ")[0]
        'ranks disagree on parameter bias: rank 0'
    """
    digests = {f"parameter {name}": digest(tensor) for name, tensor in parameters}
    names = hashlib.blake2b("\n".join(digests).encode(), digest_size=8).hexdigest()
    await agree(comm, {"the names of the parameters": f"{len(digests)} with digest {names}"})
    await agree(comm, digests)
