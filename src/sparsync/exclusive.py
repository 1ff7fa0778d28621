"""Ensure that only the handle exchanges or steps a model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from sparsync.accepted_optimizers import holds
from sparsync.errors import ConfigurationError
from sparsync.handle import CommHook, Hook

__all__ = [
    "Guard",
    "check_outermost",
    "check_outside_ddp",
    "check_unattached",
    "exchanged_updates",
    "gradient_hooks",
    "refuse_inside_backward",
    "repeating",
]

_REPEATS: Final = ContextVar("repeats", default=False)


class _Guarded(Protocol):
    """A handle that exchanges updates."""

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters whose updates are exchanged."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers after whose steps updates are exchanged."""


@final
class Guard:
    """A hook on all optimizers of the process, which refuses steps by optimizers unknown to a handle.

    An optimizer created after ``attach`` does not have the handle's hook, so its steps would never be
    exchanged.  From these hooks, a second ``attach`` also learns which parameters are exchanged already.
    Parameters carry no mark for this, because copies and saved models would inherit it.

    Cost: none for the handle's own optimizers; for others, a lookup of each of their parameters.
    """

    def __init__(self, sync: _Guarded) -> None:
        self.sync = weakref.ref(sync)
        self.remove = _on_all_optimizers(self, sync)

    # torch.compile must not trace the guard, which reads private state of optimizers and handles
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, optimizer: Optimizer, *_step: Any) -> None:
        """Refuse the step of an unknown optimizer on parameters whose updates are exchanged."""
        sync = self.sync()
        if sync is None or any(optimizer is one for one in sync.optimizers):
            return
        # parameters are compared by identity, because ``in`` on a list of tensors compares elements
        names = {id(parameter): name for name, parameter in sync.trained.items()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        # an optimizer may also wrap one of the handle's optimizers, or be wrapped by one
        if not stepped or holds(optimizer, sync.optimizers) or holds(sync.optimizers, [optimizer]):
            return
        known = ", ".join(type(one).__name__ for one in sync.optimizers)
        raise ConfigurationError(
            f"{type(optimizer).__name__} is about to step '{names[id(stepped[0])]}' ({len(stepped)} of "
            f"{len(names)} parameters), but attach was given another optimizer ({known}), and "
            "updates are exchanged after that optimizer's steps: give attach all optimizers; after "
            "replacing one, "
            "call finish() and close(), and attach again, on all ranks"
        )


def refuse_inside_backward(sync: object) -> Callable[[], None]:
    """Refuse steps inside ``backward()`` until the returned function is called, or ``sync`` is freed.

    Such steps come, for instance, from a hook on each parameter that steps the parameter's own optimizer.
    Inside ``backward()``, gradients are not exchanged yet, and an exchange of updates would write weights
    that the backward pass still reads.

    Cost: none outside of backward passes.
    """
    return _on_all_optimizers(_check_after_backward, sync)


@contextmanager
def repeating() -> Iterator[None]:
    """Allow steps inside ``backward()`` in this context; a joining rank repeats missed steps there."""
    token = _REPEATS.set(True)
    try:
        yield
    finally:
        _REPEATS.reset(token)


def _check_after_backward(optimizer: Optimizer, *_step: Any) -> None:
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1 or _REPEATS.get():
        return
    updates = exchanged_updates()
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    if any(
        id(p) in updates or any(hook.owner is not None for hook in gradient_hooks(p))
        for p in stepped
    ):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is about to step inside backward(), as from a hook of a "
            "parameter, before gradients are exchanged, and while the pass still reads the weights; step "
            "it after backward()"
        )


def _on_all_optimizers(hook: Callable[..., None], sync: object) -> Callable[[], None]:
    """Call a hook before all steps in the process, until ``sync`` is freed.

    Return a function that removes the hook earlier.
    """
    handle = hooks.register_optimizer_step_pre_hook(hook)
    # torch would keep a global hook forever; at the end of the process, nothing needs to be removed
    weakref.finalize(sync, handle.remove).atexit = False
    return handle.remove


def check_outermost(model: nn.Module) -> None:
    """Refuse a model that contains a DDP module, because it would also exchange gradients.

    Raises:
        ConfigurationError: there is a DDP module inside; the message names it.
    """
    if isinstance(model, DistributedDataParallel):
        return
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigurationError(
                f"{type(model).__name__} wraps a DistributedDataParallel ('{name}'), which would "
                "also exchange all gradients; give attach() that inner module"
            )


def check_outside_ddp(module: nn.Module) -> None:
    """Refuse a forward pass of an attached module inside DDP, which would also exchange its gradients.

    ``attach`` cannot check this, because a module does not know that DDP wraps it.
    """
    # DDP sets this private attribute during its forward pass, for torch.compile; there is no public one
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and any(inner is module for inner in ddp.modules()):
        raise ConfigurationError(
            "the module that was attached runs inside a DistributedDataParallel, which exchanges all its "
            "gradients as well; attach the DDP model instead"
        )


def check_unattached(model: nn.Module) -> None:
    """Refuse a model with parameters that a handle exchanges already.

    Raises:
        ConfigurationError: a parameter is exchanged already; the message names the first one.
    """
    ignored, ddp = set[str](), False
    if isinstance(model, DistributedDataParallel):
        if model._comm_hooks and CommHook.closed_of(model) is None:
            return  # ``check_ddp`` will refuse the hook
        # Two DDP models may share parameters if gradients are exchanged and their backward passes take
        # turns.  Updates would be exchanged twice.
        ignored, ddp, model = set(model.parameters_to_ignore), True, model.module
    exchanged = exchanged_updates()
    for name, parameter in model.named_parameters():
        if name in ignored:
            continue
        what = "gradient" if not ddp and gradient_hooks(parameter) else ""
        if what or id(parameter) in exchanged:
            raise ConfigurationError(
                f"the {what or 'update'} of '{name}' is exchanged already; attach once, or close() "
                "the first handle first"
            )


def gradient_hooks(parameter: Tensor) -> list[Hook]:
    """Return the hooks through which handles see the gradients of a parameter."""
    # torch has no public name for its registry of a parameter's hooks
    marks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return [mark for mark in marks.values() if isinstance(mark, Hook)]


def exchanged_updates() -> set[int]:
    """Return the identities of all parameters whose updates are exchanged by any handle."""
    return {id(p) for sync in _guarded() for p in sync.trained.values()}


def _guarded() -> Iterator[_Guarded]:
    for hook in hooks._global_optimizer_pre_hooks.values():
        if isinstance(hook, Guard) and (sync := hook.sync()) is not None:
            yield sync
