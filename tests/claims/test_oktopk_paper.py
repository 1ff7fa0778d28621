"""Test Ok-Topk as published ("oktopk-paper") on the steps that its claims cover, and on others.

The claim is at most 6 (P - 1) / P words per entry *actually selected*, on steps that reuse their
thresholds, if the ranks' inputs are exchangeable (averaged boundaries assume that they are
similar).
"""

import pytest

from sparsync.published.oktopk import oktopk_paper
from sparsync.published.oktopk.allreduce import averaged_cuts_cost, equation_3

from .measured import EXCHANGEABLE, exact_step, k_for, phase, phases, published_step, steps, words

THRESHOLD_PERIOD = 4
REPARTITION = 8
STEPS = 4


def taken(simulation):
    """Return the most entries that any rank selected, and the entries of the total."""
    selected = max(evidence.selected.nnz for evidence in simulation.results)
    return selected, simulation.results[0].total.nnz


def reduced(simulation):
    """Return the number of entries after the reduction, over all regions."""
    union = sum(evidence.selected.to_dense().abs() for evidence in simulation.results)
    return int(union.count_nonzero())


def published(world_size, kind, count):
    preset = oktopk_paper(threshold_period=THRESHOLD_PERIOD, repartition_period=REPARTITION)
    return enumerate(steps(preset, world_size, kind, count))


@pytest.mark.fast(6)
@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
@pytest.mark.parametrize("kind", EXCHANGEABLE)
def test_oktopk_paper_volume_is_below_6_words_per_selected_entry(kind, world_size):
    for step, simulation in published(world_size, kind, STEPS):
        selected, kept = taken(simulation)
        if step % THRESHOLD_PERIOD:
            most = max(selected, kept)
            assert words(simulation) <= equation_3(most, world_size).words
            form = published_step(selected, kept, world_size)
            assert words(simulation) == pytest.approx(form.words, rel=0.04)


@pytest.mark.parametrize("world_size", [4, 8, 16])
@pytest.mark.parametrize("kind", ["uniform", "clustered"])
def test_exact_steps_exceed_the_claim_and_have_their_own_cost(kind, world_size):
    """Algorithm 1, line 10 allgathers all reduced entries, which takes up to 2 min(kP, n) words."""
    k = k_for(world_size)
    _, simulation = next(published(world_size, kind, 1))
    assert words(simulation) > equation_3(k, world_size).words
    form = exact_step(k, reduced(simulation), world_size)
    assert words(simulation) == pytest.approx(form.words, rel=0.04)


@pytest.mark.parametrize("world_size", [8, 16])
def test_supports_that_do_not_look_alike_exceed_the_claim(world_size):
    """As a negative control, averaged boundaries exceed the claim on the very case of Theorem 3.1."""
    for step, simulation in published(world_size, "matching", 2):
        if step == 0:
            continue
        selected, _ = taken(simulation)
        assert words(simulation) > equation_3(selected, world_size).words


def test_reused_thresholds_exceed_any_bound_per_requested_k():
    """With fresh gradients, residuals pile up below a reused threshold, hence the cap in "oktopk"."""
    k, world_size = k_for(4), 4
    counts = [taken(simulation)[0] for _, simulation in published(world_size, "uniform", 4)]
    assert counts[0] == k
    assert counts[3] > 4 * k


@pytest.mark.parametrize("world_size", [3, 8])
def test_boundaries_are_agreed_by_an_allreduce_of_p_elements_every_tau_steps(world_size):
    """Section 3.1.1 sends P elements in this allreduce; here, it sends the P - 1 inner cuts."""
    for step, simulation in published(world_size, "uniform", REPARTITION + 1):
        traffic = phase(simulation, "boundaries")
        if step % REPARTITION:
            assert "boundaries" not in phases(simulation)
        else:
            form = averaged_cuts_cost(world_size)
            assert {t.received for t in traffic} == {form.nbytes}
            assert {t.messages_sent for t in traffic} == {form.messages}
