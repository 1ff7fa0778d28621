"""What is done before and after a step, where it was asked for: follow the scale, compare replicas."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from sparsync.collectives.equality import check_equal_parameters
from sparsync.errors import ConfigurationError
from sparsync.integrations.sentinel import Sentinel
from sparsync.reducer import Reducer
from sparsync.scaling import rescale_
from sparsync.transports.base import Communicator, run
from sparsync.transports.engine import Engine

__all__ = ["Upkeep", "check_scaler"]

_CHANNEL: Final = 2  # behind the units', the shares' and xi's


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
        """Bring the residual to the scale of the gradients that come now."""
        if self._scaler is not None:
            rescale_(reducer, self._scaler.get_scale())

    def after(self, reducer: Reducer, engine: Engine, comms: Sequence[Communicator]) -> None:
        """Compare replicas if it is time; on the training thread, when the engine has nothing to do.

        Args:
            reducer: whose step has just been closed.
            engine: its thread.
            comms: groups of ranks that hold the same.

        Raises:
            PeerError: they differ, and that is what the sentinel was told to do.
        """
        sentinel, done = self._sentinel, reducer.step - 1
        if sentinel is None or not sentinel.due(done):
            return
        tensors = self._tensors()
        for comm in comms:
            channel = comm.channel(len(reducer.units) + _CHANNEL)
            engine.submit(sentinel.check(channel, tensors, done)).result()

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
