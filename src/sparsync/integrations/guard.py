"""What a DDP model does behind the hook's back: it changes, or it goes backward once too often.

DDP knows the parameters that it was built with, and exchanges once per forward pass.  What lies outside
of that stays on its rank, without a word: replicas drift apart.  Here it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.checks import check_same_parameters

__all__ = ["Guard"]


@final
class Guard:
    """Watches the forward passes of a DDP model and what is added to its gradients.

    Args:
        model: the DDP model.
        trained: the parameters whose gradients are exchanged.
        correction: done to them before: with momentum or decay, a gradient must not come twice.

    Cost: one look at every parameter per forward pass, one call per gradient.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        trained: Mapping[str, Tensor],
        correction: Correction,
    ) -> None:
        self._model, self._trained = weakref.ref(model), dict(trained)
        self._ignored = {
            p for n, p in model.module.named_parameters() if n in model.parameters_to_ignore
        }
        self._exchanged = False  # and no forward pass since
        self._left = False  # averages lie in the gradients, and none has come since
        model.register_forward_pre_hook(self._before_forward)
        me = weakref.ref(self)  # a parameter may outlive its model
        for name, parameter in trained.items():
            hook = _after_gradient(me, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if trained and (correction.momentum or correction.weight_decay):
            # the largest: of any density's entries it has some
            largest = max(trained.values(), key=Tensor.numel)
            largest.register_hook(_before_gradient(me, largest))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a DDP model with sparsync attached cannot be copied or pickled: its threads and its "
            "residuals belong to this rank; copy or save model.module, and attach to the copy's own DDP"
        )

    def exchanged(self) -> None:
        """Note that the gradients of the last forward pass are averages now."""
        self._exchanged = self._left = True

    def _before_forward(self, model: Any, inputs: Any) -> None:
        """Refuse a model that is no longer the one that was attached: by name of a parameter."""
        if not torch.is_grad_enabled():
            return
        self._exchanged = False
        check_same_parameters(model.module, self._trained.values(), self._ignored)
        if model.find_unused_parameters:
            return  # what is frozen or gone counts as unused
        present = {p for p in model.module.parameters() if p.requires_grad}
        gone = [name for name, parameter in self._trained.items() if parameter not in present]
        if gone and len(gone) < len(self._trained):  # all: no gradients, and DDP does not wait
            raise ConfigurationError(
                f"'{gone[0]}' was frozen or removed after attach ({len(gone)} parameters in all), and "
                "DDP would wait for its gradient; wrap and attach anew, or build DDP with "
                "find_unused_parameters=True"
            )

    def check_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Refuse a gradient with a graph, or one that comes when the exchange of its step is over.

        Raises:
            ConfigurationError: either; the second not within ``no_sync()``.
        """
        if gradient is not None and gradient.requires_grad:
            raise ConfigurationError(
                f"backward(create_graph=True): the gradient of '{name}' has a graph, which does not go "
                "through the exchange; take gradients for higher orders with torch.autograd.grad"
            )
        model = self._model()
        if self._exchanged and model is not None and model.require_backward_grad_sync:
            raise ConfigurationError(
                f"a second backward pass added to the gradient of '{name}' after its exchange, without a "
                "forward pass of the DDP model: it would stay on this rank. Add the losses, or do all "
                "but the last forward and backward pass within no_sync()"
            )

    def check_left(self, parameter: Tensor) -> None:
        """Refuse to add to an average that the correction has made.

        Raises:
            ConfigurationError: gradients were not zeroed since the last exchange.
        """
        left, self._left = self._left, False
        if left and parameter.grad is not None and bool(parameter.grad.any()):
            raise ConfigurationError(
                "the averages of the last exchange are still in the gradients, and the correction would "
                "count them in momentum or decay once more; call zero_grad() after every step, and do "
                "all but the last backward pass of a step within no_sync()"
            )


def _before_gradient(guard: weakref.ref[Guard], parameter: Tensor) -> Callable[[Tensor], None]:
    at = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(gradient: Tensor) -> None:
        here, into = guard(), at()
        if here is not None and into is not None:
            here.check_left(into)

    return hook  # type: ignore[no-any-return]


def _after_gradient(guard: weakref.ref[Guard], name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        here = guard()
        if here is not None:
            here.check_gradient(name, parameter.grad)

    return hook
