"""The volume of Budgeted stays below the COO lower bound of Theorem 3.1 on every step, on any input."""

import pytest
import torch

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives import Budgeted
from sparsync.collectives.costs import Job, lower_bound_words
from sparsync.presets import resolve
from sparsync.sparse import SparseVector
from sparsync.transports.sim import simulate
from sparsync.wire import Packed

from .measured import ADVERSARIAL, EXCHANGEABLE, phases, words

SIZE, DENSITY = 1_000_000, 0.01
SLOW = pytest.mark.slow
SIZE_PER_RANK = 31_250  # k / P is 312


@pytest.mark.parametrize("kind", EXCHANGEABLE + ADVERSARIAL)
@pytest.mark.parametrize("world_size", [4, 8, *(pytest.param(p, marks=SLOW) for p in (16, 32))])
def test_budgeted_volume_is_below_the_lower_bound_for_coo(world_size, kind):
    """The claim is max(sent, received) / 4 <= 2 k (P - 1) / P words, including headers and histograms."""
    size = SIZE_PER_RANK * world_size
    ranks = SimulatedRanks(Case("budgeted", world_size, size, DENSITY, kind))
    k = ranks.case.k
    for _ in range(3):
        simulation = ranks.step()
        assert words(simulation) <= lower_bound_words(k, world_size)
        reduced = int(sum(e.selected.to_dense() for e in simulation.results).count_nonzero())
        for evidence in simulation.results:
            assert evidence.selected.nnz == min(k, int(evidence.accumulated.count_nonzero()))
            assert evidence.total.nnz >= 0.98 * min(k, reduced)


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_its_cost_form_is_what_it_sends(values):
    algorithm = resolve("budgeted", codec=Packed(values))
    ranks = SimulatedRanks(Case(algorithm, 8, SIZE, DENSITY, "uniform"))
    expected = Budgeted(Packed(values)).cost(Job(SIZE, ranks.case.k, 8)).words
    for _ in range(2):
        # the formula is a mean, but this is the busiest rank
        assert words(ranks.step()) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_tight_budget_binds_and_nothing_is_lost(world_size):
    """With half the bytes that the entries need, some entries are left out, but the bytes suffice."""
    algorithm = resolve("budgeted", budget=0.8)
    case = Case(algorithm, world_size, 512 * 100 * world_size, 0.01, "uniform")
    ranks = SimulatedRanks(case)
    for _ in range(3):
        simulation = ranks.step()
        assert words(simulation) <= 0.8 * case.k * (world_size - 1) / world_size
        assert 0.3 * case.k < simulation.results[0].total.nnz < case.k
        given = sum(e.accumulated.double() for e in simulation.results)
        kept = sum(e.residual.double() for e in simulation.results)
        total = simulation.results[0].total.to_dense().double()
        assert torch.allclose(given, total + kept, rtol=0, atol=1e-5)


def strided(world_size, stride):
    """Let every rank select a column of a matrix with rows of ``stride`` elements."""
    size = 256 * world_size * stride
    indices = torch.arange(0, size, stride)
    generator = torch.Generator().manual_seed(0)
    return SparseVector(indices, torch.randn(indices.numel(), generator=generator), size)


@pytest.mark.parametrize("stride", [1, 8, 64, 1024])
@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_no_stride_of_the_support_loads_one_owner(world_size, stride):
    """Dealing by ``i mod P`` would send every entry of such a column to one rank."""
    selected = strided(world_size, stride)

    async def program(comm):
        await Budgeted().reduce(comm, selected, selected.nnz, step=0)
        return comm.ledger.by_phase()["split"].received

    received = simulate(program, world_size).results
    assert max(received) < 1.25 * sum(received) / world_size


def test_two_rounds_and_nothing_else():
    ranks = SimulatedRanks(Case("budgeted", 4, 100_000, 0.02, "uniform"))
    for _ in range(3):
        simulation = ranks.step()
        assert phases(simulation) == {"split", "allgather"}
        sent = {ledger.total().messages_sent for ledger in simulation.ledgers}
        assert sent == {6}, "two messages to each of three others"


EXACT = resolve("budgeted", codec=Packed("fp32"), budget=4.0)  # room for values of 4 bytes


@pytest.mark.parametrize("kind", EXCHANGEABLE + ADVERSARIAL)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_total_is_the_exact_top_k_of_the_sum(world_size, kind):
    """Owners' shares of the top-k differ only by chance, within the four deviations allowed."""
    ranks = SimulatedRanks(Case(EXACT, world_size, 100_000, 0.02, kind))
    for _ in range(3):
        results = ranks.step().results
        reduced = SparseVector.merge([e.selected for e in results])
        best = reduced.top(ranks.case.k)
        assert torch.equal(results[0].total.indices, best.indices)
        assert torch.equal(results[0].total.values, best.values)


@pytest.mark.parametrize("k", [1, 2, 5, 30, 300])
def test_the_total_is_exact_for_few_entries_too(k):
    ranks = SimulatedRanks(Case(EXACT, 8, 20_000, k / 20_000, "uniform"))
    for _ in range(5):
        results = ranks.step().results
        best = SparseVector.merge([e.selected for e in results]).top(k)
        assert torch.equal(results[0].total.indices, best.indices)


def test_delivered_holds_the_rounding_errors_of_the_owner():
    async def program(comm):
        mine = SparseVector(torch.tensor([3]), torch.tensor([1.0 + 2.0**-12]), 8)
        return await Budgeted().reduce(comm, mine, k=1, step=0)

    results = simulate(program, 3).results
    total = results[0].total.values
    assert total.tolist() == [3.0], "bf16 has 8 bits"
    delivered = [r.delivered.to_dense()[3].item() for r in results]
    assert sum(delivered) == 3.0
    assert delivered == [1.0, 1.0, 1.0], "senders keep what they rounded, the owner its sum's rest"
