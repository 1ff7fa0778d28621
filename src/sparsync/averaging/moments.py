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
    """Yield the parameters that have both moments of Adam, without ``amsgrad``; their state and group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if {"exp_avg", "exp_avg_sq", "step"} <= state.keys() and not group.get("amsgrad"):
                yield parameter, state, group


def _moments(
    state: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[Tensor, Tensor, float, float]:
    """Return both moments, and by what they are divided for their bias."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    mean, square = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
    return mean, square, 1 - beta1**step, 1 - beta2**step


@torch.no_grad()
def follow(state: Mapping[str, Any], group: Mapping[str, Any], ahead: Tensor, steps: int) -> None:
    """Move a first moment by what makes this rank's last ``steps`` steps the average's.

    A step is ``-lr m' / d`` with ``m' = m / (1 - b1^t)``.  Their sum was ``ahead`` of the average's, in
    the parameter's shape and against the weights, so ``m -= (1 - b1^t) d ahead / (lr steps)``.
    """
    rate = float(group["lr"]) * steps
    if rate:
        mean, square, unbiased1, unbiased2 = _moments(state, group)
        root = square.div(unbiased2).sqrt_().add_(group["eps"])
        mean.addcmul_(root, ahead.to(root.dtype), value=-unbiased1 / rate)


@torch.no_grad()
def correct(
    parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], ranks: int
) -> None:
    """Make the step just done that of the second moment of the average's gradients.

    The noise of gradients is averaged away over P ``ranks``, so ``v' = m'^2 + (v - m'^2) / P``, where a
    rank's own ``v`` makes steps up to sqrt(P) times shorter; ``w -= lr m' (1 / d(v') - 1 / d(v))``.
    """
    mean, square, unbiased1, unbiased2 = _moments(state, group)
    noise = 1 / ranks
    own = square.div(unbiased2)
    averaged = own.mul(noise).addcmul_(mean, mean, value=(1 - noise) / unbiased1**2)
    averaged.sqrt_().add_(group["eps"]).reciprocal_()
    averaged.sub_(own.sqrt_().add_(group["eps"]).reciprocal_())
    local_of(parameter).addcmul_(
        mean.to(parameter.dtype),
        averaged.to(parameter.dtype),
        value=-float(group["lr"]) / unbiased1,
    )
