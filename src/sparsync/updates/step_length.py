"""Lengthen the steps of optimizers whose step length depends on the rate, not on the gradients' size.

Steps of different ranks differ by the noise of their gradients, so their average is shorter: P steps of
pure noise average to 1 / sqrt(P) of their length.  Dense training makes steps of full length, because
its optimizer sees averaged gradients.  (Adam and AdamW without ``amsgrad`` are lengthened by
``gradient_noise.correct`` instead, which makes use of their second moments.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["floats", "lengthen", "of_own_length", "remember"]

# The measured optimizers (``benchmarks/optimizers.py``), by the name of their class or of a base class.
# The value is whether weight decay is decoupled from the gradient, unless a group says otherwise.  A
# list of names is needed because steps proportional to the gradient (SGD) must not be lengthened, and
# nothing reveals which kind of steps an unknown optimizer makes.
_OWN_LENGTH: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "Adadelta": False,
        "Adafactor": True,
        "Adagrad": False,
        "Adam": False,  # only with amsgrad; otherwise ``correct`` needs no copy of the weights
        "Adamax": False,
        "AdamW": True,
        "Muon": True,
        "NAdam": False,
        "RAdam": False,
        "RMSprop": False,
        # classes of the package pytorch-optimizer; other packages' classes of these names also match
        "AdEMAMix": True,
        "ADOPT": False,
        "Lamb": False,
        "Lion": True,
        "SOAP": True,
        # Muon's original code (KellerJordan/Muon), whose other classes are called Muon, or refused
        "SingleDeviceMuon": True,
        "SingleDeviceMuonWithAuxAdam": True,
    }
)


def of_own_length(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, Mapping[str, Any], bool]]:
    """Yield each parameter that ``lengthen`` handles, its group, and whether its decay is decoupled."""
    # the most derived class with a known name counts, because AdamW derives from Adam (torch 2.13)
    names = [base.__name__ for base in type(optimizer).__mro__]
    name = next((name for name in names if name in _OWN_LENGTH), None)
    for group in optimizer.param_groups if name is not None else ():
        if name in ("Adam", "AdamW") and not group.get("amsgrad"):
            continue
        # this setting has different names in torch, pytorch-optimizer and other packages
        told = map(group.get, ("decoupled_weight_decay", "weight_decouple", "decouple"))
        apart = next((bool(one) for one in told if one is not None), _OWN_LENGTH[name or ""])
        for parameter in group["params"]:
            yield parameter, group, apart


def _decay_of(group: Mapping[str, Any]) -> Any:
    """Return the weight decay of a group; Moonlight's Muon calls it "wd"."""
    return group.get("weight_decay", group.get("wd"))


def floats(numbers: Iterable[Any]) -> list[float]:
    """Return numbers and one-element tensors as floats; None becomes 0.

    Tensors on a device are stacked and copied together, so the host waits for the device only once.
    """
    every = [0.0 if one is None else one for one in numbers]
    there = [one.reshape(()) for one in every if isinstance(one, Tensor) and not one.is_cpu]
    told = iter(torch.stack(there).tolist() if there else ())
    return [
        next(told) if isinstance(one, Tensor) and not one.is_cpu else float(one) for one in every
    ]


@torch.no_grad()
def remember(optimizer: torch.optim.Optimizer, steps: Mapping[Tensor, Tensor]) -> None:
    """Copy the weights before a step into ``steps``, for ``lengthen`` to compute the step from."""
    for parameter, _, _ in of_own_length(optimizer):
        if parameter in steps:
            steps[parameter].copy_(local_of(parameter))


@torch.no_grad()
def lengthen(
    optimizer: torch.optim.Optimizer,
    steps: Mapping[Tensor, Tensor],
    shares: Mapping[Tensor, Any],  # floats; only Adam's token matrices have a share per row
    ranks: float,
) -> None:
    """Lengthen the last step, so that the average over ranks is as long as a single rank's step.

    Over P ``ranks``, the average step of a parameter has k times the squared length of a single rank's
    step.  k is the parameter's share (``GradientNoise``).  So this function adds:

        w += step (1 / sqrt(k) - 1),    1 / P <= k <= 1

    where the step excludes weight decay.  Before the step, ``remember`` must have filled ``steps`` with
    the weights; this function overwrites them with the step.  The optimizer's state is not changed.

    Cost: ``remember`` reads the weights and writes a copy; this function reads and writes both.  Memory:
    a copy of the weights.
    """
    every = [(p, group, decays) for p, group, decays in of_own_length(optimizer) if p in steps]
    groups = list({id(group): group for _, group, _ in every}.values())
    # transformers' Adafactor may choose its own rate (lr=None); the decay is then unknown
    told = floats(value for g in groups for value in (g.get("lr"), _decay_of(g)))
    decay_of = {id(g): lr * own for g, lr, own in zip(groups, told[::2], told[1::2], strict=True)}
    for parameter, group, decays in every:
        weights, step = local_of(parameter), steps[parameter]
        rests = torch.eq(weights, step).all() if parameter.grad is None else None
        torch.sub(weights, step, out=step)
        # w' = (1 - decay) w + step, but only w' and w' - w are known:
        # step = (1 - decay) (w' - w) + decay w'
        if decays and (decay := decay_of[id(group)]):
            step.mul_(1 - decay).add_(weights, alpha=decay)
            # A parameter without a gradient is usually not decayed either; its step is then 0, not
            # decay w'.  The mask stays on the device, so the host need not wait to know the case.
            if rests is not None:
                step.masked_fill_(rests, 0.0)
        # even pure noise has a share of 1 / P on average, so lower measurements are due to chance
        share = max(shares.get(parameter, 1.0), 1 / ranks)
        if share < 1:
            weights.add_(step, alpha=share**-0.5 - 1)
