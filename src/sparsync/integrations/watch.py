"""What a model without DDP does behind the hooks' back: it changes, it is copied, averages stay in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.checks import check_same_parameters
from sparsync.integrations.fsdp import Gate
from sparsync.integrations.placement import local_of

__all__ = ["ModuleHook", "Watch"]


@final
class ModuleHook:
    """A hook of a module, whose copies do nothing: copied or loaded models are not attached."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Call."""
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return ModuleHook, ()


@final
class Watch:
    """Looks at every forward pass of a model.

    Args:
        model: any model; of a list of modules each is watched, since the list itself is never called.
        gate: knows the parameters of FSDP2.
        exchanged: the parameters whose gradients are exchanged.
        correction: done to them before: with momentum or decay, a gradient must not come twice.

    Attributes:
        owner: what the model is to keep alive.
        left: averages lie in the gradients, and no backward pass has begun since.
    """

    def __init__(
        self, model: nn.Module, gate: Gate, exchanged: Iterable[Tensor], correction: Correction
    ) -> None:
        self._gate, self._exchanged = gate, set(exchanged)
        self.owner: Any = None
        self.left = False
        several = isinstance(model, nn.ModuleList | nn.ModuleDict)
        modules = list(model.children()) if several else [model]
        before, after = ModuleHook(self._before_forward), ModuleHook(self._after_forward)
        self._handles = [module.register_forward_pre_hook(before) for module in modules]
        if correction.momentum or correction.weight_decay:
            self._handles += [module.register_forward_hook(after) for module in modules]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Refuse parameters that came after attach, whose gradients would stay on this replica.

        Raises:
            ConfigurationError: names the first of them.
        """
        of_fsdp = self._gate.check_same(self._exchanged)
        check_same_parameters(model, self._exchanged, of_fsdp)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Look again when a backward pass begins: gradients of outputs come before any other."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_gradients)  # type: ignore[no-untyped-call]

    def _before_gradients(self, gradient: Tensor) -> None:
        """Refuse to add to averages that the correction has made.

        Raises:
            ConfigurationError: gradients were not zeroed since the last exchange.
        """
        left, self.left = self.left, False
        if left and any(
            p.grad is not None and bool(local_of(p.grad).any()) for p in self._exchanged
        ):
            raise ConfigurationError(
                "the averages of the last exchange are still in the gradients, and the correction would "
                "count them in momentum or decay once more; call zero_grad() after every step, and do "
                "all but the last backward pass of a step within no_sync()"
            )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self.owner = None
