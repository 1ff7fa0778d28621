"""Test the checks and summaries of ``sparsync bench``, and the command on ``sim``."""

import dataclasses
import json

import pytest
import torch

from sparsync import DenseVector, SparseVector
from sparsync.cli.bench.command import BenchSettings, bench
from sparsync.cli.bench.inputs import INPUTS
from sparsync.cli.bench.measure import Measured, Outcome, SimulatedRanks
from sparsync.cli.bench.rows import Row
from sparsync.cli.bench.verified_row import Case, Evidence, Verdict, compare, judge
from sparsync.presets import PRESETS
from sparsync.published.oktopk import oktopk
from tests.tables import cases

# ---- verification ---------------------------------------------------------------------------------


def sparse(*values):
    return SparseVector.from_dense(torch.tensor(values))


ZERO = [0.0, 0.0, 0.0]
ONE = [1.0, 0.0, 0.0]
EPS = 2.0**-23  # collectives add in different orders, within this error; twice as much is wrong


def dense(*values):
    return DenseVector(torch.tensor(values))


@cases(
    (  # nothing to report
        [
            ([1.0, 5.0, 0.0], [0.0, 5.0, 0.0], sparse(*ONE), sparse(3.0, 0.0, 4.0)),
            ([2.0, 0.0, 4.0], ZERO, sparse(2.0, 0.0, 4.0), sparse(3.0, 0.0, 4.0)),
        ],
        *(2, 0, (0, 0), 1.0),
    ),
    (  # totals that differ between ranks
        [
            (ONE, ZERO, sparse(*ONE), sparse(*ONE)),
            (ZERO, ZERO, sparse(*ZERO), sparse(1.0, 2.0, 3.0)),
        ],
        *(1, 2, (0, 0), 1.0),
    ),
    # a total that is not the sum of the delivered entries
    ([(ONE, ZERO, sparse(*ONE), sparse(1 + EPS, 0.0, 0.0))], 1, 0, (0, 1), 1.0),
    ([(ONE, ZERO, sparse(*ONE), sparse(1 + 2 * EPS, 0.0, 0.0))], 1, 1, (1, 2), 1.0),
    ([(ONE, ZERO, dense(*ONE), dense(1 + EPS, 0.0, 0.0))], 2, 0, (0, 1), 1.0),
    ([(ONE, ZERO, dense(*ONE), dense(1 + 2 * EPS, 0.0, 0.0))], 2, 1, (1, 2), 1.0),
    ([(ONE, ZERO, dense(*ONE), dense(float("nan"), 0.0, 0.0))], 2, 1, (1e300, 1e309), 1.0),
    # mass that is lost, that appears where nothing was accumulated, or that is not a number
    ([([1.0, 5.0, 0.0], ZERO, sparse(*ONE), sparse(*ONE))], 1, 0, (1e6, 1e300), 1.0),
    ([(ONE, [0.0, 0.0, 1e-40], sparse(*ONE), sparse(*ONE))], 1, 0, (1, 1e300), 1.0),
    ([(ONE, [0.0, float("nan"), 0.0], sparse(*ONE), sparse(*ONE))], 1, 0, (1e300, 1e309), 1.0),
    # entries that are missing
    ([([1.0, 5.0, 2.0], [0.0, 5.0, 2.0], sparse(*ONE), sparse(*ONE))], 2, 0, (0, 0), 0.5),
)
def test_every_step_is_judged(ranks, k, wrong, law, entries):
    evidence = []
    for accumulated, residual, *vectors in ranks:
        kept = map(torch.tensor, (accumulated, residual))
        evidence.append(Evidence(*kept, sparse(*accumulated), *vectors, sparse(*ZERO)))
    verdict = judge(k, evidence)
    assert (verdict.wrong, verdict.entries) == (wrong, entries)
    assert law[0] <= verdict.law_error <= law[1]


def test_totals_alone_tell_differences_and_missing_entries():
    total = sparse(1.0, 0.0, 2.0)
    assert compare(4, 9, total, {7}) == Verdict(0, 0.0, 0.5)
    assert compare(4, 2, total, {7, 8}) == Verdict(1, 0.0, 1.0)
    assert compare(4, 9, DenseVector(torch.ones(3)), {7}).entries == 1.0


# ---- simulated steps: what is verified ---------------------------------------------------------------


@cases(("every", 5, 5), ("ends", 2, 6), ("digest", 0, 5))
def test_a_row_says_how_many_steps_were_verified_in_full(verify, in_full, total):
    (row,) = bench(BenchSettings(("oktopk",), 3, (3000,), steps=4, warmup=1, verify=verify))
    assert (row.steps_verified, row.steps_total) == (in_full, total)
    assert (row.law_error_max is None) == (in_full == 0)
    assert row.correct and row.entries_min == 1.0


# ---- the command ----------------------------------------------------------------------------------


def test_the_json_has_the_documented_keys(command, tmp_path):
    path = tmp_path / "new" / "b.json"
    options = ["--collectives", "dense,allgather,oktopk", "--ranks", "4", "--size", "40000"]
    more = ["--density", "0.05", "--steps", "3", "--warmup", "1", "--transport", "sim"]
    code, out, err = command("bench", *options, *more, "--json", path)
    assert (code, err) == (0, "")
    rows = json.loads(path.read_text())
    assert [row["collective"] for row in rows] == ["dense", "allgather", "oktopk"]
    contract = (
        "collective transport ranks size density seconds_median bytes_sent_max bytes_received_max "
        "words_per_k_max bound_words_per_k entries_min law_error_max wrong "
        "seconds_exchange_median seconds_local_median seconds_add_median wire_seconds "
        "processor_exchange_median processor_over_add bytes_kernel_max steps_verified "
        "speedup speedup_exchange exchange_over_wire local_over_add"
    )
    for row in rows:
        assert set(row) >= set(contract.split())
        assert (row["ranks"], row["size"], row["density"], row["k"]) == (4, 40000, 0.05, 2000)
        assert row["words_per_k_max"] <= row["bound_words_per_k"]
        assert row["entries_min"] >= 1 and row["law_error_max"] <= 1 and row["wrong"] == 0
        assert 0 < row["seconds_25"] <= row["seconds_median"] <= row["seconds_75"]
        assert row["seconds_exchange_median"] == row["seconds_median"]  # the clock is virtual
        assert row["wire_seconds"] is row["bytes_kernel_max"] is row["local_over_add"] is None
        assert row["collective"] in out
    assert rows[0]["speedup"] == 1
    assert rows[2]["speedup"] == rows[0]["seconds_median"] / rows[2]["seconds_median"] > 1
    assert rows[0]["entries_min"] == rows[2]["entries_min"] == 1.0


def test_sizes_and_densities_may_be_lists(command):
    what = ["--collectives", "oktopk", "--size", "400,800", "--density", "0.1,0.5"]
    code, out, _ = command("bench", *what, "--steps", 1, "--warmup", 0, "--ranks", 2)
    assert code == 0
    for title in ("n = 400, density 0.1: k = 40", "n = 800, density 0.5: k = 400"):
        assert title in out


def test_a_row_is_measured_once(command, tmp_path):
    path, small = tmp_path / "b.json", ["--steps", 1, "--warmup", 0, "--ranks", 2]
    what = ["--collectives", "dense,Dense,TopkA,allgather", "--size", "400,400"]
    code, _, _ = command("bench", *what, "--density", "0.1,0.10", *small, "--json", path)
    assert code == 0
    assert [row["collective"] for row in json.loads(path.read_text())] == ["dense", "allgather"]


def test_the_same_seed_gives_the_same_rows():
    settings = BenchSettings(("oktopk",), 3, (3000,), steps=2, warmup=1, seed=7)
    again, other = dataclasses.replace(settings), dataclasses.replace(settings, seed=8)
    assert bench(settings) == bench(again)
    assert bench(settings) != bench(other)


def test_one_rank_sends_nothing_and_is_correct():
    for row in bench(BenchSettings(tuple(PRESETS), 1, (1000,), steps=2, warmup=0)):
        assert isinstance(row, Row) and row.correct
        assert (row.bytes_sent_max, row.words_per_k_max, row.seconds_median) == (0, 0, 0)


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_preset_is_correct_on_every_input(kind):
    for row in bench(BenchSettings(tuple(PRESETS), 5, (2000,), (0.02,), 2, 0, kind)):
        assert row.correct, row
        # an entry is missing if quantisation makes a value zero, or if two values cancel
        assert row.entries_min >= (0.5 if row.collective == "sparcml" else 1), row


def test_a_bench_that_finds_errors_ends_with_1(command, monkeypatch):
    wrong = [Outcome(1.0, 1.0, 8, 8, Verdict(1, 0.0, 1.0))]
    measured = Measured("sim", wrong, wrong, wrong, 0)
    monkeypatch.setattr("sparsync.cli.bench.command.measure_simulated", lambda *_: measured)
    code, out, _ = command("bench", "--collectives", "oktopk", "--steps", "1", "--warmup", "0")
    assert code == 1
    assert "!1" in out


# ---- simulated ranks ------------------------------------------------------------------------------


def test_simulated_ranks_keep_their_state_from_step_to_step():
    ranks = SimulatedRanks(Case(oktopk(repartition_period=2), 3, 3000, 0.05))
    first, second = ranks.step(), ranks.step()
    assert "boundaries" in first.ledgers[0].by_phase()
    assert "boundaries" not in second.ledgers[0].by_phase()
    assert {reducer.step for reducer in ranks.reducers} == {2}
    assert all(reducer.residuals[0].value is not None for reducer in ranks.reducers)
