"""Allgather with a codec that rounds: who keeps the error, or that it is reported as lost."""

from functools import partial

import pytest
import torch

from sparsync import DenseVector, SparseVector
from sparsync.collectives.allgather import Allgather
from sparsync.errors import WireFormatError
from sparsync.wire import Coo, Qsgd
from sparsync.wire.quantised import Signs
from sparsync.wire.sign_mean import SignMean

from .strategies import FLOATS, same
from .stream_collectives import reduce_all
from .wire_messages import rounded

SIZE, LAYERS, COUNT = 40, (24, 0, 16), 8
SUM_SIGNS = partial(Allgather, Signs())


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


def test_what_the_cap_cuts_off_is_neither_delivered_nor_lost():
    selected = [one_signed(rank) for rank in range(3)]
    results = reduce_all(partial(Allgather, SignMean(), keep_error=False), selected, k=5).results
    for mine, result in zip(selected, results, strict=True):
        assert torch.equal(result.delivered.indices, mine.top(5).indices)
        assert torch.equal(result.delivered.values, mine.top(5).values)
        assert set(result.lost.indices.tolist()) <= set(mine.top(5).indices.tolist())


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


# ---- whole vectors ----------------------------------------------------------------------------------


def noise(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1000, generator=generator).to(dtype)


def fold(tensors) -> torch.Tensor:
    """The left fold in rank order."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_total_is_the_fold_of_what_was_decoded(world_size, dtype):
    tensors = [noise(rank, dtype=dtype) for rank in range(world_size)]
    results = reduce_all(SUM_SIGNS, [DenseVector(t) for t in tensors]).results
    decoded = [rounded(Signs(), t) for t in tensors]
    for rank, result in enumerate(results):
        same(result.delivered.values, decoded[rank])
        same(result.total.values, fold(decoded))
        assert result.lost is None
        assert not torch.equal(result.delivered.values, tensors[rank]), "not quantised"
        result.total.values.zero_()  # the caller may: no memory is shared with what was delivered
        same(result.delivered.values, decoded[rank])


def test_a_sparse_vector_counts_with_its_zeros():
    sparse = SparseVector(torch.tensor([1, 2]), torch.tensor([3.0, -5.0]), 4)
    (result,) = reduce_all(SUM_SIGNS, [sparse]).results
    assert result.total.values.tolist() == [2.0, 2.0, -2.0, 2.0]


def test_codecs_draw_for_the_rank_and_the_step():
    codec = Qsgd(4, scale="max")
    tensors = [noise(0)] * 2
    make = partial(Allgather, codec)
    results = reduce_all(make, [DenseVector(t) for t in tensors], step=3).results
    for rank, result in enumerate(results):
        same(result.delivered.values, rounded(codec.seeded(rank, 3), noise(0)))


def test_ranks_of_different_sizes_are_refused():
    vectors = [DenseVector(torch.ones(7)), DenseVector(torch.ones(8))]  # in as many bytes
    with pytest.raises(WireFormatError, match=r"region of (7|8) elements, expected (8|7)"):
        reduce_all(SUM_SIGNS, vectors)
