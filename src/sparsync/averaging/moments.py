"""Correct Adam's moments on one rank of several: the first for its drift, the second for its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.kernels import backend_of, native
from sparsync.units import flatten, local_of, unflatten

__all__ = ["correct", "drop_broken", "follow", "with_moments"]


_RUN: Final = 1 << 18  # elements: a few runs stay in a cache, and memory for them is reused
_SMALL: Final = 1 << 13  # elements: to join this many takes no longer than Python for one tensor
_JOINED: Final = 64  # small ones at a time

# a parameter's state, another tensor of its shape, and the factors of the pass over both
_Job = tuple[Mapping[str, Any], Tensor, native.Moments]
_Pass = Callable[[Tensor, Tensor, Tensor, native.Moments], None]


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
    stepped: Iterable[tuple[Mapping[str, Any], Mapping[str, Any], Tensor]],
    steps: int,
    ranks: int = 1,
) -> None:
    """Move first moments by what makes this rank's last ``steps`` steps the average's.

    ``stepped`` are states, groups, and by how much the sum of these steps was ahead of the average's, in
    the parameter's shape and against the weights.  A step is ``-lr m' / d`` with ``m' = m / (1 - b1^t)``,
    so ``m -= (1 - b1^t) d ahead / (lr steps)``.  With ``ranks`` these steps were ``correct``ed.
    """
    jobs: list[_Job] = []
    for state, group, ahead in stepped:
        if rate := float(group["lr"]) * steps:
            unbiased, factors = _factors(state, group, ranks)
            jobs.append((state, ahead, (*factors, -unbiased / rate, ranks > 1)))
    _pass_over(jobs, 0, native.follow_, _follow)


@torch.no_grad()
def correct(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Make the step just done that of the second moments of the average's gradients.

    The noise of gradients is averaged away over P ``ranks``, so ``v' = m'^2 + (v - m'^2) / P``, where a
    rank's own ``v`` makes steps up to sqrt(P) times shorter; ``w -= lr m' (1 / d(v') - 1 / d(v))``.
    """
    jobs: list[_Job] = []
    for parameter, state, group in with_moments(optimizer):
        if parameter.grad is not None:  # else it was not stepped
            unbiased, factors = _factors(state, group, ranks)
            given = (*factors, -float(group["lr"]) / unbiased, ranks > 1)
            jobs.append((state, local_of(parameter), given))
    _pass_over(jobs, 2, native.correct_, _correct)


def drop_broken(
    optimizers: Iterable[torch.optim.Optimizer], on_any_part: Callable[[bool], bool]
) -> None:
    """Drop optimizers' states of parameters where they are not finite; on all parts, or on none."""
    states = [state for one in optimizers for state in one.state.values()]
    tensors = [[local_of(v) for v in s.values() if isinstance(v, Tensor)] for s in states]
    broken = [not all(bool(torch.isfinite(v).all()) for v in values) for values in tensors]
    everything = on_any_part(any(broken))
    for state, here in zip(states, broken, strict=True):
        if here or everything:
            state.clear()


def _factors(
    state: Mapping[str, Any], group: Mapping[str, Any], ranks: int
) -> tuple[float, tuple[float, float, float, float]]:
    """Return 1 - b1^t; and of d = sqrt(v') + eps the factors of v and m^2, that of v alone, and eps."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    unbiased, noise, own = 1 - beta1**step, 1 / ranks, 1 - beta2**step
    return unbiased, (noise / own, (1 - noise) / unbiased**2, 1 / own, float(group["eps"]))


def _pass_over(jobs: Iterable[_Job], changed: int, compiled: _Pass, plain: _Pass) -> None:
    """Pass over both moments and the other tensor of every job; small ones are joined.

    ``changed`` is which of the three is written to.
    """
    waiting: dict[Any, list[tuple[Tensor, ...]]] = {}

    def join(given: native.Moments, several: list[tuple[Tensor, ...]]) -> None:
        columns = list(zip(*several, strict=True))
        joined = [flatten(column) for column in columns]
        _passed(joined, given, compiled, plain)
        own = columns[changed]
        torch._foreach_copy_(own, unflatten(joined[changed], own))

    for state, other, given in jobs:
        tensors = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"]), other
        if other.numel() > _SMALL:
            _passed(tensors, given, compiled, plain)
            continue
        kind = given, *((tensor.dtype, tensor.device) for tensor in tensors)
        several = waiting.setdefault(kind, [])
        several.append(tensors)
        if len(several) == _JOINED:
            join(given, waiting.pop(kind))
    for (given, *_), several in waiting.items():
        join(given, several)


def _passed(
    tensors: Sequence[Tensor], given: native.Moments, compiled: _Pass, plain: _Pass
) -> None:
    """Pass over both moments and another tensor, in C++ or in runs."""
    mean, square, other = tensors
    dense = all(tensor.is_contiguous() for tensor in tensors)
    if dense and backend_of(*tensors) is native:
        compiled(mean, square, other, given)
    elif dense and other.is_cpu:  # fresh memory costs more than the work
        runs = (torch.split(tensor.view(-1), _RUN) for tensor in tensors)
        for mean, square, run in zip(*runs, strict=True):
            plain(mean, square, run, given)
    else:
        plain(mean, square, other, given)


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
