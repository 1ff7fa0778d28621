"""What a training run shows: the JSON contract, the table, the picture."""

import json
import math

import pytest
from rich.console import Console

from sparsync.bench import report
from sparsync.bench.report import TrainResult
from sparsync.errors import ConfigurationError

CONTRACT = {
    *("algorithm", "ranks", "steps", "density", "parameters", "optimizer", "lr", "loss"),
    *("eval_loss", "seconds_total", "seconds_per_step_median", "bytes_sent_per_step_max"),
    "replicas_equal",
}


def result(algorithm, sent, **changed):
    fields = {
        "algorithm": algorithm,
        "ranks": 4,
        "steps": 60,
        "density": 1.0 if algorithm == "dense" else 0.01,
        "parameters": 1_323_840,
        "optimizer": "sgd",
        "lr": 0.1,
        "loss": [6.0 - step / 20 for step in range(60)],
        "eval_loss": 3.25,
        "seconds_total": 12.5,
        "seconds_per_step_median": 0.2,
        "bytes_sent_per_step_max": sent,
        "replicas_equal": True,
        "bytes_sent": [sent] * 60,
        "seed": 0,
        "batch_size": 8,
        "context": 64,
        "warmup_steps": 0,
    }
    return TrainResult(**{**fields, **changed})


DENSE, SPARSE = result("dense", 8_000_000), result("oktopk", 200_000)


def shown(*results, width=80):
    console = Console(width=width, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(report.comparison(results))
    return captured.get()


def test_one_run_is_an_object_and_several_are_a_list(tmp_path):
    report.write_json([SPARSE], tmp_path / "one.json")
    report.write_json([DENSE, SPARSE], tmp_path / "two.json")
    one = json.loads((tmp_path / "one.json").read_text())
    assert set(one) >= CONTRACT
    assert json.loads((tmp_path / "two.json").read_text())[1] == one


def test_a_diverged_run_is_still_json(tmp_path):
    report.write_json([result("dense", 1, loss=[1.0, math.inf, math.nan])], tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["loss"] == [1.0, None, None]


def test_the_table_fits_a_terminal_and_tells_the_reduction():
    table = shown(DENSE, SPARSE, result("oktopk-paper", 300_000))
    assert "…" not in table
    assert "40.0 x" in table
    assert "200 kB" in table and "8 MB" in table
    assert "bit-identical" in table


def test_without_dense_there_is_no_reduction():
    assert " x " not in shown(SPARSE)


def test_different_replicas_are_said_aloud():
    assert "DIFFER" in shown(DENSE, result("oktopk", 1, replicas_equal=False))


def test_a_world_of_one_sends_nothing():
    alone = result("oktopk", 0, ranks=1)
    assert "0 B" in shown(alone)
    assert "Gbit" not in shown(alone)


def test_the_loss_column_of_a_short_run_is_not_averaged():
    assert "5.950" in shown(result("dense", 1, steps=2, loss=[6.0, 5.95], bytes_sent=[1, 1]))


@pytest.mark.parametrize("results", [[DENSE, SPARSE], [result("oktopk", 0, bytes_sent=[0] * 60)]])
def test_the_picture_is_drawn(tmp_path, results):
    pytest.importorskip("matplotlib")
    report.write_plot(results, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_paths_are_tried_before_work_begins(tmp_path):
    report.check_writable(tmp_path / "new" / "a.json")
    assert (tmp_path / "new").is_dir() and not (tmp_path / "new" / "a.json").exists()
    (tmp_path / "file").write_text("kept")
    report.check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    for path in (tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(ConfigurationError, match="cannot write"):
            report.check_writable(path)


def test_a_picture_needs_matplotlib_and_a_known_format(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="png"):
        report.check_plot_path(tmp_path / "loss.txt")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install sparsync\[report\]"):
        report.check_plot_path(tmp_path / "loss.png")
