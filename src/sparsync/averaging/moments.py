"""Adam's moments on one rank of several: the first follows the average, the second is too noisy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["correct", "follow", "with_moments"]


_RUN: Final = 1 << 18  # elements: a few runs stay in a cache, and memory for them is reused


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


def _runs(state: Mapping[str, Any], other: Tensor) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    """Yield a state and another tensor in runs: on the CPU, fresh memory costs more than the work."""
    moments = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
    tensors = (*moments, other)
    if all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        flat = (torch.split(tensor.view(-1), _RUN) for tensor in tensors)
    else:
        flat = ((tensor,) for tensor in tensors)
    for mean, square, run in zip(*flat, strict=True):
        yield {"exp_avg": mean, "exp_avg_sq": square, "step": state["step"]}, run


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
        for run, moved in _runs(state, ahead):
            mean, unbiased, root = _divided(run, group, ranks)
            mean.addcmul_(root, moved.to(root.dtype), value=-unbiased / rate)


@torch.no_grad()
def correct(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Make the step just done that of the second moments of the average's gradients.

    The noise of gradients is averaged away over P ``ranks``, so ``v' = m'^2 + (v - m'^2) / P``, where a
    rank's own ``v`` makes steps up to sqrt(P) times shorter; ``w -= lr m' (1 / d(v') - 1 / d(v))``.
    """
    for parameter, state, group in with_moments(optimizer):
        if parameter.grad is not None:  # else it was not stepped
            for run, weights in _runs(state, local_of(parameter)):
                mean, unbiased, root = _divided(run, group, ranks)
                missing = root.reciprocal_().sub_(_divided(run, group, 1)[2].reciprocal_())
                weights.addcmul_(mean, missing, value=-float(group["lr"]) / unbiased)
