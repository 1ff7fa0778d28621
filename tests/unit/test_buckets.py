"""Test that gradients in buckets reach the units, and averages the buckets, with any joined runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsync.gradients import runs
from sparsync.gradients.buckets import Bucket, Places
from sparsync.sparse import DenseVector, SparseVector
from sparsync.units import plan_units

SHAPES = ((3,), (2, 3, 4, 5), (7,), (40, 9), (0,), (11,), (1,), (5, 2, 2, 2), (6,), (8,))
ORDERS = {"reverse": list(range(9, -1, -1)), "mixed": [8, 9, 4, 3, 5, 6, 7, 0, 1, 2]}


def in_memory(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, as in a bucket."""
    if tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize:
        return tensor.flatten()  # DDP keeps no strides that leave gaps
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).clone()


@pytest.mark.parametrize("small", [1 << 15, 100, 0])
@pytest.mark.parametrize("unit_bytes", [None, 100])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_arrive_and_averages_return(
    monkeypatch: pytest.MonkeyPatch, order: str, unit_bytes: int | None, small: int
) -> None:
    monkeypatch.setattr(runs, "_SMALL", small)
    parameters = [torch.empty(shape) for shape in SHAPES]
    for odd in (1, 7):
        parameters[odd] = parameters[odd].to(memory_format=torch.channels_last)
    parameters[3] = torch.empty(9, 80).t()[::2]
    units = plan_units([(str(i), p) for i, p in enumerate(parameters)], unit_bytes)
    where = {int(slot.name): (u, slot) for u, unit in enumerate(units) for slot in unit.slots}
    place = {parameters[number]: its for number, its in where.items()}
    arriving = [parameters[number] for number in ORDERS[order]]
    gradients = {p: torch.randn(p.shape) for p in arriving}

    def fill(values: dict[Tensor, Tensor]) -> Tensor:
        return torch.cat([in_memory(p.copy_(values[p])) for p in arriving])

    places = Places(arriving, place, joined=True)
    bucket = Bucket(fill(gradients), places)
    assert all(torch.equal(view, gradients[p]) for p, view in bucket.pairs())

    flats = [torch.full((unit.size,), torch.nan) for unit in units]
    for run, gradient in bucket.flat():
        flats[run.unit][run.start : run.end] = gradient
        gradient.fill_(torch.inf)  # the residual keeps the data for undoing the step there
    assert small == 0 or len(places.runs) < len(SHAPES)
    for flat, unit in zip(flats, units, strict=True):
        whole = [gradients[parameters[int(slot.name)]].flatten() for slot in unit.slots]
        assert torch.equal(flat, torch.cat(whole))

    averages = [torch.randn(unit.size) * (torch.rand(unit.size) < 0.3) for unit in units]
    written = {
        p: averages[u][slot.start : slot.start + slot.size].view(p.shape)
        for p, (u, slot) in place.items()
    }
    for made in (SparseVector.from_dense, DenseVector):
        bucket.dense.fill_(torch.nan)
        bucket.write([made(average) for average in averages])
        assert torch.equal(bucket.dense, fill(written))
