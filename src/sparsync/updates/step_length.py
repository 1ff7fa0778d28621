"""Lengthen the steps of optimizers whose length depends on the rate, not on the size of gradients.

Ranks' steps differ by the noise of their gradients, which shortens the average: that of P steps of pure
noise has 1 / sqrt(P) of their length.  Dense training, whose optimizer sees averaged gradients, makes
steps of the full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["lengthen", "of_own_length", "remember"]

# The optimizers that were measured (``benchmarks/optimizers.py``), by the name of their class or of a
# base class; and whether their weight decay is decoupled from the gradient, unless groups say so.  By
# name, for a step proportional to gradients (SGD's) must not be lengthened, and no formula tells which
# kind an unknown optimizer is.
_OWN_LENGTH: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "Adadelta": False,
        "Adafactor": True,
        "Adagrad": False,
        "Adam": False,  # with amsgrad; without, ``moments.correct`` does it without a copy of weights
        "Adamax": False,
        "AdamW": True,
        "Muon": True,
        "NAdam": False,
        "RAdam": False,
        "RMSprop": False,
        # from the package pytorch-optimizer, and any others with these names
        "AdEMAMix": True,
        "ADOPT": False,
        "Lamb": False,
        "Lion": True,
        "SOAP": True,
    }
)


def of_own_length(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, Mapping[str, Any], bool]]:
    """Yield the parameters whose steps ``lengthen`` knows, their group, and if decay is decoupled."""
    # the most derived class with a known name: AdamW derives from Adam (torch 2.13)
    names = [base.__name__ for base in type(optimizer).__mro__]
    name = next((name for name in names if name in _OWN_LENGTH), None)
    for group in optimizer.param_groups if name is not None else ():
        if name in ("Adam", "AdamW") and not group.get("amsgrad"):
            continue
        # the names of this setting in torch, pytorch-optimizer and others
        told = map(group.get, ("decoupled_weight_decay", "weight_decouple", "decouple"))
        apart = next((bool(one) for one in told if one is not None), _OWN_LENGTH[name or ""])
        for parameter in group["params"]:
            yield parameter, group, apart


@torch.no_grad()
def remember(optimizer: torch.optim.Optimizer, steps: Mapping[Tensor, Tensor]) -> None:
    """Copy the weights before a step into ``steps``, where ``lengthen`` turns them into the step."""
    for parameter, _, _ in of_own_length(optimizer):
        if parameter in steps:
            steps[parameter].copy_(local_of(parameter))


@torch.no_grad()
def lengthen(
    optimizer: torch.optim.Optimizer,
    steps: Mapping[Tensor, Tensor],
    shares: Mapping[Tensor, float],
    ranks: float,
) -> None:
    """Lengthen the last step so that the average over ranks is as long as a single rank's step.

    Averaged over P ``ranks``, steps of a parameter have k times the squares of a single rank's (its
    share, see ``GradientNoise``):

        w += step (1 / sqrt(k) - 1),    1 / P <= k <= 1

    where the step excludes weight decay.  The step is left in ``steps``, which ``remember`` has filled.
    The optimizer's state stays as it is.

    Cost: ``remember`` reads the weights and writes as much; this reads both and writes both.  Memory:
    a copy of the weights.
    """
    for parameter, group, decays in of_own_length(optimizer):
        if parameter not in steps:
            continue
        weights, step = local_of(parameter), steps[parameter]
        torch.sub(weights, step, out=step)
        # transformers' Adafactor may choose its rate itself (lr=None): then the decay is unknown
        rates = [float(group.get(key) or 0.0) for key in ("lr", "weight_decay")]
        # w' = (1 - decay) w + step, and only w' and w' - w are at hand:
        # step = (1 - decay) (w' - w) + decay w'
        if decays and (decay := rates[0] * rates[1]):
            step.mul_(1 - decay).add_(weights, alpha=decay)
        # a share is measured and may fall below 1 / P by chance; no average is shorter than that of noise
        share = max(shares.get(parameter, 1.0), 1 / ranks)
        if share < 1:
            weights.add_(step, alpha=share**-0.5 - 1)
