"""FSDP2 inside a replica: which of its gradients are to be exchanged between replicas now.

``fully_shard`` reduces over the shards, calls a module's all-reduce hook, writes the shards of gradients
and calls the parameters' own hooks.  The all-reduce hook is not the place: its flat tensor has padding
between uneven shards, does not say which parameters took part, still has to be divided where it is
float16, and comes also after ``set_requires_all_reduce(False)``.  The parameters' hooks see exactly this
rank's shards, in the parameters' dtype, averaged over the shards.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from sparsync.errors import ConfigurationError
from sparsync.integrations.checks import check_same_parameters

__all__ = ["Gate"]


@final
class Gate:
    """Tells which gradients FSDP2 would all-reduce, by its own switches, and sees parameters change.

    ``set_requires_gradient_sync(False)`` calls no hook at all; ``set_requires_all_reduce(False)`` shuts
    the gate: the gradients of several backward passes add up in the shards.

    Args:
        model: any model; parameters that are not FSDP2's may pass at all times.

    Attributes:
        owner: what the model is to keep alive.
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
        self._exchanged = [p for p in model.parameters() if p.requires_grad]
        self.owner: Any = None
        self._handle = model.register_forward_pre_hook(self._before_forward)

    def manages(self, parameter: Tensor) -> bool:
        """Tell whether a parameter is one of FSDP2's."""
        return parameter in self._group_of

    def admits(self, parameter: Tensor) -> bool:
        """Tell whether the gradient that has just been written is to be exchanged."""
        group = self._group_of.get(parameter)
        return group is None or bool(group.all_reduce_grads)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Refuse parameters that came after attach, whose gradients would stay on this replica.

        Raises:
            ConfigurationError: names the first of them.
        """
        if not self._groups:
            check_same_parameters(model, self._exchanged)
            return
        for group in self._groups:  # the module itself shows whole parameters now and then
            for kept in group.fsdp_params:
                if kept.sharded_param.requires_grad and kept.sharded_param not in self._group_of:
                    raise ConfigurationError(
                        f"the parameter '{kept._param_fqn}' was replaced after attach, and its gradient "
                        "would stay on this replica; load weights before attach, or without assign=True"
                    )

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self.owner = None


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module: torch before 2.12 has one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
