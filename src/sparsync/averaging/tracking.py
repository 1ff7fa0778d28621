"""First moments that follow the average: an optimizer's memory of steps that were not the average's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync.units import local_of

__all__ = ["follow"]


@torch.no_grad()
def follow(
    state: Mapping[str, Any], group: Mapping[str, Any], moved: Tensor, ahead: Tensor, steps: int
) -> None:
    """Move a parameter's first moment by what makes its steps the average's, as far as it is known.

    The optimizer's sum of ``steps`` steps was ``moved``, of which ``ahead`` was not the average's; both
    are against the weights, and have the parameter's shape.  With the rest of the map from moment to step
    held fixed:

    * Adam, ``step = lr m' / d`` with ``m' = m / (1 - b1^t)``: ``m -= (1 - b1^t) d ahead / (lr steps)``;
    * Muon, ``step = c U V'`` for ``m = U S V'``, so ``m = (U V') (V S V')``:
      ``m -= ahead moved' m / c^2``, with ``c^2 = |moved|^2 / rank``;
    * SGD with momentum, ``step = lr m``: ``m -= ahead <moved, m> / |moved|^2``.

    Other optimizers' moments stay as they are.
    """
    if {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
        rate = float(group["lr"]) * steps
        if not rate:
            return
        (beta1, beta2), step = group["betas"], float(state["step"])
        mean, square = local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])
        root = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
        mean.addcmul_(root, ahead.to(root.dtype), value=-(1 - beta1**step) / rate)
    elif isinstance(mean := state.get("momentum_buffer"), Tensor):
        mean = local_of(mean)
        moved, ahead = moved.to(mean.dtype), ahead.to(mean.dtype)
        norm = float(moved.square().sum())
        if not norm:
            return
        way = os.environ.get("TRACK", "polar")
        if way == "none":
            return
        if "ns_steps" in group and mean.dim() == 2 and way == "polar":
            tall = mean.shape[0] >= mean.shape[1]
            pair = (ahead, moved.T @ mean) if tall else (mean @ moved.T, ahead)
            mean.addmm_(*pair, alpha=-min(mean.shape) / norm)
        else:
            mean.sub_(ahead, alpha=float((moved * mean).sum()) / norm)
