"""``sparsync simulate``: what it prints, and one clear line for bad input."""

import json

import pytest
import torch
import typer

from sparsync.cli import app as cli
from sparsync.cli.simulate import command as simulate

app = typer.Typer()
app.command()(simulate.command)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command with arguments; return the exit code, and what was written."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        texts = [str(argument) for argument in arguments]
        code = cli.exit_code(lambda: app(texts, standalone_mode=False))
        return code, *capsys.readouterr()

    return run


SMALL = ("--ranks", 4, "--model-size", 20_000, "--steps", 1)


def test_the_table_has_the_baselines_and_the_phases(command):
    code, out, err = command(*SMALL, "--compute", "0.18,0.01", "--straggler", "3:2", "--overlap")
    assert (code, err) == (0, "")
    for word in ("Dense ", "DenseOvlp ", "oktopk ", "budgeted ", "split", "scale chosen by memory"):
        assert word in out


def test_json_is_for_machines(command):
    code, out, _ = command(*SMALL, "--algorithm", "allgather", "--nodes", 2, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["algorithm"] for row in rows] == ["Dense", "DenseOvlp", "allgather"]
    assert {"seconds", "seconds_selection", "scale", "steps", "bytes_sent"} <= set(rows[2])
    [step] = rows[2]["steps"]
    assert step["phases"]["allgather"]["messages"] > 0
    assert len(step["ports"]["receive"]["busy_seconds"]) == 6  # ranks and nodes


def test_a_measured_machine_gives_links_and_work(command, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": {"alpha": 1.0, "beta": 0.0, "select": 1.0}}))
    code, out, _ = command(*SMALL, "--algorithm", "allgather", "--machine", path, "--json")
    row = json.loads(out)[2]
    assert code == 0 and row["seconds_selection"] == pytest.approx(20_000)
    assert row["seconds_communication"] == pytest.approx(2.0)


def test_the_picture_is_written(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = command(*SMALL, "--plot", tmp_path / "steps.png")
    assert (code, err) == (0, "") and (tmp_path / "steps.png").stat().st_size > 1000


def test_recorded_gradients_tell_the_size(command, tmp_path):
    torch.save(torch.randn(2, 3000), tmp_path / "g.pt")
    code, out, _ = command("--ranks", 2, "--inputs", tmp_path / "g.pt", "--steps", 1)
    assert code == 0 and "3,000 elements" in out
    code, _, err = command("--inputs", tmp_path / "g.pt", "--model-size", 7)
    assert code == 2 and "has 3000 elements" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "best"], "unknown algorithm 'best'; choose one of allgather, "),
        (["--ranks", "0"], "ranks is 0; give at least 1"),
        (["--ranks", "many"], "--ranks"),
        (["--model-size", "0"], "model_size is 0"),
        (["--density", "2"], "density is 2.0"),
        (["--network", "fast"], "cannot read 'fast'"),
        (["--inner-network", "1gbit,1us"], "give --nodes RANKS"),
        (["--nodes", "0"], "ranks_per_node is 0"),
        (["--compute", "long"], "compute is 'long'; give SEC or SEC,spread"),
        (["--compute", "1,2,3"], "compute is '1,2,3'"),
        (["--compute", "-1"], "compute is -1.0; give seconds >= 0"),
        (["--compute", "1,nan"], "spread is nan; give seconds >= 0"),
        (["--scale", "0.5"], "scale is 0.5; give a factor from 1"),
        (["--steps", "0"], "steps is 0"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--buckets", "0"], "buckets is 0"),
        (["--straggler", "3"], "straggler is '3'; give RANK:FACTOR"),
        (["--straggler", "99:2"], "straggler 99:2; give RANK:FACTOR with a rank in [0, 32)"),
        (["--straggler", "1:0.5"], "a factor >= 1"),
        (["--ports", "two"], "ports is 'two'; choose single or unlimited"),
        (["--machine", "nowhere.json"], "cannot read --machine 'nowhere.json'"),
        (["--inputs", "nowhere.pt"], "inputs 'nowhere.pt' is neither a file nor one of spread"),
        (["--shared", "1.5"], "shared is 1.5; give a part of the entries, in [0, 1]"),
        (["--plot", "a.txt"], "cannot draw 'a.txt'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, monkeypatch, arguments, said):
    monkeypatch.setattr(simulate, "simulate_training", lambda *_: pytest.fail("it was started"))
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
