"""Follow an optimizer's steps: every outermost call counts once, even if a GradScaler skips it.

All ranks must count the same number of steps.  Skipped steps count, because each rank has its own
GradScaler, which may skip a step that others make.
"""

from __future__ import annotations

import sys
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from sparsync.handle import Hook
from sparsync.scalers import Counting, follow_scalers
from sparsync.updates.gradient_noise import found_inf

__all__ = ["follow"]

# The code object of torch's wrapper around ``step``, which calls the hooks; ``_nested`` looks for it on
# the stack.  The wrapper has no public name, so a dummy function is wrapped to get its code.
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
    # torch.compile must not trace these hooks: they send messages, and compiling them takes minutes
    disable: Any = torch.compiler.disable
    pre: Any = Hook(disable(lambda one, *_: None if _nested(one) else before(one)))
    return [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]


@final
class _After(Counting):
    """The hook after an optimizer's step; its count shows ``follow_scalers`` whether torch called it."""

    def __init__(self, call: Hook) -> None:
        self._call, self.calls = call, 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, optimizer: Optimizer, *_given: Any) -> None:
        """Report a step, even if a fused optimizer was told to skip it."""
        if not _nested(optimizer):
            self.tell(optimizer, skipped=found_inf(optimizer))

    def tell(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Count a step, and report it."""
        self.calls += 1
        self._call(optimizer, skipped)


def _nested(optimizer: Optimizer) -> bool:
    """Return whether a hook is called within an outer call of its optimizer's ``step``.

    This happens if the ``step`` of a subclass calls the base class's ``step``, because torch wraps
    both.
    """
    # the stack is searched, because counted calls would be wrong after an exception, which ends a step
    # before its second hook
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is optimizer
    return calls > 1
