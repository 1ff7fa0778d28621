"""Find the places of gradients in DDP's buckets and in units, once rather than in every step.

Small parameters that are adjacent in a unit form one run.  DDP's order is roughly the reverse of a
unit's order. A bucket that contains only small parameters is permuted in place into the unit's order. A
bucket that also contains large parameters keeps a copy of its small ones until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.gradients.runs import Place, Run, parts_of, runs_of, write_part
from sparsync.gradients.steps import Step
from sparsync.sparse import Vector
from sparsync.units import Unit

__all__ = ["Bucket", "BucketStep", "Places"]


@final
class Places:
    """Where one bucket's gradients lie in the units; ``joined`` merges adjacent small parameters.

    Raises:
        ConfigurationError: a parameter of the bucket belongs to no unit.
    """

    def __init__(
        self, parameters: Sequence[Tensor], place: Mapping[Tensor, Place], *, joined: bool
    ) -> None:
        self.parameters = list(parameters)
        # This list is compared on every step, because DDP rebuilds its buckets.  It contains identities,
        # because ``==`` on tensors compares elements.
        self.identities = [id(parameter) for parameter in parameters]
        self.sizes = [parameter.numel() for parameter in parameters]
        self.strides: dict[int, tuple[int, ...]] = {}  # only for parameters that are not contiguous
        places: list[Place] = []
        for number, parameter in enumerate(parameters):
            if parameter not in place:
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient but had "
                    "requires_grad=False when attach was called; freeze or thaw before wrapping in DDP"
                )
            places.append(place[parameter])
            # DDP's reducer gives a gradient the strides of its parameter if they are dense and do not
            # overlap, and contiguous strides otherwise.  empty_like follows the same rule, so comparing
            # its strides with the parameter's shows which case applies.
            dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
            if dense and not parameter.is_contiguous():
                self.strides[number] = parameter.stride()
        self.names = [slot.name for _, slot in places]
        self.runs = runs_of(places, joined=joined)
        self.joined = [
            number for run in self.runs if len(run.members) > 1 for number in run.members
        ]


@final
class Bucket:
    """A bucket of the open step; the residual uses its memory until the averages are written.

    Attributes:
        future: the future for which DDP waits.
        buffer: DDP's tensor; a COO tensor if it is the gradient of an embedding with ``sparse=True``.
        dense: ``buffer`` as a dense tensor.
    """

    def __init__(self, buffer: Tensor, places: Places) -> None:
        # Without ``devices``, torch refuses a result on a GPU.  With them, DDP's stream waits for the
        # stream on which ``complete`` is called.
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        self.buffer, self.places = buffer, places
        self.dense = buffer.to_dense() if buffer.is_sparse else buffer
        self._pieces = torch.split(self.dense.view(-1), places.sizes)

    def gradient(self, number: int) -> Tensor:
        """Return a view of a gradient in its parameter's shape and logical order.

        A bucket keeps the parameter's strides, so the elements of a channels_last weight are in memory
        order.  If they were read flat, each would get the weight decay and the saved residual of the
        wrong element.
        """
        piece, shape = self._pieces[number], self.places.parameters[number].shape
        strides = self.places.strides.get(number)
        if strides is None:
            return piece.view(shape)
        return piece.as_strided(shape, strides, piece.storage_offset())

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters with their gradients."""
        for number, parameter in enumerate(self.places.parameters):
            yield parameter, self.gradient(number)

    def parameters(self, run: Run) -> list[Tensor]:
        """Return the parameters of a run, in the order of the run."""
        return [self.places.parameters[number] for number in run.members]

    def flat(self) -> Iterator[tuple[Run, Tensor]]:
        """Yield the runs with their gradients, each 1-D and in its own memory.

        The residual keeps its old values in this memory, to undo the step (``Residual.accumulate``).
        """
        places, end = self.places, 0
        # one copy of all small parameters, in the unit's order
        small = torch.cat(self._logical(places.joined)) if places.joined else self.dense
        if len(places.joined) == len(self._pieces):
            # No large parameter has to stay in place, so the runs are copied back into the bucket, and
            # the copy is freed immediately. ``write`` later restores DDP's order.
            small = self.dense.view(-1).copy_(small)
        for run in places.runs:
            if len(run.members) == 1:
                yield run, self._logical(run.members)[0]
            else:
                start, end = end, end + run.end - run.start
                yield run, small[start:end]

    def _logical(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return flattened gradients, whose elements are in logical order, whatever the strides are."""
        pieces, odd = self._pieces, self.places.strides
        return [self.gradient(i).reshape(-1) if i in odd else pieces[i] for i in numbers]

    def write(self, averages: Sequence[Vector]) -> None:
        """Write the units' averages to the places where DDP expects them."""
        pieces, odd = self._pieces, self.places.strides
        # runs are sorted by unit, so groupby yields each unit once, and each average is split only once
        for unit, runs in groupby(self.places.runs, lambda run: run.unit):
            for run, part in parts_of(averages[unit], list(runs)):
                own = [self.gradient(i) if i in odd else pieces[i] for i in run.members]
                write_part(part, run, own)


@final
class BucketStep(Step):
    """One backward pass, bucket by bucket."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units)
        self.buckets: list[Bucket] = []
        self.waiting: list[Bucket] = []  # not yet accumulated
        self.accumulated = [0 for _ in units]  # number of parameters, by unit

    def take(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Add a bucket to this step; return the future for which DDP waits."""
        self.buckets.append(bucket)
        self.waiting.append(bucket)
        return bucket.future

    def drain(self) -> list[Bucket]:
        """Remove and return the waiting buckets, to accumulate them."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def check_complete(self) -> None:
        """Refuse a backward pass that left out parameters."""
        # this rank would never exchange a unit without all its parameters, and its peers would wait
        if all(n == len(u.slots) for n, u in zip(self.accumulated, self.units, strict=True)):
            return
        here = {name for bucket in self.buckets for name in bucket.places.names}
        missing = [slot.name for unit in self.units for slot in unit.slots if slot.name not in here]
        raise ConfigurationError(
            f"no gradient came for '{missing[0]}' ({len(missing)} parameters in all), which "
            "required one when attach was called; freeze or thaw before wrapping in DDP"
        )

    def write(self, averages: Sequence[Vector]) -> None:
        """Write the averages of all units into the buckets."""
        for bucket in self.buckets:
            bucket.write(averages)

    def complete(self) -> None:
        """Hand the buckets back to DDP, each in its own layout."""
        for bucket in self.buckets:
            dense = bucket.dense
            # If a bucket was in COO, DDP expects COO back.  Zero rows are left out, because a sparse
            # optimizer steps every row that it is given.
            bucket.future.set_result(dense.to_sparse(1) if bucket.buffer.is_sparse else dense)

    def zero_(self) -> None:
        """Zero the gradients of a refused step.

        The buckets' memory holds old residuals, which were swapped in and then copied back, or gradients
        of this rank alone.  Neither may be applied, but DDP will copy the memory to ``parameter.grad``.
        """
        for bucket in self.buckets:
            bucket.dense.zero_()
