"""One backward pass of DDP: which buckets came, and writing the averages into their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.autograd import Variable

from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, Vector
from sparsync.units import Slot, Unit

__all__ = [
    "Round",
    "call_after_backward",
    "check_complete",
    "deliver_to_unused_",
    "find",
    "write_",
]


class Round:
    """One backward pass: its buckets and where each unit's averages go."""

    def __init__(self, units: int) -> None:
        self.buckets: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self.gradients: list[dict[Slot, tuple[Tensor, Tensor]]] = [{} for _ in range(units)]
        self.accumulated = [0] * units  # parameters of each
        self.waiting: list[tuple[Tensor, Tensor]] = []  # gradients, for the norm of all of them
        self.jobs: list[Future[None]] = []
        self.failed = False
        self.finished: Future[None] | None = None

    def release(self) -> None:
        """Let go of the buckets."""
        self.buckets.clear()
        self.waiting.clear()
        for gradients in self.gradients:
            gradients.clear()

    def zero_(self) -> None:
        """Zero the gradients of a refused step: what undid it lies in them, or local gradients."""
        for _, buffer in self.buckets:
            buffer.zero_()


def find(place: Mapping[Tensor, tuple[int, Slot]], parameter: Tensor) -> tuple[int, Slot]:
    """Return the unit of a parameter, and where it lies there.

    Raises:
        ConfigurationError: it has none.
    """
    if parameter not in place:
        raise ConfigurationError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient but had "
            "requires_grad=False when attach was called; freeze or thaw before wrapping in DDP"
        )
    return place[parameter]


def check_complete(units: Sequence[Unit], this: Round) -> None:
    """Refuse a backward pass that has left out parameters.

    Raises:
        ConfigurationError: names the first of them.
    """
    for unit, gradients in zip(units, this.gradients, strict=True):
        missing = [slot.name for slot in unit.slots if slot not in gradients]
        if missing:
            raise ConfigurationError(
                f"no gradient came for '{missing[0]}' ({len(missing)} parameters in all), which "
                "required one when attach was called; freeze or thaw before wrapping in DDP"
            )


def write_(average: Vector, unit: Unit, gradients: Mapping[Slot, tuple[Tensor, Tensor]]) -> None:
    """Write a unit's average into its gradients, each a view of a bucket."""
    slots = unit.slots
    if isinstance(average, DenseVector):
        for slot in slots:
            view = gradients[slot][1]
            view.copy_(average.values[slot.start : slot.start + slot.size].view(view.shape))
        return
    boundaries = [*(slot.start for slot in slots), average.size]
    for slot, part in zip(slots, average.split(boundaries), strict=True):
        view = gradients[slot][1]
        if view.is_contiguous():
            part.write_to_(view.view(-1))
        else:  # channels_last and the like: a bucket keeps the parameter's strides
            view.copy_(part.to_dense().view(view.shape))


def deliver_to_unused_(this: Round) -> None:
    """Give parameters that no rank used the residual mass that was delivered to them.

    DDP leaves their gradients alone; dropped here, that mass would be lost to the model.
    """
    for gradients in this.gradients:
        for parameter, average in gradients.values():
            average = average.view(parameter.shape)
            if parameter.grad is None and bool(average.any()):
                parameter.grad = average.clone()
            elif parameter.grad is not None:
                parameter.grad.copy_(average)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back when DDP has finished; what is raised then comes out of ``backward()`` itself.

    It takes a callback of a callback: DDP queues its own, later than the first.
    """
    engine = Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(callback))
    except RuntimeError as error:
        raise ConfigurationError(
            "gradients were reduced outside of backward(), as DDP's join() does for uneven inputs; "
            "that is not supported: give all ranks equally many batches"
        ) from error
