"""Compare ``simulate_training`` with closed forms; test scale, baselines, overlap and seeds."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.cli.simulate import SimulationSettings, simulate_training
from sparsync.cli.simulate.command import _caption
from sparsync.cli.simulate.gradient_sources import gradients, load_gradients
from sparsync.cli.simulate.training import default_scale
from sparsync.collectives.costs import Job
from sparsync.cost.machine import Machine
from sparsync.presets import PRESETS, resolve
from sparsync.transports.sim import Links, TwoLevel
from tests.tables import cases, refuses

N, K = 400_000, 4_000
FREE = Machine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
WIRE = Links(alpha=0.0, beta=8e-9)
settings = partial(SimulationSettings, model_size=N, density=K / N, links=WIRE, steps=1)


def alone(algorithm, **options):
    """Return the row of one algorithm, without scaling."""
    options = {"scale": 1.0, "baselines": False, "machine": FREE, **options}
    [row] = simulate_training(settings((algorithm,), **options))
    return row


@pytest.mark.parametrize("ranks", [3, 8])
@cases(
    ("dense", 1e-3),
    ("allgather", 1e-3),
    # chance makes some regions' messages longer than the mean
    ("oktopk", 0.1),
    ("budgeted", 0.1),
)
def test_virtual_time_is_the_closed_forms_where_bandwidth_counts(algorithm, tolerance, ranks):
    cost = resolve(algorithm).make_collective().cost(Job(N, K, ranks))
    row = alone(algorithm, ranks=ranks)
    assert row.mean("seconds") == pytest.approx(cost.seconds(0.0, 8e-9), rel=tolerance)
    assert row.mean("seconds_communication") == row.mean("seconds")
    assert row.mean("bytes_sent") == pytest.approx(cost.nbytes, rel=tolerance)


@pytest.mark.fast(2)
@cases(("dense", 1e-3), ("allgather", 0.02), ("gtopk", 0.02), ("halving", 0.1), ("oktopk", 0.25))
def test_a_64th_of_the_model_takes_as_long(algorithm, tolerance):
    """With P = 32 and as few as 32 entries per rank and 6 per pair, differences are due to chance.

    Latencies, headers and histograms are not scaled. With more entries, the difference is 5 % or
    less.
    """
    few = algorithm in ("dense", "allgather", "gtopk")
    given = {"ranks": 32, "machine": Machine(), "warmup": 0, "links": Links(20e-6, 80e-9)}
    size = (100 if few else 600) * 32 * 64
    whole, part = (alone(algorithm, model_size=size, scale=s, **given) for s in (1.0, 64.0))
    for name in ("seconds", "seconds_selection", "seconds_packing", "bytes_sent"):
        assert part.mean(name) == pytest.approx(whole.mean(name), rel=tolerance), name


@pytest.mark.parametrize("inputs", ["spread", "uniform"])
def test_only_dense_sums_are_scaled_where_all_elements_fit(inputs):
    """``Quantised`` cannot be, because its regions consist of whole blocks of 256 elements."""
    names = ("dense", "ring-dense", "quantised", "oktopk")
    roomy = settings(names, ranks=16, inputs=inputs, baselines=False)
    dense = N / (16 * 64) if inputs == "spread" else 1.0
    assert [default_scale(one, roomy) for one in roomy.contenders()] == [dense, dense, 1.0, 1.0]
    crowded = dataclasses.replace(roomy, memory=16 * N * 16 // 8)  # an eighth of the vectors
    assert default_scale(crowded.contenders()[2], crowded) == 8.0


def test_the_caption_says_why_rows_are_scaled():
    given = settings(("oktopk",), ranks=4, warmup=0, memory=4 * 6 * K * 16 // 2)
    said = _caption(simulate_training(given), given)
    assert "scale chosen by memory: oktopk 2\n" in said
    assert "scale chosen to save time (--scale 1: exact): Dense " in said


def test_quantised_vectors_take_the_time_of_their_costs():
    cost = resolve("quantised").make_collective().cost(Job(N, N, 16))
    row = alone("quantised", ranks=16, scale=None)
    assert row.mean("seconds") == pytest.approx(cost.seconds(0.0, 8e-9), rel=1e-3)


def test_work_is_charged_by_the_machine():
    """``decode`` includes summing sparse entries, so ``gamma`` is charged only for dense sums."""
    machine = Machine(gamma=1.0, select=1e-6, encode=1e-5, decode=1e-4)
    row = alone("allgather", ranks=4, machine=machine)
    assert row.mean("seconds_selection") == pytest.approx(N * 1e-6)
    assert row.mean("seconds_packing") == pytest.approx(K * 1e-5 + 3 * K * 1e-4)
    machine = dataclasses.replace(FREE, gamma=1e-6)
    row = alone("dense", ranks=4, machine=machine)
    assert row.mean("seconds_packing") == pytest.approx(3 / 4 * 4 * N * 1e-6)


def check_parts(*rows):
    """Check that the parts of a step sum to it."""
    for row in rows:
        parts = ("computation", "selection", "packing", "communication")
        total = sum(row.mean(f"seconds_{part}") for part in parts)
        assert total == pytest.approx(row.mean("seconds"))


def test_the_parts_sum_to_the_step_and_the_baselines_come_first():
    rows = simulate_training(settings(("oktopk",), ranks=4, compute=0.01, model_size=20 * N))
    assert [row.algorithm for row in rows] == ["Dense", "DenseOvlp", "oktopk"]
    assert [(row.buckets, row.overlap) for row in rows] == [(1, False), (2, True), (1, False)]
    check_parts(*rows)
    assert all(row.mean("seconds_communication") > 0 for row in rows)
    assert rows[1].mean("seconds") < rows[0].mean("seconds")  # what overlap hides
    busy = rows[0].steps[0].ports["send"]["busy_seconds"]
    assert len(busy) == 4 and max(busy) == rows[0].steps[0].phases["dense"]["seconds_send"]


def test_overlap_hides_all_but_the_last_bucket():
    """The network is always busy; one of four buckets' sums remains when the computation ends."""
    dense = partial(alone, "dense", ranks=4, compute=0.6, buckets=4)
    exposed = dense(overlap=True).mean("seconds_communication")
    assert exposed == pytest.approx(dense().mean("seconds_communication") / 4, rel=1e-3)


def test_a_straggler_makes_all_wait():
    row = alone("budgeted", ranks=4, compute=0.1, stragglers=((2, 3.0),))
    assert row.mean("seconds") > 0.3
    assert row.mean("seconds_computation") == pytest.approx(0.15)


def test_a_node_shares_its_card():
    both = WIRE, TwoLevel(4, WIRE, WIRE)
    single, node = (alone("allgather", ranks=8, links=links) for links in both)
    assert node.mean("seconds") > 1.5 * single.mean("seconds")
    assert len(node.steps[0].ports["send"]["bytes"]) == 10


def test_the_seed_fixes_everything():
    def run(seed):
        options = {"compute": 0.1, "spread": 0.01, "seed": seed, "machine": Machine()}
        return dataclasses.replace(alone("budgeted", ranks=5, **options), wall_seconds=0.0)

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
@pytest.mark.parametrize("buckets", [1, 3])
def test_every_preset_runs(algorithm, buckets):
    row = alone(algorithm, ranks=3, model_size=6_000, buckets=buckets, overlap=buckets > 1)
    assert row.mean("seconds") > 0


@pytest.mark.parametrize("kind", ["uniform", "matching"])
def test_whole_gradients_run(kind):
    assert alone("oktopk", ranks=3, model_size=6_000, inputs=kind).mean("bytes_sent") > 0


# ---- gradients ------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.floats(0.001, 0.4), st.integers(1, 4), st.integers(0, 2))
def test_places_ascend_within_their_unit(size, density, buckets, rank):
    given = {"model_size": size, "density": density}
    [contender] = settings(("allgather",), **given, buckets=buckets, baselines=False).contenders()
    source = gradients(contender, settings(**given), 1.0)
    for unit, values in enumerate(source.draw(rank, 0)):
        places = source.places(rank, unit)
        assert values.numel() == places.numel() == source.held[unit]
        assert (places.diff() > 0).all() and places[0] >= 0 and places[-1] < source.sizes[unit]


@pytest.mark.parametrize("shared", [0.0, 0.3, 1.0])
def test_a_part_of_the_entries_lies_at_the_same_places(shared):
    given_settings = settings(("allgather",), ranks=4, shared=shared, baselines=False)
    [contender] = given_settings.contenders()
    source = gradients(contender, given_settings, 1.0)
    first, other = source.places(0, 0), source.places(1, 0)
    # independently drawn places may also coincide, because a cell has 50 elements
    expected = shared + (1 - shared) * K * 2 / N
    assert float((first == other).float().mean()) == pytest.approx(expected, abs=0.02)
    assert torch.equal(first, source.places(0, 0))
    assert not torch.equal(source.draw(0, 0)[0], source.draw(0, 1)[0])


@pytest.mark.parametrize("form", [".npy", ".pt"])
def test_recorded_gradients_are_read_and_used(tmp_path, form):
    path, rows = tmp_path / f"recorded{form}", torch.randn(3, 2000)
    np.save(path, rows.numpy()) if form == ".npy" else torch.save(rows, path)
    assert torch.equal(load_gradients(path), rows)
    row = alone("allgather", ranks=3, model_size=2000, density=0.01, inputs=str(path))
    assert row.mean("bytes_sent") == 2 * (8 + 20 * 8)


@pytest.mark.parametrize("content", [b"no tensor", None])
def test_what_is_no_gradient_is_refused(tmp_path, content):
    path = tmp_path / "recorded.pt"
    path.write_bytes(content) if content else torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(ConfigurationError, match=r"recorded.pt'.*give a"):
        load_gradients(path)


# ---- schemes that average models -------------------------------------------------------------------


def test_an_average_of_all_models_takes_the_time_of_dense():
    dense, allreduce = (alone(name, ranks=4) for name in ("dense", "allreduce"))
    assert allreduce.algorithm == "allreduce" and len(allreduce.steps) == 1
    for field in ("seconds", "bytes_sent"):
        assert allreduce.mean(field) == pytest.approx(dense.mean(field), rel=1e-3)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_scheme_runs_for_whole_periods(warmup):
    """Local SGD with period 3 takes a third of the traffic and time, wherever the run begins."""
    dense = alone("dense", ranks=4)
    local = alone("local:period=3", ranks=4, steps=2, warmup=warmup)
    assert local.algorithm == "local:period=3" and len(local.steps) == 3
    for field in ("seconds", "bytes_sent", "bytes_received"):
        assert local.mean(field) == pytest.approx(dense.mean(field) / 3, rel=1e-3), field


def test_a_scheme_on_a_part_of_the_model_takes_as_long():
    make = partial(alone, "wagma:group_size=2", ranks=4, compute=0.01)
    whole, part = make(scale=1.0), make(scale=16.0)
    assert part.scale == 16.0
    for field in ("seconds", "bytes_sent"):
        assert part.mean(field) == pytest.approx(whole.mean(field), rel=0.01)


def test_wagma_waits_less_for_random_late_ranks_than_local_sgd_does():
    given = {"ranks": 8, "compute": 0.1, "spread": 0.05, "steps": 20, "warmup": 0}
    local, wagma = (alone(name, **given) for name in ("local:period=1", "WAGMA-SGD"))
    assert wagma.algorithm == "wagma"
    assert wagma.mean("seconds") < 0.95 * local.mean("seconds")
    assert wagma.mean("seconds_computation") == local.mean("seconds_computation")
    check_parts(local, wagma)


def test_a_sparse_outer_step_sends_its_entries_and_pays_for_packing_them():
    row = alone("qsparse-local:period=2,density=0.01", ranks=4, machine=Machine())
    sent = row.mean("bytes_sent") * 2
    assert 0.5 * 3 * 8 * K < sent < 2.5 * 3 * 8 * K  # of coo, from three others
    assert row.mean("seconds_packing") > 0


@refuses(
    ("local:period=0", "period is 0; give a whole number, at least 1"),
    ("wagma:nothing=1", "nothing"),
    ("no-such-scheme", "unknown algorithm 'no-such-scheme'"),
)
def test_bad_schemes_are_refused_before_anything_runs(name):
    settings((name,))
