"""Refuse what DDP's hook would not see, or cannot have: changes of the model, ``join()``, odd passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from sparsync.errors import ConfigurationError
from sparsync.feedback.correction import Correction
from sparsync.units import check_same_parameters

__all__ = ["DdpGuard", "averages_left", "check_join", "deliver_to_unused_"]


@final
class DdpGuard:
    """Refuses changes of the model, and backward passes, of which DDP's hook does not learn.

    DDP knows the parameters that it was built with, and exchanges once per forward pass.  Anything
    else would stay on its rank, and replicas would drift apart without a word.

    Args:
        model: the DDP model.
        trained: the parameters whose gradients are exchanged.
        correction: with momentum or decay, averages must not be added to.

    Cost: one look at every parameter per forward pass, one call per gradient.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        trained: Mapping[str, Tensor],
        correction: Correction | None,
    ) -> None:
        self._model, self._trained = weakref.ref(model), dict(trained)
        self._ignored = {
            p for n, p in model.module.named_parameters() if n in model.parameters_to_ignore
        }
        self._exchanged = False  # and no forward pass since
        self._begun = 0  # backward passes that were exchanged
        self._left = False  # averages lie in the gradients, and no gradient has been added since
        me = weakref.ref(self)  # a parameter may outlive its model
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for name, parameter in trained.items():
            hook = _after_gradient(me, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if trained and correction and (correction.momentum or correction.weight_decay):
            # the largest: of any density's entries it has some
            largest = max(trained.values(), key=Tensor.numel)
            hook = _before_gradient(me, largest)
            self._handles.append(largest.register_hook(hook))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a DDP model with sparsync attached cannot be copied or pickled: its threads and its "
            "residuals belong to this rank; copy or save model.module, and attach to the copy's own DDP"
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def exchanging(self) -> None:
        """Note that this backward pass is exchanged; DDP may say so before its first gradient."""
        self._exchanged = False
        self._begun += 1

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
                "DDP would wait for its gradient; wrap and attach again, or build DDP with "
                "find_unused_parameters=True"
            )

    def check_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Refuse a gradient with a graph, or one of a backward pass that is not exchanged.

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
            self._exchanged, begun = False, self._begun  # look once per backward pass, at its end
            Variable._execution_engine.queue_callback(lambda: self._check_exchange(name, begun))

    def _check_exchange(self, name: str, begun: int) -> None:
        if self._begun == begun:
            self._exchanged = True
            raise ConfigurationError(
                f"a second backward pass added to the gradient of '{name}' after its exchange, without a "
                "forward pass of the DDP model: it would stay on this rank. Add the losses, or do all "
                "but the last forward and backward pass within no_sync(); with several optimizers under "
                "Lightning give Trainer(strategy='ddp_find_unused_parameters_true')"
            )

    def check_left(self, parameter: Tensor) -> None:
        """Refuse to add to an average that the correction has made.

        Raises:
            ConfigurationError: gradients were not zeroed since the last exchange.
        """
        left, self._left = self._left, False
        if left and parameter.grad is not None and bool(parameter.grad.any()):
            raise averages_left()


def averages_left() -> ConfigurationError:
    """Return the error for gradients that were not zeroed since the last exchange."""
    return ConfigurationError(
        "the averages of the last exchange are still in the gradients, and the correction would "
        "count them in momentum or decay once more; call zero_grad() after every step, and do "
        "all but the last backward pass of a step within no_sync()"
    )


def _before_gradient(guard: weakref.ref[DdpGuard], parameter: Tensor) -> Callable[[Tensor], None]:
    at = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(gradient: Tensor) -> None:
        here, into = guard(), at()
        if here is not None and into is not None:
            here.check_left(into)

    return hook  # type: ignore[no-any-return]


def _after_gradient(guard: weakref.ref[DdpGuard], name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        here = guard()
        if here is not None:
            here.check_gradient(name, parameter.grad)

    return hook


def check_join(model: DistributedDataParallel, correction: Correction | None) -> None:
    """Refuse what DDP's ``join()`` cannot have: the same on all ranks, whoever is done.

    Raises:
        ConfigurationError: averages over the ranks that go on, or decay of weights that are old.
    """
    if not model._divide_by_initial_world_size:
        raise ConfigurationError(
            "join(divide_by_initial_world_size=False) divides by the ranks that are not done, but a "
            "rank that is done goes on delivering its residual; leave it at True"
        )
    if correction and correction.weight_decay:
        raise ConfigurationError(
            "the correction decays by this rank's weights, which under join() are old once it is done; "
            "give weight_decay to the optimizer"
        )


def deliver_to_unused_(averages: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give parameters that no rank used the residual mass that was delivered to them.

    DDP leaves their gradients alone (``find_unused_parameters``, ``static_graph``); dropped, that mass
    would be lost to the model.

    Args:
        averages: parameters, and what was exchanged for each.
    """
    for parameter, average in averages:
        average = average.view(parameter.shape)
        if parameter.grad is None and bool(average.any()):
            parameter.grad = average.clone()
        elif parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.copy_(average)  # DDP wants it used
