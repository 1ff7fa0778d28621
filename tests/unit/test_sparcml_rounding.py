"""SparCML's collectives with codecs that round: equal totals, and every error kept exactly once."""

from functools import partial

import pytest
import torch

from sparsync import testing
from sparsync.collectives.sparcml import Dynamic
from sparsync.sparse import DenseVector
from sparsync.wire import Codec, Encoded, Packed, StreamCodec, Whole
from sparsync.wire.base import Header

from .stream_collectives import FACTORIES, reduce_all

each = pytest.mark.parametrize("name", FACTORIES)


class Noisy(Codec):
    """Shifts every value by up to two eighths, with a seed per message source and step."""

    format = 250

    def __init__(self, seed=0):
        self.seed = seed

    def seeded(self, rank, step):
        return Noisy(seed=1000 * step + rank + 1)

    def encode(self, vector):
        generator = torch.Generator().manual_seed(self.seed)
        rounded = vector.values + torch.randint(-2, 3, vector.values.shape, generator=generator) / 8
        return Encoded(self.message(self.start(vector), rounded), DenseVector(rounded))

    def decode(self, payload, size):
        header, body = self.body(payload, size)
        return DenseVector(body.clone().view(header.dtype))

    def header(self, nnz, size, dtype):
        return Header(self.format, dtype, size)

    def layout(self, header):
        return Whole().layout(header)


@each
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 7, 8])
def test_what_is_rounded_is_kept_once(name, world_size):
    generator = torch.Generator().manual_seed(world_size)
    # eighths: all sums and differences are exact
    tensors = [torch.randint(-40, 40, (60,), generator=generator) / 8 for _ in range(world_size)]
    make = partial(FACTORIES[name], StreamCodec(dense=Noisy(), factor=0.4), cap=None)
    results = reduce_all(make, [DenseVector(t) for t in tensors]).results
    totals = [r.total.to_dense() for r in results]
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert torch.equal(sum(r.delivered.to_dense() for r in results), totals[0])
    dense_is_used = name != "split-allgather"
    assert torch.equal(totals[0], sum(tensors)) != dense_is_used


def test_the_owner_of_a_region_keeps_what_is_rounded_off_its_sum():
    tensors = [torch.full((40,), 0.25) for _ in range(4)]
    make = partial(Dynamic, StreamCodec(dense=Noisy()), cap=None, op="sum", always_dense=True)
    tensors[0][::2] = 0.5
    results = reduce_all(make, [DenseVector(t) for t in tensors]).results
    for rank, result in enumerate(results):
        error = result.delivered.to_dense() - tensors[rank]
        owned = slice(10 * rank, 10 * rank + 10)
        assert error[owned].count_nonzero() > 0
        error[owned] = 0
        assert error.count_nonzero() == 0


@pytest.mark.parametrize("values", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic", "ring"])
def test_the_contract_holds_with_a_rounding_sparse_codec(name, values):
    make = partial(FACTORIES[name], StreamCodec(Packed(values)))
    testing.check_collective(make, rounding=True, world_sizes=(3,))
