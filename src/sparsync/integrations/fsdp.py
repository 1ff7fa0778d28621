"""FSDP2 inside a replica: which of its gradients are to be exchanged between replicas now.

``fully_shard`` reduces over the shards, calls a module's all-reduce hook, writes the shards of gradients
and calls the parameters' own hooks.  The all-reduce hook is not the place: its flat tensor has padding
between uneven shards, does not say which parameters took part, still has to be divided where it is
float16, and comes also after ``set_requires_all_reduce(False)``.  The parameters' hooks see exactly this
rank's shards, in the parameters' dtype, averaged over the shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from sparsync.errors import ConfigurationError
from sparsync.integrations.placement import Placed

__all__ = ["Gate"]


@final
class Gate:
    """Tells which gradients FSDP2 would all-reduce, by its own switches, and sees parameters change.

    ``set_requires_gradient_sync(False)`` calls no hook at all; ``set_requires_all_reduce(False)`` shuts
    the gate: the gradients of several backward passes add up in the shards.

    Args:
        model: any model; parameters that are not FSDP2's may pass at all times.
    """

    def __init__(self, model: nn.Module) -> None:
        states = {
            id(state): state
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for state in [fully_shard.state(module)]  # type: ignore[attr-defined]
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

    def check_covers(self, placed: Sequence[Placed]) -> None:
        """Refuse parameters beside FSDP2's, whose gradients nobody averages over the shards.

        Raises:
            ConfigurationError: names the first of them.
        """
        for ranks in {_ranks(sharded) for sharded in self._group_of}:
            for p in placed:
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

        Raises:
            ConfigurationError: names the first that would train on this replica alone.
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
                "load weights before attach or without assign=True, and attach anew after thawing"
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
