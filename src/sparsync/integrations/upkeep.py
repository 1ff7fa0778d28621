"""What is done before and after a step, where it was asked for: follow the scale, compare replicas."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor, nn

from sparsync.collectives.agreement import agree
from sparsync.collectives.equality import check_equal_parameters
from sparsync.errors import CommunicationError, ConfigurationError
from sparsync.integrations.sentinel import Sentinel
from sparsync.reducer import Reducer
from sparsync.scaling import rescale_
from sparsync.transports.base import Communicator, run
from sparsync.transports.engine import Engine

__all__ = ["Upkeep", "check_scaler"]

_CHANNEL: Final = 2  # behind the units', the shares' and xi's
_AGAIN: Final = 4  # behind that of what replicas use


@final
class Upkeep:
    """Follows a GradScaler before a step, and sends the sentinel after it.

    Args:
        model: the plain module whose parameters are compared; it is not kept alive.
        ignored: names of parameters and buffers that are each rank's own.
        scaler: what has ``get_scale()``, as ``torch.amp.GradScaler``; None: gradients come as they are.
        sentinel: compares replicas; None: nobody does.

    Attributes:
        follows_scale: a loaded state keeps the scale that it was saved with, until the next step.

    Raises:
        ConfigurationError: the sentinel names a buffer that is not there.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        ignored: Collection[str] = (),
        scaler: Any = None,
        sentinel: Sentinel | None = None,
    ) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._ignored = set(ignored)
        self._scaler, self._sentinel = scaler, sentinel
        self.follows_scale = scaler is not None
        self._opened = (-1, 0)  # the last step that was opened, and the bytes sent before
        self._tensors()

    def compare(self, comms: Sequence[Communicator]) -> None:
        """Refuse ranks that begin with other parameters than this one.

        Raises:
            PeerError: names the first that differs, and the ranks.
        """
        tensors = self._tensors()
        for comm in comms:
            run(check_equal_parameters(comm, tensors.items()))

    def before(self, reducer: Reducer) -> None:
        """Bring the residual to the scale of the gradients that come now.

        A step that broke off after its exchange had begun is only begun again if all ranks do: the
        messages of one that waits still for the first attempt would be taken for those of the second.

        Raises:
            CommunicationError: they do not.
        """
        opened, sent = self._opened
        if opened == reducer.step and reducer.comm.ledger.total().sent > sent:
            self._begin_again(reducer)
        self._opened = reducer.step, reducer.comm.ledger.total().sent
        if self._scaler is not None:
            rescale_(reducer, self._scaler.get_scale())

    def loaded(self) -> None:
        """Forget the step that was open: all ranks have loaded a state."""
        self._opened = (-1, 0)

    def after(
        self,
        reducer: Reducer,
        engine: Engine,
        parts: Communicator | None = None,
        *,
        alike: bool = False,
    ) -> None:
        """Compare replicas if it is time; on the training thread, when the engine has nothing to do.

        Args:
            reducer: whose step has just been closed.
            engine: its thread.
            parts: ranks that exchange other parts of the same replica: what one finds, all are told.
            alike: they hold the same parameters, as those of a node do, and are compared as well.

        Raises:
            PeerError: some differ, and that is what the sentinel was told to do; on all ranks.
        """
        sentinel, done = self._sentinel, reducer.step - 1
        if sentinel is None or not sentinel.due(done):
            return
        tensors, rank, tag = self._tensors(), dist.get_rank(), len(reducer.units) + _CHANNEL
        peers, others = reducer.comm.channel(tag), None if parts is None else parts.channel(tag)
        engine.submit(sentinel.check(peers, tensors, done, others, rank=rank)).result()
        if alike and others is not None:  # behind the others: then all nodes find the same
            engine.submit(sentinel.check(others, tensors, done, rank=rank)).result()

    def _begin_again(self, reducer: Reducer) -> None:
        channel = reducer.comm.channel(len(reducer.units) + _AGAIN)
        try:
            run(agree(channel, {"the step that is begun again": reducer.step}))
        except CommunicationError as error:
            raise type(error)(
                f"rank {dist.get_rank()} begins step {reducer.step} again, which broke off after its "
                f"exchange had begun, but other ranks do not: {error}; when backward() raises on some "
                "ranks only, restart all of them"
            ) from error

    def _tensors(self) -> Mapping[str, Tensor]:
        """Return what should be equal; of a DTensor what lies here."""
        model = None if self._model is None else self._model()
        if model is None:
            return {}
        found = (self._sentinel or Sentinel()).tensors(model, self._ignored)
        return {name: _local(tensor.detach()) for name, tensor in found.items()}


def check_scaler(scaler: Any, nonfinite: str) -> None:
    """Refuse what is no GradScaler, or a policy that would keep overflows from it.

    Raises:
        ConfigurationError: says what to give.

    Example:
        >>> import torch
        >>> try: check_scaler(torch.amp.GradScaler("cpu"), "skip")
        ... except ConfigurationError as error: str(error).split(";")[1]
        " leave nonfinite away, or give 'propagate'"
    """
    if scaler is None:
        return
    if not callable(getattr(scaler, "get_scale", None)):
        raise ConfigurationError(
            f"scaler is {type(scaler).__name__}, which has no get_scale(); give a torch.amp.GradScaler"
        )
    if nonfinite != "propagate":
        raise ConfigurationError(
            f"with nonfinite={nonfinite!r} the GradScaler sees no overflow and never lowers its scale; "
            "leave nonfinite away, or give 'propagate'"
        )


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)  # a DTensor's; to import that takes 0.4 s
    return tensor if to_local is None else to_local()
