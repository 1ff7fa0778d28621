"""Test Ok-Topk's weak scaling: the fit at P = 32, its predictions for P = 256, and simulated steps."""

import pytest

from sparsync.errors import ConfigurationError
from sparsync_papers.reproduce.oktopk_scaling import (
    BERT,
    DENSE_OVLP,
    GAUSSIAN_K,
    GTOPK,
    LSTM,
    OKTOPK,
    OURS,
    SCHEMES,
    STATEMENTS,
    VGG,
    fit,
    on_aries,
    simulate_step,
)

BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
OTHERS = [s for s in SCHEMES if s not in (OKTOPK, *OURS)]


def ratios(costs, model, ranks, scheme=OKTOPK):
    """Return the other schemes' step times relative to a scheme, by the closed forms."""
    mine = costs.seconds(scheme, model, ranks)
    return {s.name: costs.seconds(s, model, ranks) / mine for s in OTHERS}


@pytest.mark.parametrize("alpha", [0.0, 50e-6, 200e-6])
def test_the_fit_gives_back_all_six_statements(alpha):
    costs = fit(alpha)
    for s in STATEMENTS:
        assert s.found(lambda scheme, model: costs.seconds(scheme, model, 32)) == pytest.approx(
            s.value, rel=1e-6
        )


def test_the_best_and_the_worst_at_32_are_those_that_the_fit_takes_them_for():
    found = ratios(fit(), VGG, 32)
    assert min(found, key=found.get) == GAUSSIAN_K.name
    assert max(found, key=found.get) == GTOPK.name


def test_a_latency_that_leaves_no_time_for_the_rest_is_refused():
    with pytest.raises(ConfigurationError, match=r"alpha is 0\.005 s"):
        fit(5e-3)


@pytest.mark.parametrize("alpha", [0.0, 50e-6, 200e-6])
def test_bert_on_256_ranks_whatever_alpha_is(alpha):
    costs = fit(alpha)
    found = ratios(costs, BERT, 256)
    assert min(found, key=found.get) == DENSE_OVLP.name
    assert 3.1 < min(found.values()) < 3.29, "the paper's 3.29 is not reached"
    assert min(ratios(costs, BERT, 256, BY_NAME["halving"]).values()) > 3.29
    assert 12 < found[GTOPK.name] < 14, "the paper's 12.95 is"
    assert costs.seconds(OKTOPK, BERT, 32) / costs.seconds(OKTOPK, BERT, 256) > 0.763


def test_allgather_is_worse_than_dense_at_256_and_better_at_32():
    costs = fit()

    def exchange(name, ranks):
        scheme = BY_NAME[name]
        price = costs.price(scheme, BERT, ranks)
        return scheme.cost(BERT, ranks).seconds(costs.alpha, price)

    assert exchange("TopkA", 32) < exchange("Dense", 32)
    assert exchange("TopkA", 256) > exchange("Dense", 256)


def test_the_bare_network_leaves_nothing_to_gain():
    alone = on_aries(fit())
    for model in (VGG, LSTM, BERT):
        assert min(ratios(alone, model, 32).values()) < 1.03


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_simulated_steps_are_those_of_the_closed_forms(scheme):
    costs = fit(0.0)
    parts = simulate_step(costs, scheme, VGG, 8, entries=64)
    assert parts.seconds == pytest.approx(costs.seconds(scheme, VGG, 8), rel=0.03)
    assert parts.computation == pytest.approx(costs.compute(VGG))
    assert parts.sparsification == pytest.approx(costs.select(scheme, VGG) * VGG.size, rel=1e-4)
