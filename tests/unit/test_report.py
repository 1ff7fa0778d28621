"""Test the output of a training run: its JSON, the time to a loss, the table and the plot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli import output
from sparsync.cli.train import report
from sparsync.cli.train.report import comparison
from sparsync.cli.train.results import TrainResult, seconds_of_all, with_target
from sparsync.errors import ConfigurationError
from tests.tables import cases

from . import consoles

CONTRACT = {
    *("algorithm", "ranks", "steps", "density", "parameters", "optimizer", "lr", "loss"),
    *("eval_loss", "seconds_total", "seconds_per_step_mean", "seconds_per_step_median"),
    *("bytes_sent_per_step_max", "dense_share"),
    *("replicas_equal", "seconds_computation_median", "seconds_rest_median", "bytes_counted"),
    *("sent_per_parameter_and_step", "received_per_parameter_and_step"),
    *("target_step", "target_loss", "seconds_to_target", "speedup_to_target", "lab", "transport"),
}


def result(algorithm, sent, **changed):
    share = sent / 1_323_840
    fields = {
        **{"algorithm": algorithm, "ranks": 4, "steps": 60, "optimizer": "sgd", "lr": 0.1},
        **{"density": 1.0 if algorithm == "dense" else 0.01, "parameters": 1_323_840},
        **{"loss": [6.0 - step / 20 for step in range(60)], "eval_loss": 3.25, "seed": 0},
        **{"seconds_total": 12.5, "seconds_per_step_mean": 0.2, "seconds_per_step_median": 0.2},
        **{"seconds": [0.2] * 60, "seconds_computation_median": 0.15, "seconds_rest_median": 0.05},
        **{"bytes_sent_per_step_max": sent, "bytes_sent": [sent] * 60, "bytes_kernel": None},
        **{"sent_per_parameter_and_step": share, "received_per_parameter_and_step": 3 * share},
        **{"bytes_counted": "formula" if algorithm in ("dense", "fp16", "powersgd") else "ledger"},
        **{"replicas_equal": True, "batch_size": 8, "context": 64, "warmup_steps": 0},
        **{"transport": "torch", "lab": None, "layers": 4, "width": 160},
    }
    return TrainResult(**{**fields, **changed})


DENSE, SPARSE = result("dense", 8_000_000), result("oktopk", 200_000)


def shown(*results, width=80):
    return consoles.shown(comparison(results), width=width)


def test_the_json_has_the_keys_that_others_read():
    assert set(json.loads(output.to_json(SPARSE))) >= CONTRACT


# ---- time to loss ----------------------------------------------------------------------------------


def test_time_to_loss_is_counted_in_seconds_of_the_run():
    dense = result("dense", 8, steps=3, loss=[4.0, 3.0, 2.0], seconds=[5.0] * 3)
    slow = result("fp16", 4, steps=4, loss=[4.0, 3.0, 2.5, 1.5], seconds=[1.0, 1.0, 1.0, 2.0])
    never = result("oktopk", 1, steps=3, loss=[4.0, 3.9, 3.8], seconds=[0.1] * 3)
    first, second, third = with_target([dense, slow, never])
    assert (first.target_step, first.target_loss, first.target_window) == (3, 2.0, 1)
    assert (first.steps_to_target, first.seconds_to_target, first.speedup_to_target) == (3, 15, 1)
    assert (second.steps_to_target, second.seconds_to_target) == (4, 5.0)
    assert second.speedup_to_target == 3.0
    assert third.target_loss == 2.0 and third.target_step == 3
    assert third.steps_to_target is third.seconds_to_target is third.speedup_to_target is None


def test_a_lucky_batch_is_no_loss_reached():
    dense = result("dense", 8, steps=20, loss=[3.0] * 20, seconds=[1.0] * 20)
    noisy = result("fp16", 4, steps=20, loss=[9.0, 1.0] + [9.0] * 18, seconds=[1.0] * 20)
    _, judged = with_target([dense, noisy])
    assert judged.target_window == 4 and judged.steps_to_target is None
    assert with_target([noisy]) == [noisy]  # without dense there is no target


@given(st.data(), st.integers(1, 20), st.integers(1, 5))
def test_a_step_is_over_when_the_last_rank_is_through(data, steps, count):
    times = st.lists(st.floats(0, 10), min_size=steps, max_size=steps)
    ranks = [data.draw(times) for _ in range(count)]
    seconds = seconds_of_all(ranks)
    slowest = map(max, zip(*ranks, strict=True))
    assert all(-1e-9 <= s <= most + 1e-9 for s, most in zip(seconds, slowest, strict=True))
    assert sum(seconds) == pytest.approx(max(map(sum, ranks)))


# ---- the table and the picture -----------------------------------------------------------------------


def test_the_table_fits_a_terminal_and_tells_the_reduction():
    runs = [DENSE, result("oktopk", 200_000, seconds=[0.01] * 60), result("oktopk-paper", 300_000)]
    table = shown(*with_target(runs))
    assert "…" not in table
    oktopk = next(line.split() for line in table.splitlines() if "oktopk " in line)
    assert oktopk[:6] == ["oktopk", "600", "ms", "20", "x", "60"]
    assert "time" in table and "3.32" in table
    assert "200 kB" in table and "8 MB" in table
    assert oktopk[10:12] == ["0.151", "0.453"]
    assert "bit-identical" in table


def test_the_time_per_step_is_the_mean_and_the_median_is_labelled():
    """The scheme waits on every fourth step, so that its median step does not wait."""
    rare = result("local", 0, seconds_per_step_mean=0.12, seconds_per_step_median=0.02)
    table = shown(rare, width=200)
    heads, _, row = [line for line in table.splitlines() if line][:3]
    assert row[heads.index("time per step") :].split()[:2] == ["120", "ms"]
    assert "time per step: the mean over all steps; the median step: 20 ms (local)" in table


@cases(
    ("redsync", 0.934, "redsync: 93 % of its bytes are of layers that it leaves uncompressed, "
                       "being small (compress_thd)"),
    ("redsync:thsd1=0,thsd2=1", 0.9, "being small (compress_thd)"),
    ("sparcml", 0.6, "sparcml: 60 % of its bytes are of layers that it leaves uncompressed"),
    ("redsync", 0.4, None),
)  # fmt: skip
def test_the_caption_says_where_most_bytes_are_dense(algorithm, share, said):
    table = " ".join(shown(result(algorithm, 1, dense_share=share), width=200).split())
    assert said in table if said else "uncompressed" not in table


def test_the_caption_names_momentum_where_it_acts_and_the_schedule():
    options = {"momentum": 0.9, "lr_schedule": "step:0.1:50%"}
    both = result("dense", 9, **options), result("redsync", 1, momentum_corrected=True, **options)
    table = " ".join(shown(*both, width=200).split())
    assert "sgd lr 0.1 (step:0.1:50%), momentum 0.9, loss" in table
    assert "momentum before the exchange, on each rank's own gradient: redsync" in table
    plain = shown(result("dense", 9), width=200)
    assert "sgd lr 0.1, loss" in plain and "momentum" not in plain


def test_a_scheme_shows_the_mean_and_the_delay():
    options = {"period": 4, "buffers": "average"}
    sent = [0, 0, 0, 8_000_000] * 15
    local = result("local", 0, bytes_sent=sent, options=options, delay="random:2:0.32")
    table = shown(result("dense", 8_000_000, delay="random:2:0.32"), local)
    row = next(line.split() for line in table.splitlines() if line.split()[:1] == ["local"])
    assert row[:2] == ["local", "60"] and "2 MB" in table
    assert "delay random:2:0.32" in table and "the mean over steps" in table
    assert "delay" not in shown(DENSE) and "the mean over steps" not in shown(DENSE)


def test_different_replicas_are_said_aloud():
    assert "DIFFER" in shown(DENSE, result("oktopk", 1, replicas_equal=False))


def test_the_loss_column_of_a_short_run_is_not_averaged():
    assert "5.950" in shown(result("dense", 1, steps=2, loss=[6.0, 5.95], bytes_sent=[1, 1]))


@pytest.mark.parametrize("results", [[DENSE, SPARSE], [result("oktopk", 0, bytes_sent=[0] * 60)]])
def test_the_picture_is_drawn(tmp_path, results):
    pytest.importorskip("matplotlib")
    report.write_plot(results, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_paths_are_tried_before_work_begins(tmp_path):
    output.check_outputs(tmp_path / "new" / "a.json")
    assert (tmp_path / "new").is_dir() and not (tmp_path / "new" / "a.json").exists()
    (tmp_path / "file").write_text("kept")
    output.check_outputs(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    for path in (tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(ConfigurationError, match="cannot write"):
            output.check_outputs(path)


def test_a_picture_needs_matplotlib_and_a_known_format(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="png"):
        output.check_outputs(plot=tmp_path / "loss.txt")
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install sparsync\[report\]"):
        output.check_outputs(plot=tmp_path / "loss.png")
