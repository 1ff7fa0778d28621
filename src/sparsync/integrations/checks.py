"""What ``attach`` refuses, in one line each: models that it cannot take, momentum applied twice."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.integrations.adam import ArrivalAdamW

__all__ = [
    "check_model",
    "check_optimizer",
    "check_output_layer",
    "check_same_parameters",
    "output_parameters",
]

# and whatever has betas, as Adam; by name: older versions of torch have no Adafactor
_ADAPTIVE = ("Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop")


def check_model(model: Any) -> None:
    """Refuse what is not DDP, has a hook, or exchanges without one.

    Raises:
        ConfigurationError: any of it.
    """
    if not isinstance(model, DistributedDataParallel):
        first = "" if dist.is_initialized() else "torch.distributed.init_process_group(), and "
        raise ConfigurationError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}; "
            f"wrap it first: {first}torch.nn.parallel.DistributedDataParallel(model)"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigurationError(
            "this model was wrapped under torch._dynamo.config.optimize_ddp = 'python_reducer', which "
            "hands gradients over one by one; leave optimize_ddp at its default and wrap again"
        )
    if getattr(model, "_comm_hooks", None):
        raise ConfigurationError(
            "this model already has a communication hook; attach once, to a freshly wrapped model "
            "(a hook cannot be removed from DDP)"
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer | None, correction: Correction, *, sparse: bool = False
) -> None:
    """Refuse an optimizer that does again what the correction has done; warn of what loses.

    Args:
        optimizer: the one that will be used; None: unknown.
        correction: of local gradients.
        sparse: entries of gradients are exchanged, not all of them.

    Raises:
        ConfigurationError: says what to change.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> try: check_optimizer(sgd, Correction(momentum=0.9))
        ... except ConfigurationError as error: str(error).split(";")[1]
        ' build the optimizer with momentum=0'
    """
    if optimizer is None:
        return
    name = type(optimizer).__name__
    kinds = {base.__name__ for base in type(optimizer).__mro__}
    adaptive = not kinds.isdisjoint(_ADAPTIVE) or "betas" in optimizer.defaults
    if adaptive and sparse and not isinstance(optimizer, ArrivalAdamW):
        warnings.warn(
            f"{name} divides by its second moment, which entries that arrive rarely break: expect 20 "
            "to 28 % more loss at 1 %. sparsync.LocalUpdates keeps up with dense training; see "
            "docs/optimizers.md",
            stacklevel=4,  # the caller of attach
        )
    if correction.momentum and adaptive:
        raise ConfigurationError(
            f"momentum correction goes with SGD, but the optimizer is {name}, which divides by "
            "moments of its own; leave the correction away, or use sparsync.LocalUpdates"
        )
    for group in optimizer.param_groups:
        for what in ("momentum", "weight_decay"):
            if getattr(correction, what) and group.get(what):
                raise ConfigurationError(
                    f"{name} has {what} {group[what]}, which the correction does before the "
                    f"exchange ({what}={getattr(correction, what)}): it would be applied twice; "
                    f"build the optimizer with {what}=0"
                )


def check_same_parameters(
    model: nn.Module, exchanged: Iterable[Tensor], ignored: Collection[Tensor] = ()
) -> None:
    """Refuse a model that trains what is not exchanged: thawed, added or replaced since.

    Args:
        model: the plain module, as it is now.
        exchanged: the parameters that were agreed on.
        ignored: others that may train alone.

    Raises:
        ConfigurationError: names the first such parameter.

    Example:
        >>> model = nn.Linear(2, 1); exchanged = list(model.parameters())
        >>> model.bias = nn.Parameter(torch.zeros(1))
        >>> try: check_same_parameters(model, exchanged)
        ... except ConfigurationError as error: str(error).split(";")[0]
        "'bias' trains now but was frozen or not there when the exchange was set up"
    """
    known = {*exchanged, *ignored}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise ConfigurationError(
                f"'{name}' trains now but was frozen or not there when the exchange was set up; ranks "
                "would drift apart in it: set up anew (for DDP: wrap again, then attach)"
            )


def output_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of the module that was registered last: the output layer.

    Example:
        >>> output_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        ['2.weight', '2.bias']
    """
    everywhere = list(model.named_parameters(remove_duplicate=False))  # a tied weight: everywhere
    last = everywhere[-1][0].rpartition(".")[0] if everywhere else ""
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    return [names[id(p)] for name, p in everywhere if name.rpartition(".")[0] == last]


def check_output_layer(given: Collection[str] | None, model: nn.Module) -> Collection[str]:
    """Return the names of the output layer's parameters: those given, or of the last module.

    Raises:
        ConfigurationError: not names of parameters.
    """
    if given is None:
        return output_parameters(model)
    known = [name for name, _ in model.named_parameters()]
    unknown = [given] if isinstance(given, str) else [name for name in given if name not in known]
    if unknown:
        raise ConfigurationError(
            f"output_layer has {unknown[0]!r}, which is no name of a parameter; give a list of names, "
            f"as {output_parameters(model)}"
        )
    return given
