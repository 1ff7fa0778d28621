"""Follow an optimizer's steps: a call counts once, nested in another or skipped by a GradScaler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from sparsync.handle import Hook
from sparsync.optimizers import chain_of
from sparsync.updates.moments import found_inf

__all__ = ["follow", "follow_scalers"]

# torch's wrapper around ``step``, which calls hooks
_CALL: Final = Optimizer.profile_hook_step(lambda *_: None).__code__


def follow(optimizer: Optimizer, before: Hook, after: Hook) -> list[Any]:
    """Call ``before(optimizer)`` and ``after(optimizer, skipped)`` around every call of ``step``.

    A step is ``skipped`` where a GradScaler has found Inf: it then calls a fused optimizer, which does
    nothing, and others not at all.

    Returns:
        What has ``remove()``.
    """
    follow_scalers()
    post = _After(after)
    pre: Any = Hook(lambda one, *_: None if _nested(one) else before(one))
    return [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]


@final
class _After:
    """The hook after an optimizer's steps; it counts them."""

    def __init__(self, call: Hook) -> None:
        self._call, self.calls = call, 0

    def __call__(self, optimizer: Optimizer, *_given: Any) -> None:
        """Tell of a step, also of one that a fused optimizer was told to skip."""
        if not _nested(optimizer):
            self.tell(optimizer, skipped=found_inf(optimizer))

    def tell(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Count a step."""
        self.calls += 1
        self._call(optimizer, skipped)


def _nested(optimizer: Optimizer) -> bool:
    """Tell whether a hook is called within another step of its optimizer.

    As of a subclass whose ``step`` calls its base's: torch puts a wrapper around both.  An exception may
    end a step without its second hook, so calls are not counted in and out, but looked for.
    """
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is optimizer
    return calls > 1


def follow_scalers() -> None:
    """Let torch's GradScalers tell of the steps that they skip, once in a process."""
    step: Callable[..., Any] = torch.amp.GradScaler.step
    if hasattr(step, "tells"):
        return

    @functools.wraps(step)
    def telling(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # a wrapper may be given, as one of SAM, of which nothing is called either
        hooks = [
            (one, hook, hook.calls)
            for one, _ in chain_of(optimizer)
            for hook in getattr(one, "_optimizer_step_post_hooks", {}).values()
            if isinstance(hook, _After)
        ]
        result = step(scaler, optimizer, *args, **kwargs)
        for one, hook, calls in hooks:
            if hook.calls == calls:
                hook.tell(one, skipped=True)
        return result

    telling.tells = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.step = telling  # type: ignore[assignment, method-assign]
