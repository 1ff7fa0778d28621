"""Adam's moments on one rank of several: the first follows the average, the second is too noisy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["correct", "follow", "with_moments"]


def with_moments(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield what Adam or AdamW has stepped, without ``amsgrad``: parameters, their state and group."""
    adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for group in optimizer.param_groups if adam else ():
        for parameter in group["params"] if not group["amsgrad"] else ():
            if state := optimizer.state.get(parameter):
                yield parameter, state, group


def _divided(
    state: Mapping[str, Any], group: Mapping[str, Any], ranks: int
) -> tuple[Tensor, float, Tensor]:
    """Return m, 1 - b1^t, and d = sqrt(v') + eps with v' = m'^2 + (v - m'^2) / ranks, bias removed."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    unbiased, noise, mean = 1 - beta1**step, 1 / ranks, local_of(state["exp_avg"])
    square = local_of(state["exp_avg_sq"]).mul(noise / (1 - beta2**step))
    if ranks > 1:
        square.addcmul_(mean, mean, value=(1 - noise) / unbiased**2)
    return mean, unbiased, square.sqrt_().add_(group["eps"])


@torch.no_grad()
def follow(
    state: Mapping[str, Any], group: Mapping[str, Any], ahead: Tensor, steps: int, ranks: int = 1
) -> None:
    """Move a first moment by what makes this rank's last ``steps`` steps the average's.

    A step is ``-lr m' / d`` with ``m' = m / (1 - b1^t)``.  Their sum was ``ahead`` of the average's, in
    the parameter's shape and against the weights, so ``m -= (1 - b1^t) d ahead / (lr steps)``.  With
    ``ranks`` these steps were ``correct``ed.
    """
    if rate := float(group["lr"]) * steps:
        mean, unbiased, root = _divided(state, group, ranks)
        mean.addcmul_(root, ahead.to(root.dtype), value=-unbiased / rate)


@torch.no_grad()
def correct(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Make the step just done that of the second moments of the average's gradients.

    The noise of gradients is averaged away over P ``ranks``, so ``v' = m'^2 + (v - m'^2) / P``, where a
    rank's own ``v`` makes steps up to sqrt(P) times shorter; ``w -= lr m' (1 / d(v') - 1 / d(v))``.
    """
    for parameter, state, group in with_moments(optimizer):
        if parameter.grad is not None:  # else it was not stepped
            mean, unbiased, root = _divided(state, group, ranks)
            missing = root.reciprocal_().sub_(_divided(state, group, 1)[2].reciprocal_())
            local_of(parameter).addcmul_(mean, missing, value=-float(group["lr"]) / unbiased)
