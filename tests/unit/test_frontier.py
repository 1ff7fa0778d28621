"""Test which runs the frontier's table makes, that none is repeated, and the report."""

import doctest
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from sparsync import connect, simulate
from sparsync.updates import OuterStep
from tests.draws import seeded
from tests.tables import cases

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"accuracy": 0.5, "parameters": 1000, "counted": "ledger", "computation": 0.1}
MEASURED |= {"replicas_equal": True, "seconds": 1.0}


@pytest.fixture
def part(monkeypatch):
    """Import a module of the benchmark as its command does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"frontier.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "frontier"]:
        del sys.modules[name]


@pytest.fixture
def runs(part, monkeypatch):
    """Replace training by a formula, and yield the list of runs that are made."""
    made = []

    def make(run, label):
        made.append(run)
        dense = run.method == "dense"
        loss = 2.0 + abs(run.lr - 8e-3) + run.seed / 100 + 0.1 * (not dense)
        loss += 0.0 if dense else abs(run.knobs["momentum"] - 0.3)
        phase = {"steps": run.steps, "seconds": 2.0, "sent": 6000.0 if dense else 600.0}
        counted = {"counted": "kernel"} if run.lab else {}
        curve = [[run.steps // 2, 3.0], [run.steps, loss]]
        learnt = {"loss": None, "curve": []} if run.lab else {"loss": loss, "curve": curve}
        rest = phase | {"received": phase["sent"]}
        return {**MEASURED, **counted, **learnt, "dense": None, "rest": rest}

    monkeypatch.setattr(part("training").Run, "make", make)
    return made


def command(monkeypatch, out, *options):
    given = ["--task", "tiny", "--methods", "dense,2bit-h2", "--optimizers", "adamw"]
    monkeypatch.setattr(sys, "argv", ["frontier.py", *given, "--out", str(out), *options])
    runpy.run_path(str(BENCHMARKS / "frontier.py"), run_name="__main__")
    written = (out.parent / "frontier/results.jsonl").read_text()
    return [json.loads(line) for line in written.splitlines()]


def test_a_method_is_tuned_knob_by_knob_and_nothing_is_run_twice(runs, monkeypatch, tmp_path):
    rows = command(monkeypatch, tmp_path / "frontier.md", "--seeds", "1,2")
    # 2 rates and a second seed; for the other method, also 2 + 2 further values of its settings
    assert len(rows) == len(runs) == (2 + 1) + (2 + 4 + 1)
    assert rows[-1]["knobs"] == {"outer_lr": 1.0, "momentum": 0.3}
    assert (rows[-1]["lr"], rows[-1]["seed"]) == (8e-3, 2)
    assert len(command(monkeypatch, tmp_path / "frontier.md", "--seeds", "1,2")) == len(runs)
    assert len(command(monkeypatch, tmp_path / "frontier.md", "--seeds", "1,2,3")) == 10 + 2


def test_the_report_says_who_counted_and_how_much_sooner(runs, monkeypatch, tmp_path):
    out = tmp_path / "frontier.md"
    command(monkeypatch, out, "--seeds", "1")
    line = next(line for line in out.read_text().splitlines() if line.startswith("| 2bit-h2"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["2bit-h2", "adamw", "0.6", "0.6", "0.6", "ledger"]
    assert cells[7] == "+5.0 %" and cells[-3:] == ["0.008*", "outer_lr 1.0, momentum 0.3", "6"]
    monkeypatch.setattr("sparsync.cli.network_choice.Connection.prepare", lambda self: None)
    rows = command(monkeypatch, out, "--seeds", "1", "--lab", "10mbit", "--lab-steps", "3")
    assert [row["steps"] for row in rows if row["lab"]] == [3, 4], "whole periods"
    lines = out.read_text().splitlines()
    assert lines[lines.index("### Links of 10mbit") + 4].split(" | ")[-1] == "1.0 |"
    assert any(line.startswith("| 2bit-h2 | adamw | 0.6 | 0.6 | 0.6 | kernel") for line in lines)
    assert out.with_suffix(".png").stat().st_size > 1000


def test_a_rank_that_met_nan_leaves_a_row_without_loss(part, monkeypatch, tmp_path):
    from sparsync.cli.launch import RankError

    results, training = part("results"), part("training")
    run = training.Run("tiny", 4, 2, 2, "dense", "adamw", 1e9, 1)

    def fail(run, label):
        raise RankError(error)

    monkeypatch.setattr(training.Run, "make", fail)
    error = "rank 0: NonFiniteGradientError: a second exchange in a row holds NaN or Inf"
    assert results.Results(tmp_path / "r.jsonl").get(run)["loss"] is None
    error = "rank 0: PeerError: another rank is gone"
    with pytest.raises(RankError):
        results.Results(tmp_path / "other.jsonl").get(run)
    assert not (tmp_path / "other.jsonl").exists()


def test_the_examples_of_the_benchmark(part):
    for name in ("report", "tasks"):
        tried = doctest.testmod(part(name))
        assert tried.attempted and not tried.failed


def test_one_bit_adam_begins_as_adamw(part):
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2))
    (group, betas), generator = ({"params": [mine], "weight_decay": 0.1}, (0.9, 0.99)), seeded(1)
    ours = part("onebit").OneBitAdam([group], connect(), 5, 0.1, betas, 256)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=betas, weight_decay=0.1)
    for _ in range(5):
        mine.grad = torch.randn(10, generator=generator)
        theirs.grad = mine.grad.clone()
        ours.step()
        adamw.step()
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_one_bit_adam_loses_no_momentum(part):
    size, ranks = 1000, 3

    async def program(comm):
        group = {"params": [torch.nn.Parameter(torch.zeros(size))], "weight_decay": 0.0}
        optimizer = part("onebit").OneBitAdam([group], comm, 1, 0.1, (0.9, 0.99), 64)
        generator, given, delivered = torch.Generator().manual_seed(comm.rank), 0, 0
        for _ in range(4):
            momentum = torch.randn(size, generator=generator)
            given, delivered = given + momentum, delivered + await optimizer._average(momentum)
        return given, delivered, optimizer.error

    given, delivered, errors = zip(*simulate(program, world_size=ranks).results, strict=True)
    assert all(torch.equal(one, delivered[0]) for one in delivered)
    average, kept = sum(given) / ranks, sum(errors) / ranks
    assert torch.allclose(average, delivered[0] + kept, atol=1e-5)
    assert 0.1 < float(kept.norm() / average.norm()) < 2, "signs round"


def test_rows_of_updates_have_settings_that_there_are(part):
    methods = part("methods")
    rows = [row for row in methods.METHODS.values() if row.make is methods.updates]
    assert len(rows) > 15
    for row in rows:
        OuterStep(**row.settings, **row.untuned)


@pytest.mark.slow
@pytest.mark.gloo
@cases(
    *((name, "adamw") for name in ("fp16", "powersgd-r2", "top-k", "1-bit-adam", "updates")),
    ("demo", "sgd"),
    *((name, "muon") for name in ("dense", "2bit-h10-overlap")),
)
def test_a_method_trains(name, optimizer, part):
    method = part("methods").METHODS[name]
    row = part("training").Run("tiny", 12, 2, 2, name, optimizer, 8e-3, 1, method.untuned).make("")
    assert row.keys() >= MEASURED.keys() | {"loss", "curve", "dense", "rest"}
    assert row["replicas_equal"]
    assert row["loss"] < 5, "nats per byte; without training ln 256 = 5.5"
    assert row["rest"]["sent"] > 0
