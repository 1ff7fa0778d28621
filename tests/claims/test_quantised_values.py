"""Quantised values (SparCML, section 6); "orthogonal to gradient sparsification" (Ok-Topk, section 2)."""

import pytest
import torch

from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.published.oktopk import OkTopk, oktopk
from sparsync.published.oktopk.allreduce import bound_words
from sparsync.sparse import SparseVector
from sparsync.transports.sim import simulate
from sparsync.units import plan_units
from sparsync.wire import Packed, Qsgd, SparseQsgd

from .measured import k_for, steps, words

RANKS = 4
SIZE = RANKS * 1024  # a region has one bucket of 1024 or two of 512
DRAWS = 60
REDUCED = [(bits, block) for bits in (2, 4) for block in (512, 1024)]


def gradients():
    return [
        torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)
    ]


def mean_and_deviation(totals):
    """Return the mean of many draws, and its standard error (root mean square over the elements)."""
    totals = torch.stack(totals).double()
    return totals.mean(0), float(totals.var(0).mean().sqrt()) / len(totals) ** 0.5


# ---- SparCML, section 6: the dense half of DSAR in 2 and 4 bits --------------------------------------


def reduced_steps(bits, block, count, **options):
    """Reduce the same gradients on every step; return the sums, and all ranks' losses and residuals."""
    algorithm = resolve(
        "sparcml", quantize="reduced", bits=bits, quantization_block=block, **options
    )

    async def program(comm):
        reducer = Reducer(comm, plan_units([("w", torch.zeros(SIZE))]), algorithm, density=1.0)
        found = []
        for _ in range(count):
            buffer = gradients()[comm.rank]
            await reducer.reduce([buffer])
            lost = [vector.to_dense() for vector in reducer.lost]
            kept = reducer.residuals[0].value
            found.append((buffer, lost, None if kept is None else kept.clone()))
        return found, comm.ledger.by_phase()["allgather"]

    return simulate(program, RANKS).results


@pytest.mark.fast(1)
@pytest.mark.parametrize(("bits", "block"), REDUCED)
def test_reduced_sums_are_quantised_without_bias_and_their_errors_are_lost(bits, block):
    """ "Lower-precision data representation [...] only in the second part", here with 2 and 4 bits."""
    ranks = reduced_steps(bits, block, DRAWS)
    exact = torch.stack(gradients()).sum(0)
    totals = [total for total, _, _ in ranks[0][0]]
    mean, error = mean_and_deviation(totals)
    off = (mean - exact).norm() / SIZE**0.5
    assert off == pytest.approx(error, rel=0.1)  # no larger than expected by chance
    for step in range(DRAWS):
        lost = torch.stack([sum(found[step][1]) for found, _ in ranks])
        assert all(found[step][2] is None or not found[step][2].any() for found, _ in ranks)
        assert torch.allclose(totals[step] + lost.sum(0), exact, atol=1e-5)
        # the owner of a region loses the errors of its sums; no other errors are lost
        for rank, mine in enumerate(lost):
            own = slice(rank * SIZE // RANKS, (rank + 1) * SIZE // RANKS)
            assert mine[own].any()
            assert mine.count_nonzero() == mine[own].count_nonzero()


@pytest.mark.parametrize(("bits", "block"), REDUCED)
def test_the_last_step_of_dsar_is_shorter_by_a_constant(bits, block):
    """ "Reduce the bandwidth cost of this last step by a constant corresponding to the quantization." """
    (_, traffic), *_ = reduced_steps(bits, block, 1)
    region = SIZE // RANKS
    message = Qsgd(bits, block=block).nbytes(region, region)
    assert traffic.received == (RANKS - 1) * message
    scales = 4 * region // block
    assert message == 16 + region * bits // 8 + scales


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "block"), REDUCED)
def test_errors_that_are_kept_do_not_explode(bits, block):
    """Shrunk values are a contraction, so the residual stays bounded and nothing is lost."""
    ranks = reduced_steps(bits, block, 60, keep_error=True)
    norms = [float(torch.stack([found[step][2] for found, _ in ranks]).norm()) for step in (29, 59)]
    assert not ranks[0][0][-1][1]
    assert norms[1] < 1.5 * norms[0]


# ---- Ok-Topk with a codec that rounds ----------------------------------------------------------------

CODECS = {
    "bf16": (Packed(), True, 0.41),
    "int8": (Packed("int8"), True, 0.28),
    "qsgd, 8 bits": (SparseQsgd(8, scale="max"), False, 0.28),
    "qsgd, 4 bits": (SparseQsgd(4, scale="max"), False, 0.24),
    "qsgd, 2 bits": (SparseQsgd(2, scale="max"), False, 0.21),
}


@pytest.mark.parametrize("world_size", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODECS)
def test_oktopk_sends_less_with_quantised_values(name, world_size):
    codec, keep_error, part = CODECS[name]
    *_, coo = steps(oktopk(), world_size, "uniform", 2)
    *_, rounded = steps(oktopk(codec=codec, keep_error=keep_error), world_size, "uniform", 2)
    assert words(rounded) <= bound_words(k_for(world_size), world_size, exchangeable=True)
    assert words(rounded) / words(coo) == pytest.approx(part, abs=0.02)


@pytest.mark.parametrize(
    ("bits", "balance_trigger"),
    [(4, 4.0), *(pytest.param(bits, 1.0, marks=pytest.mark.slow) for bits in (2, 8))],
)
def test_oktopk_with_qsgd_is_unbiased_and_reports_its_loss(bits, balance_trigger):
    """Entries are rounded on the way to their owner, and sums to all, some twice if balanced."""
    size = k = 601  # no four regions are equally full
    given = [vector[:size] for vector in gradients()]

    async def program(comm):
        collective = OkTopk(
            SparseQsgd(bits, scale="max"), keep_error=False, balance_trigger=balance_trigger
        )
        mine, found = SparseVector.from_dense(given[comm.rank]), []
        for step in range(DRAWS):
            reduced = await collective.reduce(comm, mine, k, step)
            assert reduced.lost is not None
            assert torch.equal(reduced.delivered.to_dense(), given[comm.rank])
            found.append((reduced.total.to_dense(), reduced.lost.to_dense()))
        balanced = "balance" in comm.ledger.by_phase()
        assert balanced == (balance_trigger == 1.0)
        return found

    ranks = simulate(program, RANKS).results
    exact, totals = torch.stack(given).sum(0), [total for total, _ in ranks[0]]
    mean, error = mean_and_deviation(totals)
    off = (mean - exact).norm() / size**0.5
    assert off == pytest.approx(error, rel=0.15)
    for step in range(0, DRAWS, 20):
        lost = sum(found[step][1] for found in ranks)
        assert torch.allclose(totals[step] + lost, exact, atol=1e-5)


def test_oktopk_refuses_to_keep_an_error_that_would_explode():
    with pytest.raises(ValueError, match=r"OkTopk: the error of SparseQsgd.*give keep_error=False"):
        OkTopk(SparseQsgd(4))
    OkTopk(SparseQsgd(4, shrink=True))
    OkTopk(SparseQsgd(4, scale="max", block=256))
