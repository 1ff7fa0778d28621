"""Lengthen steps that an optimizer makes as long as its rate says, however large gradients are.

Ranks' steps differ by the noise of their gradients, which shortens the average: of P steps that are
nothing but noise to 1 / sqrt(P) of their length.  Dense training, whose optimizer sees averaged
gradients, makes steps of the full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["lengthen", "of_own_length", "remember"]

# Those that were measured (``benchmarks/optimizers.py``), by the name of their class or one that they
# derive from; and whether weights decay by themselves, not through the gradient, unless groups tell.
_OWN_LENGTH: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "Adadelta": False,
        "Adafactor": True,
        "Adagrad": False,
        "Adam": False,  # with amsgrad; without, ``moments.correct`` knows more
        "Adamax": False,
        "AdamW": True,
        "Muon": True,
        "NAdam": False,
        "RAdam": False,
        "RMSprop": False,
        # of the package pytorch-optimizer, and others of these names
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
    """Yield parameters whose steps ``lengthen`` knows, their group, and whether decay is apart."""
    names = [base.__name__ for base in type(optimizer).__mro__]
    name = next((name for name in names if name in _OWN_LENGTH), None)
    for group in optimizer.param_groups if name is not None else ():
        if name in ("Adam", "AdamW") and not group.get("amsgrad"):
            continue
        told = map(group.get, ("decoupled_weight_decay", "weight_decouple", "decouple"))
        apart = next((bool(one) for one in told if one is not None), _OWN_LENGTH[name or ""])
        for parameter in group["params"]:
            yield parameter, group, apart


@torch.no_grad()
def remember(optimizer: torch.optim.Optimizer, steps: Mapping[Tensor, Tensor]) -> None:
    """Keep the weights before a step in the memory for the step."""
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
    """Make the step just done so long that the average over ranks has the length of a single rank's.

    Averaged over P ``ranks``, steps of a parameter have k times the squares of a single rank's (its
    share, see ``GradientNoise``):

        w += step (1 / sqrt(k) - 1),    1 / P <= k <= 1

    where the step is without the decay of weights.  It is left in ``steps``, which ``remember`` has
    filled.  What the optimizer remembers stays as it is.

    Cost: ``remember`` reads the weights and writes as much; this reads both and writes both.  Memory:
    that of the weights.
    """
    for parameter, group, decays in of_own_length(optimizer):
        if parameter not in steps:
            continue
        weights, step = local_of(parameter), steps[parameter]
        torch.sub(weights, step, out=step)
        # transformers' Adafactor may choose its rate itself: then the decay is unknown
        rates = [float(group.get(key) or 0.0) for key in ("lr", "weight_decay")]
        if decays and (decay := rates[0] * rates[1]):  # after w' = w - decay w + step
            step.mul_(1 - decay).add_(weights, alpha=decay)
        share = max(shares.get(parameter, 1.0), 1 / ranks)
        if share < 1:
            weights.add_(step, alpha=share**-0.5 - 1)
