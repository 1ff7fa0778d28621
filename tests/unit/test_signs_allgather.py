"""Allgather of whole vectors in few bits: what was decoded is summed, and rounding kept."""

from functools import partial

import pytest
import torch

from sparsync import DenseVector, SparseVector
from sparsync.collectives import Allgather
from sparsync.errors import WireFormatError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import Algorithm
from sparsync.selection import Everything
from sparsync.transports.communicator import rounds
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit
from sparsync.wire import Qsgd, Whole
from sparsync.wire.quantised import Signs

from .strategies import FLOATS, same
from .stream_collectives import reduce_all
from .wire_messages import rounded

SIZE, STEPS = 1000, 5
SUM_SIGNS = partial(Allgather, Signs())
SIGNS = Algorithm("signs", Everything, SUM_SIGNS)

each_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])


def noise(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SIZE, generator=generator).to(dtype)


def fold(tensors) -> torch.Tensor:
    """The left fold in rank order."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total


@each_world_size
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


@each_world_size
def test_nothing_appears_and_nothing_is_lost_over_steps(world_size):
    async def program(comm):
        unit = Unit((Slot("w", 0, SIZE),), torch.float32, torch.device("cpu"))
        reducer, totals = Reducer(comm, [unit], SIGNS, 1.0), []
        for step in range(STEPS):
            (average,) = await reducer.reduce([noise(comm.rank, step)])
            totals.append(average.values.clone())
        return totals, reducer.residuals[0].value.clone()

    results = simulate(program, world_size).results
    for totals, residual in results:
        assert all(torch.equal(a, b) for a, b in zip(totals, results[0][0], strict=True))
        assert 0 < residual.norm() < 3 * SIZE**0.5, "nothing is kept, or it grows"
    given = sum(noise(r, s).double() for r in range(world_size) for s in range(STEPS))
    arrived = world_size * sum(total.double() for total in results[0][0])
    kept = sum(residual.double() for _, residual in results)
    torch.testing.assert_close(arrived + kept, given, rtol=0, atol=1e-5 * world_size)


@each_world_size
def test_the_messages_are_as_few_and_as_long_as_promised(world_size):
    vectors = [DenseVector(noise(rank)) for rank in range(world_size)]
    for ledger in reduce_all(SUM_SIGNS, vectors).ledgers:
        traffic = ledger.total()
        assert traffic.received == (world_size - 1) * Signs().nbytes(SIZE, SIZE) == traffic.sent
        assert traffic.messages_sent == len(list(rounds(world_size)))
        assert set(ledger.stages) >= {"pack", "unpack"}


def test_a_sparse_vector_counts_with_its_zeros():
    sparse = SparseVector(torch.tensor([1, 2]), torch.tensor([3.0, -5.0]), 4)
    (result,) = reduce_all(SUM_SIGNS, [sparse]).results
    assert result.total.values.tolist() == [2.0, 2.0, -2.0, 2.0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(broken):
    tensors = [noise(rank) for rank in range(3)]
    tensors[1][300] = broken
    for result in reduce_all(SUM_SIGNS, [DenseVector(t) for t in tensors]).results:
        assert result.total.isfinite().logical_not().nonzero()[:, 0].tolist() == [*range(256, 512)]


def test_codecs_draw_for_the_rank_and_the_step():
    codec = Qsgd(4, scale="max")
    tensors = [noise(0)] * 2
    make = partial(Allgather, codec)
    results = reduce_all(make, [DenseVector(t) for t in tensors], step=3).results
    for rank, result in enumerate(results):
        same(result.delivered.values, rounded(codec.seeded(rank, 3), noise(0)))


def test_with_an_exact_codec_all_is_delivered():
    tensors = [noise(rank) for rank in range(3)]
    make = partial(Allgather, Whole())
    for mine, result in zip(
        tensors, reduce_all(make, [DenseVector(t) for t in tensors]).results, strict=True
    ):
        assert result.delivered.values is mine  # the residual is empty then
        same(result.total.values, fold(tensors))


def test_ranks_of_different_sizes_are_refused():
    vectors = [DenseVector(torch.ones(7)), DenseVector(torch.ones(8))]  # in as many bytes
    with pytest.raises(WireFormatError, match=r"region of (7|8) elements, expected (8|7)"):
        reduce_all(SUM_SIGNS, vectors)
