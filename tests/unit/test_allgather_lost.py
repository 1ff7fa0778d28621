"""Allgather with a codec that rounds: who keeps the error, or that it is reported as lost."""

from functools import partial

import pytest
import torch

from sparsync import SparseVector
from sparsync.collectives.allgather import Allgather
from sparsync.testing import check_collective
from sparsync.wire import Coo, Packed
from sparsync.wire.sign_mean import SignMean

from .stream_collectives import reduce_all

SIZE, LAYERS, COUNT = 40, (24, 0, 16), 8


def one_signed(rank: int) -> SparseVector:
    """Eighths at eight places of one sign, four in each layer: means and sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    low, high = (torch.randperm(n, generator=generator)[:4].sort().values for n in (24, 16))
    values = torch.randint(1, 40, (COUNT,), generator=generator) / 8
    return SparseVector(torch.cat([low, high + 24]), values, SIZE)


def dense_sum(vectors) -> torch.Tensor:
    return torch.stack([vector.to_dense() for vector in vectors]).sum(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_an_error_that_nobody_keeps_is_lost(world_size):
    selected = [one_signed(rank) for rank in range(world_size)]
    make = partial(Allgather, SignMean("coo", LAYERS), keep_error=False)
    results = reduce_all(make, selected, k=COUNT).results
    for mine, result in zip(selected, results, strict=True):
        decoded = SignMean("coo", LAYERS).encode(mine).decoded
        assert torch.equal(result.delivered.to_dense(), mine.to_dense())
        assert torch.equal(result.lost.to_dense(), mine.to_dense() - decoded.to_dense())
        assert result.lost.nnz > 0
        assert torch.equal(result.total.to_dense(), results[0].total.to_dense())
    arrived = dense_sum(r.delivered for r in results) - dense_sum(r.lost for r in results)
    assert torch.equal(arrived, results[0].total.to_dense())


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_an_error_that_is_kept_is_not_delivered(world_size):
    selected = [one_signed(rank) for rank in range(world_size)]
    results = reduce_all(partial(Allgather, SignMean("packed", LAYERS)), selected, k=COUNT).results
    for mine, result in zip(selected, results, strict=True):
        assert result.lost is None
        decoded = SignMean("coo", LAYERS).encode(mine).decoded
        assert torch.equal(result.delivered.to_dense(), decoded.to_dense())
        assert torch.equal(result.total.to_dense(), dense_sum(r.delivered for r in results))


def test_what_the_cap_cuts_off_is_neither_delivered_nor_lost():
    selected = [one_signed(rank) for rank in range(3)]
    results = reduce_all(partial(Allgather, SignMean(), keep_error=False), selected, k=5).results
    for mine, result in zip(selected, results, strict=True):
        assert torch.equal(result.delivered.indices, mine.top(5).indices)
        assert torch.equal(result.delivered.values, mine.top(5).values)
        assert set(result.lost.indices.tolist()) <= set(mine.top(5).indices.tolist())


def test_nothing_is_lost_where_the_codec_is_exact():
    selected = [one_signed(rank) for rank in range(3)]
    make = partial(Allgather, Coo(), keep_error=False)
    assert [r.lost for r in reduce_all(make, selected, k=COUNT).results] == [None] * 3


@pytest.mark.parametrize("codec", [SignMean("packed"), Packed("int8")])
@pytest.mark.parametrize("options", [{}, {"keep_error": False}, {"keep_error": False, "cap": None}])
def test_the_contract_holds(codec, options):
    make = partial(Allgather, codec, **options)
    check_collective(make, rounding=True, world_sizes=(1, 3))


def test_for_layers_reaches_the_codec_and_keeps_the_rest():
    collective = Allgather(SignMean("packed"), 2.0, keep_error=False).for_layers(LAYERS)
    assert (collective.codec.indices, collective.codec.layers) == ("packed", LAYERS)
    assert (collective.cap, collective.keep_error) == (2.0, False)
    kept = Allgather(Coo()).for_layers(LAYERS)
    assert (type(kept.codec), kept.cap, kept.keep_error) == (Coo, 1.0, True)


def test_layers_of_a_fused_group_have_a_mean_each():
    def make():
        return Allgather(SignMean(), keep_error=False).for_layers((2, 2))

    vector = SparseVector(torch.arange(4), torch.tensor([1.0, 3.0, 10.0, 30.0]), 4)
    (result,) = reduce_all(make, [vector], k=4).results
    assert result.total.to_dense().tolist() == [2.0, 2.0, 20.0, 20.0]
    assert result.lost.to_dense().tolist() == [-1.0, 1.0, -10.0, 10.0]


@pytest.mark.parametrize("form", ["coo", "packed"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_bytes_received_are_the_messages_of_the_others(world_size, form):
    codec = SignMean(form, LAYERS)
    simulation = reduce_all(
        partial(Allgather, codec), [one_signed(r) for r in range(world_size)], k=COUNT
    )
    received = (world_size - 1) * codec.nbytes(COUNT, SIZE)
    assert [ledger.total().received for ledger in simulation.ledgers] == [received] * world_size
