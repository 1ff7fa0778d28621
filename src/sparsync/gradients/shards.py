"""The parameters that this rank holds in part: local tensors, their pieces, and FSDP2's switches.

In a backward pass, ``fully_shard`` reduces gradients over the shards' ranks, calls a module's all-reduce
hook, writes the shards of the gradients, and calls the parameters' own hooks.  The parameters' hooks are
used here, because they see exactly this rank's shards, averaged over the ranks that hold the other
shards.  The all-reduce hook is unsuitable: its flat tensor contains padding between uneven shards and
does not say which parameters it holds, and its values may still have to be divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sparsync.errors import ConfigurationError, require
from sparsync.transports.process_group import check_group
from sparsync.units import Piece, check_values

__all__ = [
    "AVERAGES_ON_CPU",
    "Fsdp",
    "Shard",
    "aligned",
    "elements_of",
    "keys_of",
    "ranks_of",
    "shards_of",
]

AVERAGES_ON_CPU = "2.9"  # the first version of torch whose FSDP2 averages gradients over gloo


@dataclass(frozen=True, eq=False)
class Shard:
    """One trained parameter.

    Attributes:
        name: the name in ``named_parameters``.
        parameter: a plain tensor, or a DTensor.
        piece: the part of the parameter on this rank; None if this rank holds the whole parameter.
        kind: a text; parameters of the same kind are sharded over the same ranks, in the same way.
    """

    name: str
    parameter: Tensor
    piece: Piece | None
    kind: str


def shards_of(model: nn.Module, replicas: Collection[int]) -> list[Shard]:
    """Return the parameters that need gradients, in registration order.

    Raises:
        ConfigurationError: a parameter has no storage, or COO gradients, or its mesh includes replicas.
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
        check_values([(name, parameter)])
        found.append(_shard(name, parameter, replicas))
    if not found:
        raise ConfigurationError(
            "the model has no parameter that needs a gradient on this rank; attach to a part that trains"
        )
    return found


def _shard(name: str, parameter: Tensor, replicas: Collection[int]) -> Shard:
    if not isinstance(parameter, DTensor):
        return Shard(name, parameter, None, "plain")
    mesh, placements = parameter.device_mesh, parameter.placements
    # This rank is both in the mesh and among the replicas. If this is also true of another rank, FSDP2
    # already sums over these replicas, as in HSDP.
    both = sorted(set(mesh.mesh.flatten().tolist()) & set(replicas))
    if len(both) > 1:
        raise ConfigurationError(
            f"the mesh of '{name}' ({mesh}) holds the replicas {both}, between which gradients would "
            "be summed twice; give fully_shard only the sub-mesh of the shards, as mesh['shard']"
        )
    if all(placement.is_replicate() for placement in placements):
        return Shard(name, parameter, None, "replicated")
    size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    # torch gives an empty shard an offset past the end, or none; with zeros, pieces can be compared
    if 0 in size:
        offset = size = (0,) * len(size)
    piece = {"shape": list(parameter.shape), "offset": list(offset), "size": list(size)}
    return Shard(name, parameter, piece, str(placements))


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with its parameter's placements; partial sums are completed."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    # With tensor parallelism, a gradient may still have to be summed over ranks (``Partial``, torch
    # 2.13).  The sum must come before the selection, which is not linear.
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def ranks_of(replicate: Any) -> list[int]:
    """Return the global ranks of a one-dimensional mesh or a process group; refuse anything else."""
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ConfigurationError(
                f"replicate is a mesh of {replicate.ndim} dimensions ({replicate}); give the one "
                "dimension along which replicas lie, e.g. mesh['replicate']"
            )
        replicate = replicate.get_group()
    outside = (
        replicate == dist.GroupMember.NON_GROUP_MEMBER
    )  # an int, which has an error of its own
    if not outside and not isinstance(replicate, dist.ProcessGroup):
        raise ConfigurationError(
            f"replicate is {type(replicate).__name__}; give a one-dimensional DeviceMesh or a process "
            "group: the ranks that hold the same part of the model as this one"
        )
    check_group("replicate", replicate)
    return dist.get_process_group_ranks(replicate)


def keys_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Return a 64-bit hash of every parameter's name and ranks.

    Ranks are included because layers of different stages may have the same name.
    """
    texts = {name: f"{name} {sorted(ranks)}" for name, ranks in _holders(shards).items()}
    # ``hash`` cannot be used, because it differs between processes
    hashes = {n: hashlib.blake2b(text.encode(), digest_size=8) for n, text in texts.items()}
    return {n: int.from_bytes(h.digest(), "little", signed=True) for n, h in hashes.items()}


def elements_of(shards: Sequence[Shard]) -> int:
    """Return the number of elements, before sharding, of the parameters whose lowest rank is this rank.

    The sum over all parts of a replica is the model's size: every parameter, sharded or replicated,
    counts once.
    """
    holders, me = _holders(shards), dist.get_rank()
    return sum(p.parameter.numel() for p in shards if min(holders[p.name]) == me)


def _holders(shards: Sequence[Shard]) -> dict[str, frozenset[int]]:
    """Return, for each parameter, the ranks of a replica that hold it or a part of it.

    If there are DTensors, a plain parameter is whole on each of their ranks.
    """
    meshes = {p.name: _ranks(p.parameter) for p in shards}
    everywhere = frozenset().union(*meshes.values()) or frozenset([dist.get_rank()])
    return {name: ranks or everywhere for name, ranks in meshes.items()}


@final
class Fsdp:
    """Reads FSDP2's switches to decide which gradients to exchange; detects changed parameters.

    With ``set_requires_gradient_sync(False)``, no hook is called at all.  With
    ``set_requires_all_reduce(False)``, the exchange is postponed, and the gradients of several backward
    passes add up in the shards.  Gradients of parameters that FSDP2 does not manage are always exchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        # ``FSDPModule`` has setters for its switches but no getters, so they are read from the private
        # state and its groups (torch 2.7 to 2.13; see ``_groups_of`` for the difference)
        states = {
            id(state): state
            for module in model.modules()
            if isinstance(module, FSDPModule)
            if (state := _get_module_state(module)) is not None  # fully_shard's, or replicate's
        }
        # states are distinguished by identity, because fully_shard([a, b]) gives both modules one state
        self._groups = [group for state in states.values() for group in _groups_of(state)]
        self._group_of: dict[Tensor, Any] = {
            kept.sharded_param: group for group in self._groups for kept in group.fsdp_params
        }
        self._kept = {
            kept.sharded_param: kept for group in self._groups for kept in group.fsdp_params
        }
        # over gloo, FSDP2 silently sums gradients instead of averaging them (measured, also without
        # sparsync)
        sums = any(
            sharded.device.type == "cpu" and len(_ranks(sharded)) > 1 for sharded in self._group_of
        )
        require(
            not sums or torch.__version__ >= AVERAGES_ON_CPU,
            f"FSDP2 of torch {torch.__version__} adds up the gradients of CPU tensors where it should "
            f"average them; train on GPUs, or with torch {AVERAGES_ON_CPU} or newer",
        )

    def manages(self, parameter: Tensor) -> bool:
        """Return whether FSDP2 manages a parameter."""
        return parameter in self._group_of

    def admits(self, parameter: Tensor) -> bool:
        """Return whether a gradient that was written to ``parameter.grad`` must be exchanged now."""
        group = self._group_of.get(parameter)
        return group is None or bool(group.all_reduce_grads)

    def wait_for(self, parameter: Tensor) -> None:
        """With ``CPUOffloadPolicy``, wait until the new gradient has arrived in host memory."""
        # in older versions of torch, FSDP2 itself waits only after the hooks of all parameters
        event = getattr(self._kept.get(parameter), "grad_offload_event", None)
        if event is not None:
            event.synchronize()

    def check_covers(self, shards: Sequence[Shard]) -> None:
        """Refuse unsharded parameters whose gradients are not averaged over the shards' ranks."""
        # The shards' ranks see different batches. FSDP2 averages the gradients of its own parameters over
        # them. If a parameter's mesh includes all of these ranks, DTensor reduces its gradient. A single
        # rank needs no average.
        for ranks in {_ranks(sharded) for sharded in self._group_of}:
            for p in shards:
                if len(ranks) == 1 or self.manages(p.parameter) or ranks <= _ranks(p.parameter):
                    continue
                raise ConfigurationError(
                    f"'{p.name}' is not sharded by FSDP2, but others are, over ranks {sorted(ranks)}; "
                    "its gradient would not be averaged between these: call fully_shard on the whole "
                    "model as well, after its blocks, or freeze the parameter"
                )

    def check_same(self, exchanged: Collection[Tensor]) -> set[Tensor]:
        """Refuse parameters managed by FSDP2 that train now, but were frozen or missing at ``attach``.

        Returns:
            All parameters that FSDP2 manages: shards, and the whole parameters that modules show while
            they are unsharded.
        """
        shown: set[Tensor] = set()
        for kept in (kept for group in self._groups for kept in group.fsdp_params):
            # a module shows either the shard or the whole parameter, and the user may set requires_grad
            # on either of them
            forms = [kept.sharded_param]
            if hasattr(kept, "_unsharded_param"):  # created by the first all-gather
                forms.append(kept._unsharded_param)
            shown.update(forms)
            if kept.sharded_param in exchanged or not any(form.requires_grad for form in forms):
                continue
            # the full name is known only after FSDP2's first forward pass
            name = kept._param_fqn or kept._module_info.param_name
            # load_state_dict(assign=True) makes FSDP2 create a new ``sharded_param``
            was = "frozen at" if kept.sharded_param in self._group_of else "replaced after"
            raise ConfigurationError(
                f"the parameter '{name}' was {was} attach, and its gradient would stay on this replica; "
                "load weights before attach or without assign=True, and attach again after thawing"
            )
        return shown


def _ranks(parameter: Tensor) -> frozenset[int]:
    """Return the ranks in a parameter's mesh; none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    return frozenset(parameter.device_mesh.mesh.flatten().tolist())


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module; before torch 2.12, there is only one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
