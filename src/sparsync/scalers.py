"""Follow torch's GradScalers: count the steps they skip, and refuse scalers unknown to ``attach``."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from sparsync.accepted_optimizers import chain_of
from sparsync.errors import require
from sparsync.exclusive import gradient_hooks

__all__ = ["Counting", "follow_scalers"]


class Counting(ABC):
    """A hook after an optimizer's steps, which also learns of the steps that a GradScaler skips.

    Attributes:
        calls: the number of steps so far; it shows whether torch has called the hook.
    """

    calls: int

    @abstractmethod
    def tell(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Count a step, and report it."""


def follow_scalers() -> None:
    """Wrap the ``step`` method of torch's GradScaler, once per process.

    A scaler that finds Inf does not call the optimizer, so no hook of the optimizer runs, and torch
    (2.13) has no hooks for scalers.  The method of the class is wrapped, because a scaler may be created
    after ``attach``.
    """
    step: Callable[..., Any] = torch.amp.GradScaler.step
    if hasattr(step, "tells"):  # a second wrapper would report every skipped step twice
        return

    @functools.wraps(step)
    def telling(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _check_given(scaler, optimizer)
        # The scaler may be given a wrapper, e.g. SAM, around the attached optimizer.  The counts show
        # whether a hook has run: a fused optimizer is called even if its step is skipped, and its hook
        # then reports the step.
        hooks = [
            (one, hook, hook.calls)
            for one, _ in chain_of(optimizer)
            for hook in getattr(one, "_optimizer_step_post_hooks", {}).values()
            if isinstance(hook, Counting)
        ]
        result = step(scaler, optimizer, *args, **kwargs)
        for one, hook, calls in hooks:
            if hook.calls == calls:
                hook.tell(one, skipped=True)
        return result

    telling.tells = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.step = telling  # type: ignore[assignment, method-assign]


def _check_given(scaler: Any, optimizer: Any) -> None:
    """Refuse a scaler unknown to the handle that exchanges the scaled gradients.

    The residual is a sum of scaled gradients.  If the scale changed without the handle's knowledge, the
    residual would count twice as much as new gradients, or half as much.
    """
    if not scaler.is_enabled():
        return
    groups = (g for one, _ in chain_of(optimizer) for g in getattr(one, "param_groups", ()))
    owners = (h.owner for g in groups for p in g["params"] for h in gradient_hooks(p))
    # one parameter is enough, because all parameters of a handle have the same scaler
    owner = next((one for one in owners if one is not None), None)
    given = getattr(owner, "scaler", scaler)
    another = "that attach was not given" if given is None else "other than the one given to attach"
    require(
        given is scaler,
        f"the gradients are scaled by a {type(scaler).__name__} {another}, so gradients not sent yet "
        "would keep their old scale whenever it changes; give it, as in attach(..., "
        "monitoring=sparsync.Monitoring(scaler=scaler))",
    )
