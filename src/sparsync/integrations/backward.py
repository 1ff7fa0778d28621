"""One backward pass of DDP: which buckets came, and writing the averages into their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, Vector
from sparsync.units import Slot, Unit

__all__ = [
    "Round",
    "call_after_backward",
    "check_complete",
    "check_join",
    "deliver_to_unused_",
    "find",
    "write_",
]


Arrived = tuple[Tensor, Tensor]  # a parameter, and its gradient: a view of a bucket


class Round:
    """One backward pass: its buckets and where each unit's averages go."""

    def __init__(self, units: int) -> None:
        self.buckets: list[tuple[torch.futures.Future[Tensor], Tensor, Tensor]] = []
        self.gradients: list[dict[Slot, Arrived]] = [{} for _ in range(units)]
        self.accumulated = [0] * units  # parameters of each
        self.waiting: list[Arrived] = []  # gradients, for the norm of all of them
        self.jobs: list[Future[None]] = []
        self.failed = False
        self.finished: Future[None] | None = None

    def take(self, bucket: Any) -> tuple[torch.futures.Future[Tensor], list[Arrived]]:
        """Keep a bucket; return its future and its gradients, dense also where they came as COO."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        # the gradient of an embedding with sparse=True has a bucket of its own
        dense = buffer.to_dense() if buffer.is_sparse else buffer
        gradients = [dense] if buffer.is_sparse else bucket.gradients()
        self.buckets.append((future, buffer, dense))
        pairs = zip(bucket.parameters(), gradients, strict=True)
        return future, [(p, _as_parameter(g, p)) for p, g in pairs]

    def complete(self) -> None:
        """Hand the buckets back to DDP, each in the layout in which it came."""
        for future, buffer, dense in self.buckets:
            # rows that hold nothing are left out: what COO gradients are for
            future.set_result(dense.to_sparse(1) if buffer.is_sparse else dense)

    def release(self) -> None:
        """Let go of the buckets."""
        self.buckets.clear()
        self.waiting.clear()
        for gradients in self.gradients:
            gradients.clear()

    def zero_(self) -> None:
        """Zero the gradients of a refused step: what undid it lies in them, or local gradients."""
        for _, _, dense in self.buckets:
            dense.zero_()


def _as_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """View a piece of a bucket in its parameter's order: a bucket keeps the parameter's strides.

    DDP hands it over as if it were contiguous; in a channels_last convolution its elements would be in
    the order of memory, and weight decay or a saved residual would meet those of others.
    """
    strides = torch.empty_like(parameter, device="meta").stride()  # contiguous if they overlap
    if gradient.stride() == strides or gradient.numel() == 0:
        return gradient
    return gradient.as_strided(parameter.shape, strides, gradient.storage_offset())


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


def write_(average: Vector, unit: Unit, gradients: Mapping[Slot, Arrived]) -> None:
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
            elif parameter.grad is not None and not parameter.grad.is_sparse:  # DDP wants it used
                parameter.grad.copy_(average)


def check_join(model: DistributedDataParallel, correction: Correction) -> None:
    """Refuse what DDP's ``join()`` cannot have: the same on all ranks, whoever is done.

    Raises:
        ConfigurationError: averages over the ranks that go on, or decay of weights that are old.
    """
    if not model._join_config.enable:
        return
    if not model._divide_by_initial_world_size:
        raise ConfigurationError(
            "join(divide_by_initial_world_size=False) divides by the ranks that are not done, but a "
            "rank that is done goes on delivering its residual; leave it at True"
        )
    if correction.weight_decay:
        raise ConfigurationError(
            "the correction decays by this rank's weights, which under join() are old once it is done; "
            "give weight_decay to the optimizer"
        )


def call_after_backward(callback: Callable[[], None]) -> bool:
    """Call back when DDP has finished; what is raised then comes out of ``backward()`` itself.

    It takes a callback of a callback: DDP queues its own, later than the first.

    Returns:
        Whether there is a backward pass: not on a rank that is done and shadows others (``join()``).
    """
    engine = Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(callback))
    except RuntimeError:
        return False
    return True
