"""Follow an optimizer's steps: every outermost call counts once, even if a GradScaler skips it.

All ranks must have the same count.  A GradScaler's scale is local, so one rank may skip a step that
others make.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from sparsync.accepted_optimizers import chain_of
from sparsync.handle import Hook
from sparsync.updates.gradient_noise import found_inf

__all__ = ["follow", "follow_scalers"]

# The code object of torch's wrapper around ``step``, which calls the hooks; ``_nested`` looks for it on
# the stack.  It has no public name, but wrapping any function reveals it.
_CALL: Final = Optimizer.profile_hook_step(lambda *_: None).__code__


def follow(optimizer: Optimizer, before: Hook, after: Hook) -> list[Any]:
    """Call ``before(optimizer)`` and ``after(optimizer, skipped)`` around every call of ``step``.

    A step is ``skipped`` if a GradScaler has found Inf.  The scaler still calls a fused optimizer,
    which then does nothing; it does not call other optimizers at all.

    Returns:
        Handles with ``remove()``.
    """
    follow_scalers()
    post = _After(after)
    # a compiled step must not trace its hooks: they send messages, and compiling them takes minutes
    disable: Any = torch.compiler.disable
    pre: Any = Hook(disable(lambda one, *_: None if _nested(one) else before(one)))
    return [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]


@final
class _After:
    """The hook after an optimizer's steps; its count shows ``follow_scalers`` whether torch called it."""

    def __init__(self, call: Hook) -> None:
        self._call, self.calls = call, 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, optimizer: Optimizer, *_given: Any) -> None:
        """Report a step, including one that a fused optimizer was told to skip."""
        if not _nested(optimizer):
            self.tell(optimizer, skipped=found_inf(optimizer))

    def tell(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Count a step, and report it."""
        self.calls += 1
        self._call(optimizer, skipped)


def _nested(optimizer: Optimizer) -> bool:
    """Return whether a hook is called within another step of its optimizer.

    This happens if the ``step`` of a subclass calls that of the base class, because torch wraps
    both.
    """
    # this searches the stack instead of counting calls, because an exception may end a step before
    # its second hook
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is optimizer
    return calls > 1


def follow_scalers() -> None:
    """Make torch's GradScalers report the steps that they skip, once per process.

    A scaler that finds Inf does not call the optimizer, so no hook of the optimizer runs, and torch
    (2.13) has no hooks for scalers.  This function therefore wraps the method of the class, because a
    scaler may be created after ``attach``.
    """
    step: Callable[..., Any] = torch.amp.GradScaler.step
    if hasattr(step, "tells"):  # a second wrapper would report every skipped step twice
        return

    @functools.wraps(step)
    def telling(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The scaler may hold a wrapper, e.g. SAM, around the attached optimizer.  The counts show whether
        # a hook has run: a fused optimizer is called even when skipped, and reports the step itself.
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
