"""One model, one exchange: refuse whatever else would exchange, or step, the parameters of a handle."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from sparsync.errors import ConfigurationError
from sparsync.handle import Hook
from sparsync.optimizers import holds

__all__ = ["Guard", "check_outermost", "check_outside_ddp", "check_unattached"]


class _Guarded(Protocol):
    """A handle that exchanges updates."""

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters whose updates are exchanged."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those after whose steps they are exchanged."""


@final
class Guard:
    """A hook on the steps of every optimizer of the process; refuses those of a handle's parameters.

    An optimizer that is made after ``attach`` has no hook of ours: its steps would never be exchanged.
    It is also by these hooks that a second ``attach`` finds the first: parameters carry no mark, which
    copies and saved models would carry along.

    Cost: of the handle's own optimizers nothing; of others a look at every parameter.
    """

    def __init__(self, sync: _Guarded) -> None:
        self.sync = weakref.ref(sync)
        handle = hooks.register_optimizer_step_pre_hook(self)
        self.remove = handle.remove
        weakref.finalize(sync, handle.remove).atexit = False

    def __call__(self, optimizer: Optimizer, *_step: Any) -> None:
        """Refuse a step of parameters whose updates are exchanged after the steps of other optimizers."""
        sync = self.sync()
        if sync is None or any(optimizer is one for one in sync.optimizers):
            return
        names = {id(parameter): name for name, parameter in sync.trained.items()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not stepped or holds(optimizer, sync.optimizers) or holds(sync.optimizers, [optimizer]):
            return
        known = ", ".join(type(one).__name__ for one in sync.optimizers)
        raise ConfigurationError(
            f"{type(optimizer).__name__} is about to step '{names[id(stepped[0])]}' ({len(stepped)} of "
            f"{len(names)} parameters), but attach was given another optimizer ({known}), and updates "
            "are exchanged after the steps of that one: give attach all optimizers; after replacing one, "
            "call finish() and close(), and attach again, on all ranks"
        )


def check_outermost(model: nn.Module) -> None:
    """Refuse a container around DDP, which would go on exchanging gradients.

    Raises:
        ConfigurationError: names the module inside that is DDP.
    """
    if isinstance(model, DistributedDataParallel):
        return
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigurationError(
                f"{type(model).__name__} is around a DistributedDataParallel ('{name}'), which would go "
                "on exchanging all gradients; give attach that one"
            )


def check_outside_ddp(module: nn.Module) -> None:
    """Refuse a forward pass of an attached module inside a DDP model, which exchanges its gradients.

    A module does not know whether DDP is around it before that.
    """
    ddp = DistributedDataParallel._active_ddp_module  # while its forward pass runs
    if ddp is not None and any(inner is module for inner in ddp.modules()):
        raise ConfigurationError(
            "the module that was attached runs inside a DistributedDataParallel, which exchanges all its "
            "gradients as well; attach the DDP model instead"
        )


def check_unattached(model: nn.Module) -> None:
    """Refuse a second ``attach`` of a parameter.

    Raises:
        ConfigurationError: names the first one that is exchanged already.
    """
    if isinstance(model, DistributedDataParallel):
        return  # it has a communication hook then
    exchanged = {id(p) for sync in _guarded() for p in sync.trained.values()}
    for name, parameter in model.named_parameters():
        marks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        what = "gradient" if any(isinstance(mark, Hook) for mark in marks.values()) else ""
        if what or id(parameter) in exchanged:
            raise ConfigurationError(
                f"the {what or 'update'} of '{name}' is exchanged already; attach once, or close() the "
                "first handle before"
            )


def _guarded() -> Iterator[_Guarded]:
    for hook in hooks._global_optimizer_pre_hooks.values():
        if isinstance(hook, Guard) and (sync := hook.sync()) is not None:
            yield sync
