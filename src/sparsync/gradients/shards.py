"""The parameters that this rank holds a part of: local tensors, their pieces, and FSDP2's switches.

``fully_shard`` reduces over the shards, calls a module's all-reduce hook, writes the shards of gradients
and calls the parameters' own hooks, which see exactly this rank's shards, averaged over the shards.  The
all-reduce hook is not the place to exchange: its flat tensor has padding between uneven shards, does not
say which parameters took part, and may still have to be divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsync.errors import ConfigurationError
from sparsync.units import Piece

__all__ = ["Fsdp", "Shard", "aligned", "elements_of", "keys_of", "ranks_of", "shards_of"]


@dataclass(frozen=True, eq=False)
class Shard:
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


def shards_of(model: nn.Module, replicas: Collection[int]) -> list[Shard]:
    """Return the parameters that need gradients, in registration order.

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
        found.append(_shard(name, parameter, replicas))
    if not found:
        raise ConfigurationError(
            "the model has no parameter that needs a gradient on this rank; attach to what is trained"
        )
    return found


def _shard(name: str, parameter: Tensor, replicas: Collection[int]) -> Shard:
    if not isinstance(parameter, DTensor):
        return Shard(name, parameter, None, "plain")
    mesh, placements = parameter.device_mesh, parameter.placements
    both = sorted(set(mesh.mesh.flatten().tolist()) & set(replicas))
    if len(both) > 1:
        raise ConfigurationError(
            f"the mesh of '{name}' ({mesh}) holds the replicas {both}, between which gradients would "
            "be summed twice; give fully_shard only the sub-mesh of the shards, as mesh['shard']"
        )
    if all(placement.is_replicate() for placement in placements):
        return Shard(name, parameter, None, "replicated")
    size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if 0 in size:  # an empty shard has an offset past the end, or none
        offset = size = (0,) * len(size)
    piece = {"shape": list(parameter.shape), "offset": list(offset), "size": list(size)}
    return Shard(name, parameter, piece, str(placements))


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that lies as its parameter does: summed, where it came as partial sums."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def ranks_of(replicate: Any) -> list[int]:
    """Return the global ranks of a one-dimensional mesh or a process group; refuse anything else."""
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


def keys_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Hash every parameter's name and ranks: layers of two stages may have the same name."""
    texts = {name: f"{name} {sorted(ranks)}" for name, ranks in _holders(shards).items()}
    hashes = {n: hashlib.blake2b(text.encode(), digest_size=8) for n, text in texts.items()}
    return {n: int.from_bytes(h.digest(), "little", signed=True) for n, h in hashes.items()}


def elements_of(shards: Sequence[Shard]) -> int:
    """Return the elements of the parameters of whose holders this rank is the first, shards as wholes.

    The sum over all parts of a replica is that of the model, in which a parameter counts once, divided or
    replicated.
    """
    holders, me = _holders(shards), dist.get_rank()
    return sum(p.parameter.numel() for p in shards if min(holders[p.name]) == me)


def _holders(shards: Sequence[Shard]) -> dict[str, frozenset[int]]:
    """Return the ranks of a replica that hold each parameter, or a part of it.

    A plain one next to DTensors is whole on each of their ranks.
    """
    meshes = {p.name: _ranks(p.parameter) for p in shards}
    everywhere = frozenset().union(*meshes.values()) or frozenset([dist.get_rank()])
    return {name: ranks or everywhere for name, ranks in meshes.items()}


@final
class Fsdp:
    """Tells which gradients FSDP2 would all-reduce, by its own switches, and sees parameters change.

    ``set_requires_gradient_sync(False)`` calls no hook at all; ``set_requires_all_reduce(False)`` ends
    the exchange: the gradients of several backward passes add up in the shards.  Parameters that are
    not FSDP2's are always exchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        states = {
            id(state): state
            for module in model.modules()
            if isinstance(module, FSDPModule)
            if (state := _get_module_state(module)) is not None  # fully_shard's, or replicate's
        }
        self._groups = [group for state in states.values() for group in _groups_of(state)]
        self._group_of: dict[Tensor, Any] = {
            kept.sharded_param: group for group in self._groups for kept in group.fsdp_params
        }

    def manages(self, parameter: Tensor) -> bool:
        """Tell whether a parameter is one of FSDP2's."""
        return parameter in self._group_of

    def admits(self, parameter: Tensor) -> bool:
        """Tell whether the gradient that has just been written is to be exchanged."""
        group = self._group_of.get(parameter)
        return group is None or bool(group.all_reduce_grads)

    def check_covers(self, shards: Sequence[Shard]) -> None:
        """Refuse parameters next to FSDP2's, whose gradients nobody averages over the shards."""
        for ranks in {_ranks(sharded) for sharded in self._group_of}:
            for p in shards:
                if len(ranks) == 1 or self.manages(p.parameter) or ranks <= _ranks(p.parameter):
                    continue
                raise ConfigurationError(
                    f"'{p.name}' is not sharded by FSDP2, but others are, over ranks {sorted(ranks)}; "
                    "its gradient would not be averaged between these: call fully_shard on the whole "
                    "model, too, after its blocks, or freeze the parameter"
                )

    def check_same(self, exchanged: Collection[Tensor]) -> set[Tensor]:
        """Refuse parameters of FSDP2 that train now, but did not or were not there at attach.

        Returns:
            All parameters of FSDP2: shards, and the whole ones that modules show now and then.
        """
        shown: set[Tensor] = set()
        for kept in (kept for group in self._groups for kept in group.fsdp_params):
            forms = [kept.sharded_param]
            if hasattr(kept, "_unsharded_param"):  # after the first forward pass
                forms.append(kept._unsharded_param)
            shown.update(forms)
            if kept.sharded_param in exchanged or not any(form.requires_grad for form in forms):
                continue
            name = kept._param_fqn or kept._module_info.param_name
            was = "frozen at" if kept.sharded_param in self._group_of else "replaced after"
            raise ConfigurationError(
                f"the parameter '{name}' was {was} attach, and its gradient would stay on this replica; "
                "load weights before attach or without assign=True, and attach again after thawing"
            )
        return shown


def _ranks(parameter: Tensor) -> frozenset[int]:
    """Return the ranks that hold parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    return frozenset(parameter.device_mesh.mesh.flatten().tolist())


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module: torch before 2.12 has one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
