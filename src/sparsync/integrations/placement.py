"""What of a model lies on this rank: local tensors, their pieces, and what may be selected together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsync.errors import ConfigurationError
from sparsync.integrations.pieces import Piece

__all__ = ["Placed", "aligned", "local_of", "placed_parameters", "ranks_of"]


@dataclass(frozen=True, eq=False)
class Placed:
    """One trained parameter.

    Attributes:
        name: in the model.
        parameter: a plain tensor, or a DTensor.
        piece: which part of it lies here; None: all of it.
        kind: parameters of one kind are divided alike over other ranks.
    """

    name: str
    parameter: Tensor
    piece: Piece | None
    kind: str


def placed_parameters(model: nn.Module, replicas: Collection[int]) -> list[Placed]:
    """Return the parameters that need gradients, in registration order.

    Args:
        model: FSDP2, tensor-parallel, a pipeline's stage, or plain.
        replicas: global ranks that hold the same parts of the model as this one.

    Raises:
        ConfigurationError: parameters without storage, COO gradients, or a mesh with the replicas in it.
    """
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise ConfigurationError(
            "the model has an embedding with sparse=True, whose COO gradients are exchanged under "
            "DDP only; build it with sparse=False"
        )
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.device.type == "meta":
            raise ConfigurationError(
                f"the parameter '{name}' is on the meta device; materialise the model "
                "(to_empty, then its weights) before attach"
            )
        found.append(_placed(name, parameter, replicas))
    if not found:
        raise ConfigurationError(
            "the model has no parameter that needs a gradient on this rank; attach to what is trained"
        )
    return found


def _placed(name: str, parameter: Tensor, replicas: Collection[int]) -> Placed:
    if not isinstance(parameter, DTensor):
        return Placed(name, parameter, None, "plain")
    mesh, placements = parameter.device_mesh, parameter.placements
    both = sorted(set(mesh.mesh.flatten().tolist()) & set(replicas))
    if len(both) > 1:
        raise ConfigurationError(
            f"the mesh of '{name}' ({mesh}) holds the replicas {both}, between which gradients would "
            "be summed twice; give fully_shard only the sub-mesh of the shards, as mesh['shard']"
        )
    if all(placement.is_replicate() for placement in placements):
        return Placed(name, parameter, None, "replicated")
    size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if 0 in size:  # an empty shard has an offset behind the end, or none
        offset, size = (0,) * len(size), tuple(0 for _ in size)
    return Placed(name, parameter, Piece(tuple(parameter.shape), offset, size), str(placements))


def local_of(tensor: Tensor) -> Tensor:
    """Return what of a tensor lies here, sharing its memory.

    Gradients of a subclass of Tensor that is not a DTensor are its own affair.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that lies as its parameter does: summed, where it came as partial sums."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def ranks_of(replicate: Any) -> list[int]:
    """Return the global ranks of a one-dimensional mesh or a process group.

    Raises:
        ConfigurationError: neither.
    """
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ConfigurationError(
                f"replicate is a mesh of {replicate.ndim} dimensions ({replicate}); give one of them: "
                "the one along which replicas are, as mesh['replicate']"
            )
        replicate = replicate.get_group()
    if not isinstance(replicate, dist.ProcessGroup):
        raise ConfigurationError(
            f"replicate is {type(replicate).__name__}; give a one-dimensional DeviceMesh or a process "
            "group: the ranks that hold the same part of the model as this one"
        )
    return dist.get_process_group_ranks(replicate)
