"""Ok-Topk "incurs less than 6k communication volume" (section 3, Equation 3).

Here the preset "oktopk" must keep to this on every step, per *requested* k, in max(sent, received)
over ranks, including headers and histograms. The claim is for k / P >= 256, k / n = 1/32, and
supports that change little while boundaries are kept ("changes slowly during training", section
3.1.1).
"""

import pytest
import torch

from sparsync.collectives.costs import lower_bound_words
from sparsync.published.oktopk import OkTopk, oktopk
from sparsync.published.oktopk.allreduce import bound_words
from sparsync.selection import Exact
from sparsync.transports.sim import simulate

from .measured import (
    ADVERSARIAL,
    EXCHANGEABLE,
    FEW,
    RANKS,
    histograms,
    k_for,
    oktopk_step,
    steps,
    words,
)

REPARTITION = 2  # steps 0 and 2 cut regions, 1 reuses them
STEPS = 3


TAKES_ALL = pytest.mark.xfail(
    strict=True, reason="the entries alone take the whole bound of 4 k words: see the next test"
)
CASES = [
    *((kind, p) for kind in EXCHANGEABLE for p in FEW),
    *((kind, p) for kind in ADVERSARIAL for p in FEW if (kind, p) != ("dominated", 2)),
    *((kind, p) for kind in ("one-region", "dominated") for p in (5, 7, 12)),
    pytest.param("dominated", 2, marks=TAKES_ALL),
    *(
        pytest.param(kind, p, marks=pytest.mark.slow)
        for kind in EXCHANGEABLE + ADVERSARIAL
        for p in (31, 32)
    ),
]


@pytest.mark.fast(12)
@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_oktopk_volume_is_below_6k(kind, world_size):
    """The bound is 6 k (P - 1) / P for exchangeable inputs, whose ranks can be permuted freely.

    It is larger for adversarial inputs, where one rank may own none of the entries that it
    selected, and another rank all entries that are kept.
    """
    k, exchangeable = k_for(world_size), kind in EXCHANGEABLE
    bound = bound_words(k, world_size, exchangeable=exchangeable)
    assert bound == pytest.approx(6 * k - (6 if exchangeable else 4) * k / world_size)
    for simulation in steps(oktopk(repartition_period=REPARTITION), world_size, kind, STEPS):
        assert words(simulation) <= bound


def test_two_ranks_of_which_one_dominates_need_4k_words_and_the_histograms():
    """The excluded case has P = 2, disjoint supports, and one rank whose values dominate.

    Each rank sends all its k entries to the other rank, and the owner of the dominating ones sends k
    back: the entries alone take 4 k words, which is the bound 6 k - 4 k / P.
    """
    k = k_for(2)
    bound = bound_words(k, 2, exchangeable=False)
    assert bound == 4 * k
    overhead = 2 * histograms(k, 2, refinements=3).words + 16
    for simulation in steps(oktopk(repartition_period=REPARTITION), 2, "dominated", STEPS):
        assert bound < words(simulation) <= bound + overhead


@pytest.mark.parametrize("world_size", RANKS)
def test_the_volume_has_its_closed_form(world_size):
    k = k_for(world_size)
    _, simulation = steps("oktopk", world_size, "uniform", 2)
    form = oktopk_step(k, world_size, refinements=1)
    assert words(simulation) == pytest.approx(form.words, rel=0.06)  # cuts are 1/16 fine
    assert lower_bound_words(k, world_size) <= words(simulation)


@pytest.mark.parametrize("world_size", [4, 16])
def test_even_regions_exceed_the_bound(world_size):
    """Negative control: without balanced regions, the owner of region 0 receives all entries."""
    bound = bound_words(k_for(world_size), world_size, exchangeable=True)
    (simulation,) = steps(oktopk(balanced_split=False), world_size, "one-region", 1)
    assert words(simulation) > 1.3 * bound


@pytest.mark.parametrize(("trigger", "period"), [(1.5, 64), (None, 2)])
def test_supports_that_move_exceed_the_bound_until_the_next_repartition(trigger, period):
    """Negative control: boundaries that were cut for other supports balance nothing.

    If repartitioning is triggered, the next step cuts new boundaries; as published, the next period
    does.
    """
    world_size, k = 8, k_for(8)
    size = 32 * k
    bound = bound_words(k, world_size, exchangeable=True)
    collectives = [
        OkTopk(repartition_period=period, repartition_trigger=trigger) for _ in range(world_size)
    ]

    def moved_to(start, rank):
        values = torch.zeros(size)
        generator = torch.Generator().manual_seed(rank)
        values[start : start + 4 * k] = torch.randn(4 * k, generator=generator)
        return Exact().select(values, k, 0)

    def volume(start, step):
        async def program(comm):
            mine = moved_to(start, comm.rank)
            return await collectives[comm.rank].reduce(comm, mine, k, step)

        return words(simulate(program, world_size))

    assert volume(start=0, step=0) <= bound
    assert volume(start=size // 2, step=1) > 2 * bound
    assert volume(start=size // 2, step=2) <= bound
    assert volume(start=size // 2, step=3) <= bound
