"""Show the effect of WAGMA-SGD's switches alpha and beta (section 4) by mixing matrices."""

import pytest
import torch

from sparsync.averaging import LocalSgd
from sparsync.published.baselines import Dpsgd
from sparsync.published.baselines.gossip import Exponential, Graph, Ring
from sparsync.published.wagma import Wagma
from sparsync.transports.sim import simulate
from tests.mixing import group_mixing_matrix, mixing_matrix, spectral_gap

P = 16
PHASES = 4  # log2 P


def product(matrices):
    total = torch.eye(P, dtype=torch.float64)
    for matrix in matrices:
        total = matrix @ total
    return total


def of_groups(size, start=0):
    return product(group_mixing_matrix(P, size, step) for step in range(start, start + PHASES))


def of_graph(graph, start=0):
    return product(mixing_matrix(graph, P, step) for step in range(start, start + PHASES))


class RandomPairs(Graph):
    """A random perfect matching per step, as in AD-PSGD."""

    def neighbours(self, rank, world_size, step):
        order = torch.randperm(world_size, generator=torch.Generator().manual_seed(step)).tolist()
        return [order[order.index(rank) ^ 1]]


def matrix_of(make, steps):
    """Return the effect of a scheme on the models of ranks that are never late, as a matrix."""

    async def program(comm):
        averager, vector = make(), torch.eye(P, dtype=torch.float64)[comm.rank]
        await averager.begin(comm, torch.zeros(P, dtype=torch.float64), 0)
        for step in range(steps):
            await comm.compute(1.0)
            vector = await averager.average(comm, vector, step)
        return vector

    return torch.stack(simulate(program, P).results)


def test_neither_is_local_sgd():
    def wagma():
        return Wagma(group_size=1, sync_period=3)

    for steps in (2, 3):
        assert torch.equal(matrix_of(wagma, steps), matrix_of(lambda: LocalSgd(period=3), steps))


@pytest.mark.parametrize("grouping", ["wait-avoiding", "synchronous"])
def test_what_runs_is_what_the_matrices_say(grouping):
    def make():
        return Wagma(grouping=grouping, group_size=2, sync_period=None)

    torch.testing.assert_close(matrix_of(make, PHASES), of_groups(2))


@pytest.mark.parametrize("start", range(PHASES))
def test_pairs_mix_as_sgp_with_one_neighbour(start):
    """The matrices differ (except one), but both schemes reach the mean after log2 P steps."""
    mean = torch.full((P, P), 1 / P, dtype=torch.float64)
    assert torch.equal(of_groups(2, start), mean)
    assert torch.equal(of_graph(Exponential(), start), mean)
    same = torch.equal(group_mixing_matrix(P, 2, start), mixing_matrix(Exponential(), P, start))
    assert same == (start == PHASES - 1)  # a hop of P / 2 is the same in both directions


def test_the_ring_of_dpsgd_and_the_random_pairs_of_adpsgd_mix_more_slowly():
    """ "Similar" holds for the volume of a step (O(1) models), not for how far an update travels."""
    ring, pairs = spectral_gap(of_graph(Ring())), spectral_gap(of_graph(RandomPairs()))
    assert spectral_gap(of_groups(2)) == pytest.approx(1.0)
    assert ring == pytest.approx(1 - ((1 + 2 * torch.cos(torch.tensor(2 * torch.pi / P))) / 3) ** 4)
    assert 0.15 < ring < 0.25
    assert pairs < 0.8
    torch.testing.assert_close(matrix_of(Dpsgd, PHASES), of_graph(Ring()))
