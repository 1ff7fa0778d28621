"""Run the same script with plain DDP, for comparison (``SPARSYNC_DISABLE=1``).

``attach`` then returns a handle that exchanges nothing.  DDP keeps its own exchange, and the handle's
methods can still be called, so the script needs no changes for the dense run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.gradients.ddp import check_ddp
from sparsync.gradients.steps import GradientSteps
from sparsync.gradients.sync import GradientSync, Source
from sparsync.handle import Handle, Hook, make_engine
from sparsync.options import DISABLE, Options
from sparsync.presets import resolve
from sparsync.transports.agree import agree
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups, TorchCommunicator
from sparsync.updates.stepping import follow

__all__ = ["leave_dense"]

_SAYS = f"{DISABLE}=1: attaches nothing"


def leave_dense(
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    options: Options,
    *,
    elsewhere: str,
) -> GradientSync:
    """Leave a DDP model unchanged, and return a handle; this is collective, like ``attach``.

    ``elsewhere`` names an argument that asks for an exchange outside DDP, or is empty.

    Raises:
        ConfigurationError: the model is not a DDP module, or an argument asks for an exchange outside
            DDP.
        PeerError: not all ranks have disabled sparsync.
    """
    if elsewhere or not isinstance(model, DistributedDataParallel):
        reason = f"{elsewhere} has no dense exchange of its own"
        if not elsewhere:
            kind = type(model).__name__
            reason = f"{kind} is not a DistributedDataParallel, which would exchange"
        raise ConfigurationError(f"{_SAYS}, but {reason}; unset it, or wrap the model in DDP")
    check_ddp(model)
    applied = "" if options.correction is None else "; correction= is not applied"
    options.tell(f"{_SAYS}; DistributedDataParallel exchanges whole gradients{applied}")
    groups = Groups(model.process_group, **options.transport.waits)
    try:
        # checkpoints need a communicator, because ranks write and read them together
        group = groups.make(dist.get_process_group_ranks(model.process_group))
        comm = TorchCommunicator(group, timeout=options.transport.timeout)
        run(agree(comm, {"the version of sparsync": f"none, by {DISABLE}=1"}))
        reducer = Reducer(comm, [], resolve("dense"), 1.0)
        steps = GradientSteps(model.module, reducer, make_engine(reducer, groups), options)
        return GradientSync(model.module, steps, _LeftToDdp(model, optimizers), groups, options)
    except BaseException:
        groups.close()
        raise


@final
class _LeftToDdp(Source):
    """Passes on no gradients, but counts local steps, i.e. the steps of the last optimizer.

    Without an optimizer, it counts the forward passes after which DDP exchanges gradients.
    """

    def __init__(
        self, model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._model, self._optimizers = weakref.ref(model), list(optimizers)

    def watch(self, sync: Handle) -> None:
        """Count steps until the handle is closed."""
        model = self._model()
        assert model is not None
        # the reference is strong, so that the model keeps its handle alive, as an attached model does
        handles = [model.register_forward_pre_hook(Hook(partial(self._before_forward, sync)))]
        if self._optimizers:
            handles += follow(self._optimizers[-1], Hook(), Hook(partial(self._count, sync)))
        for handle in handles:
            sync.on_close.callback(handle.remove)

    def _before_forward(self, sync: Handle, *_given: Any) -> None:
        model = self._model()
        exchanged = model is not None and model.require_backward_grad_sync
        if exchanged and torch.is_grad_enabled() and not self._optimizers:
            self._count(sync)

    def _count(self, sync: Handle, *_step: Any) -> None:
        sync.reducer.resume(sync.reducer.step + 1, 0)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    @property
    def exchange(self) -> str:
        """The kind of exchange, "none"; ``stats`` counts only the bytes of agreements and checkpoints."""
        return "none"

    def contribute(self) -> None:
        """Do nothing: DDP weighs all ranks alike."""

    def discard(self) -> None:
        """Do nothing: after an interrupted backward pass, there is nothing to undo here."""

    def step(self) -> None:
        """Do nothing: DDP has already exchanged the gradients."""
