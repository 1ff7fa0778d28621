"""Correct Adam's moments on one rank of several: the first for its drift, the second for its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.kernels import backend_of, native
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
        unbiased, factors = _factors(state, group, ranks)
        given = (*factors, -unbiased / rate, ranks > 1)
        _passed(state, ahead, given, native.follow_, _follow)


@torch.no_grad()
def correct(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Make the step just done that of the second moments of the average's gradients.

    The noise of gradients is averaged away over P ``ranks``, so ``v' = m'^2 + (v - m'^2) / P``, where a
    rank's own ``v`` makes steps up to sqrt(P) times shorter; ``w -= lr m' (1 / d(v') - 1 / d(v))``.
    """
    for parameter, state, group in with_moments(optimizer):
        if parameter.grad is not None:  # else it was not stepped
            unbiased, factors = _factors(state, group, ranks)
            given = (*factors, -float(group["lr"]) / unbiased, ranks > 1)
            _passed(state, local_of(parameter), given, native.correct_, _correct)


def _factors(
    state: Mapping[str, Any], group: Mapping[str, Any], ranks: int
) -> tuple[float, tuple[float, float, float, float]]:
    """Return 1 - b1^t; and of d = sqrt(v') + eps the factors of v and m^2, that of v alone, and eps."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    unbiased, noise, own = 1 - beta1**step, 1 / ranks, 1 - beta2**step
    return unbiased, (noise / own, (1 - noise) / unbiased**2, 1 / own, float(group["eps"]))


def _passed(
    state: Mapping[str, Any],
    other: Tensor,
    given: native.Moments,
    compiled: Callable[[Tensor, Tensor, Tensor, native.Moments], None],
    plain: Callable[[Tensor, Tensor, Tensor, native.Moments], None],
) -> None:
    """Pass over both moments and another tensor, in C++ or in runs."""
    tensors = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"]), other
    dense = all(tensor.is_contiguous() for tensor in tensors)
    if dense and backend_of(*tensors) is native:
        compiled(*tensors, given)
    elif dense and other.is_cpu:  # fresh memory costs more than the work
        runs = (torch.split(tensor.view(-1), _RUN) for tensor in tensors)
        for mean, square, run in zip(*runs, strict=True):
            plain(mean, square, run, given)
    else:
        plain(*tensors, given)


# ---- the specification, which ``native/moments_body.h`` follows: without fused multiply-adds ----------


def _root(mean: Tensor, square: Tensor, given: native.Moments) -> Tensor:
    """Return d = sqrt(v') + eps with v' = m'^2 + (v - m'^2) / ranks, bias removed."""
    square = square.mul(given[0])
    if given[-1]:
        square.add_(mean.mul(given[1]).mul_(mean))
    return _sqrt(square).add_(given[3])


def _sqrt(x: Tensor) -> Tensor:
    """Return square roots that are rounded correctly: torch's of float32 on a CPU are not."""
    return x.double().sqrt_().to(x.dtype) if x.is_cpu else x.sqrt_()


def _follow(mean: Tensor, square: Tensor, ahead: Tensor, given: native.Moments) -> None:
    mean.add_(_root(mean, square, given).mul_(given[4]).mul_(ahead.to(mean.dtype)))


def _correct(mean: Tensor, square: Tensor, weights: Tensor, given: native.Moments) -> None:
    own = _sqrt(square.mul(given[2])).add_(given[3])
    missing = _root(mean, square, given).reciprocal_().sub_(own.reciprocal_())
    weights.add_(missing.mul_(mean.mul(given[4])))
