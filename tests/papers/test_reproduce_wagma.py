"""Test WAGMA's artifacts: virtual time, training in virtual time, and comparisons."""

import pytest
import torch

from sparsync_papers.reproduce import Settings, wagma_training
from sparsync_papers.reproduce.wagma_throughput import (
    BETA,
    COMPUTE,
    LATE,
    ROWS,
    SETTINGS,
    TARGETS,
    VARIANTS,
    control,
    estimated_seconds,
    ideal_seconds,
    step_seconds,
)
from sparsync_papers.reproduce.wagma_training import average_models

BALANCED, LATE_RANKS = SETTINGS["control"], SETTINGS["fig4"]
LOCAL = ROWS["local SGD, H = 1"]


def test_local_sgd_has_the_rate_that_beta_was_solved_from():
    assert 1 / step_seconds(BALANCED, LOCAL, 16, steps=1) == pytest.approx(1.52, rel=0.01)
    assert 1 / step_seconds(BALANCED, ROWS["AD-PSGD"], 4, steps=3) == pytest.approx(1.61, rel=1e-3)
    assert pytest.approx(0.183e-9, rel=0.01) == BETA  # seconds per byte


def test_an_ideal_step_is_computation_and_the_mean_delay():
    expected = COMPUTE + LATE.first / 8 * LATE.second
    assert ideal_seconds(LATE_RANKS, 8, steps=5) == pytest.approx(expected)


@pytest.mark.parametrize("row", ["local SGD, H = 1", "Allreduce-SGD", "D-PSGD, barrier every step"])
def test_one_step_stands_for_all_where_everybody_waits(row):
    scheme, settings = {**ROWS, **VARIANTS}[row], Settings(seed=3, quick=True)
    assert scheme.all_wait
    simulated = step_seconds(LATE_RANKS, scheme, 8, steps=10, seed=3)
    assert estimated_seconds(scheme, LATE_RANKS, 8, settings) == pytest.approx(simulated, rel=0.01)


def test_a_barrier_every_step_lets_no_rank_ahead():
    free, held = (
        step_seconds(LATE_RANKS, scheme, 8, steps=10)
        for scheme in (ROWS["D-PSGD"], VARIANTS["D-PSGD, barrier every step"])
    )
    assert free < COMPUTE + LATE.second <= held


def test_targets_name_rows_and_ranks_that_there_are():
    for target in TARGETS:
        assert target.ranks in SETTINGS[target.figure].ranks
        assert set(target.rows) <= {*ROWS, *VARIANTS}
        assert target.ratio > 1


def test_the_control_is_within_7_percent():
    outcome = control.run(Settings(quick=True))
    assert all(comparison.same for comparison in outcome.comparisons)
    rates = [row["steps per second"] for row in outcome.rows]
    assert max(rates) == pytest.approx(1.61, rel=1e-3)


# ---- training in virtual time ---------------------------------------------------------------------


def constant_slopes(rank):
    """Return a model with one parameter, which each local step of rank r moves by r + 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def descend(step):
        model.weight.data += rank + 1

    return model, descend


def averaged(row, **more):
    options = {"ranks": 4, "steps": 10, **more}
    return average_models(constant_slopes, LATE_RANKS, ROWS[row], 0, **options)


def test_allreduce_averages_what_all_ranks_did():
    run = averaged("Allreduce-SGD")
    assert run.final.tolist() == [25.0]  # ten steps of (1 + 2 + 3 + 4) / 4
    assert [[own.item() for own in look] for _, look in run.looks] == [
        4 * [value] for value in (5.0, 10.0, 15.0, 20.0, 25.0)
    ]
    assert [own.item() for own in run.own] == [2.5, 5.0, 7.5, 10.0]  # after a step, two, ...
    times = [seconds for seconds, _ in run.looks]
    assert times == sorted(times) and times[-1] == pytest.approx(10 * run.seconds)
    assert run.seconds >= COMPUTE + LATE.second


def test_late_ranks_take_part_of_wagma_s_updates_back():
    wagma, allreduce = averaged("WAGMA"), averaged("Allreduce-SGD")
    assert wagma.seconds < allreduce.seconds
    assert 0 < wagma.final.item() < allreduce.final.item()


# ---- ablations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "over", "same", "said"),
    [
        ("fixed groups", [0.01, 0.03], True, "loss +2.00 ± 1.00 %; P = 64; worse in 2 of 2"),
        ("fixed groups", [-0.01, 0.03], False, "loss +1.00 ± 2.00 %; P = 64; worse in 1 of 2"),
        ("S = P = 64", [0.02, -0.03], True, "loss -0.50 ± 2.50 %; P = 64"),
        ("S = P = 64", [-0.02, -0.03], False, "loss -2.50 ± 0.50 %; P = 64"),
    ],
)
def test_an_ablation_is_worse_on_every_seed_or_larger_groups_no_better(what, over, same, said):
    one = next(o for o in wagma_training._ABLATIONS if (o.section, o.what) == ("section 5.2", what))
    compared = wagma_training._compare_ablated(one, over, "P = 64")
    assert (compared.same, compared.ours) == (same, said)


def test_the_ablations_are_those_of_both_sections():
    found = {
        section: {o.what for o in wagma_training._ABLATIONS if o.section == section and o.score}
        for section in ("section 5.2", "section 5.3")
    }
    assert found == {
        "section 5.2": {"no group collectives", "fixed groups", "S = P = 64", "S = 4"},
        "section 5.3": {"fixed groups", "S = P = 16", "S = 2"},
    }
    for one in wagma_training._ABLATIONS:
        ranks = 64 if one.section == "section 5.2" else 16
        averager = one.scheme.make(SETTINGS["half"], ranks)
        assert getattr(averager, "dynamic", True) is (one.what != "fixed groups")
