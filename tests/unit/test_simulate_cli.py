"""Test ``sparsync simulate``: its output, and one-line errors for bad input."""

import json

import pytest
import torch

SMALL = ("--ranks", 4, "--model-size", 20_000, "--steps", 1)


def test_the_table_has_the_baselines_and_the_phases(command):
    slow = "--compute", "0.18,0.01", "--straggler", "3:2", "--overlap"
    code, out, err = command("simulate", *SMALL, *slow)
    assert (code, err) == (0, "")
    for word in ("Dense ", "DenseOvlp ", "oktopk ", "budgeted ", "split"):
        assert word in out
    assert "scale chosen to save time (--scale 1: exact): Dense 78.1, DenseOvlp 78.1" in out
    assert "by memory" not in out


def test_json_is_for_machines(command):
    code, out, _ = command("simulate", *SMALL, "--algorithm", "allgather", "--nodes", 2, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["algorithm"] for row in rows] == ["Dense", "DenseOvlp", "allgather"]
    assert {"seconds", "seconds_selection", "scale", "steps", "bytes_sent"} <= set(rows[2])
    [step] = rows[2]["steps"]
    assert step["phases"]["allgather"]["messages"] > 0
    assert len(step["ports"]["receive"]["busy_seconds"]) == 6  # ranks and nodes


def test_a_measured_machine_gives_links_and_work(command, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": {"alpha": 1.0, "beta": 0.0, "select": 1.0}}))
    given = "--algorithm", "allgather", "--machine", path, "--json"
    code, out, _ = command("simulate", *SMALL, *given)
    row = json.loads(out)[2]
    assert code == 0 and row["seconds_selection"] == pytest.approx(20_000)
    assert row["seconds_communication"] == pytest.approx(2.0)


def test_the_picture_is_written(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = command("simulate", *SMALL, "--plot", tmp_path / "steps.png")
    assert (code, err) == (0, "") and (tmp_path / "steps.png").stat().st_size > 1000


def test_recorded_gradients_tell_the_size(command, tmp_path):
    torch.save(torch.randn(2, 3000), tmp_path / "g.pt")
    code, out, _ = command("simulate", "--ranks", 2, "--inputs", tmp_path / "g.pt", "--steps", 1)
    assert code == 0 and "3,000 elements" in out
    code, _, err = command("simulate", "--inputs", tmp_path / "g.pt", "--model-size", 7)
    assert code == 2 and "has 3000 elements" in err


def test_several_world_sizes_are_a_column_each(command, tmp_path):
    given = ("--model-size", 20_000, "--steps", 1, "--algorithm", "oktopk,D-PSGD")
    code, out, err = command("simulate", "--ranks", "2,4,2", *given)
    assert (code, err) == (0, "")
    heads = [line.split() for line in out.splitlines() if "P = 2" in line]
    assert heads == [["algorithm", "P", "=", "2", "P", "=", "4"]] * 5
    for word in ("Dense ", "DenseOvlp ", "oktopk ", "dpsgd ", "2, 4 ranks", "speed-up"):
        assert word in out
    rows = json.loads(command("simulate", "--ranks", "2,4", *given, "--json")[1])
    alone = json.loads(command("simulate", "--ranks", 4, *given, "--json")[1])
    for row in (*rows, *alone):
        row.pop("wall_seconds")
    expected = [("Dense", 2), ("DenseOvlp", 2), ("oktopk", 2), ("dpsgd", 2), ("Dense", 4)]
    assert [(row["algorithm"], row["ranks"]) for row in rows[:5]] == expected
    assert rows[4:] == alone
    pytest.importorskip("matplotlib")
    line = ("simulate", "--ranks", "2,4", *given, "--plot", tmp_path / "ranks.png")
    assert command(*line)[0] == 0 and (tmp_path / "ranks.png").stat().st_size > 1000
