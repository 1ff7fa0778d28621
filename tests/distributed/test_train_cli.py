"""Start ``sparsync train`` as users do: a few slow runs of real processes check exit codes and files."""

import json
import os
import signal
import sys
import time

import pytest

from sparsync.cli.app import exit_code
from sparsync.cli.lab import Lab
from sparsync.cli.train.command import train
from sparsync.cli.train.elastic import _Run, train_elastic
from sparsync.cli.train.exchanges import dense_bytes_per_step
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import ConfigurationError

from .commands import end, run, run_well, start, torchrun

pytestmark = pytest.mark.gloo

SMALL = ("--layers", "1", "--width", "64")


def test_algorithms_are_compared(tmp_path):
    pytest.importorskip("matplotlib")
    label = "oktopk:threshold_period=2,buckets=1"
    options = ["--algorithm", f"dense,{label},updates", "--ranks", "2", "--steps", "3"]
    options += ["--optimizer", "adamw"]
    files = ["--json", f"{tmp_path}/new/t.json", "--plot", f"{tmp_path}/new/loss.png"]
    out = run_well("-m", "sparsync", "train", *options, *SMALL, *files)
    assert "dense" in out and "oktopk" in out and "bit-identical" in out

    dense, sparse, updates = json.loads((tmp_path / "new" / "t.json").read_text())
    assert [dense["algorithm"], sparse["algorithm"]] == ["dense", label]
    assert dense["loss"][0] == sparse["loss"][0]  # same weights, same data
    assert dense["loss"][2] != sparse["loss"][2]
    assert dense["bytes_sent_per_step_max"] == dense_bytes_per_step(dense["parameters"], 2)
    assert 0 < sparse["bytes_sent_per_step_max"] < dense["bytes_sent_per_step_max"] / 10
    # A model this small sends eight bits per element and 16 per block on each step, and the whole
    # rest at the end.  The numbers that measure the gradients' noise are sent in addition, two of them
    # for every row of the embedding and of the output layer.
    sent = (3 * (8 + 16 / 512) / 8 + 4) / 3
    assert sent < updates["sent_per_parameter_and_step"] < 1.06 * sent
    for result in (dense, sparse, updates):
        out, into = (result[f"{way}_per_parameter_and_step"] for way in ("sent", "received"))
        in_all = sum(result["bytes_sent"])
        assert in_all == pytest.approx(out * 3 * result["parameters"]) and out <= into < 1.1 * out
        assert result["replicas_equal"] is True
        assert (result["workload"], result["accuracy"]) == ("bytes", None)
        assert (result["ranks"], result["steps"], len(result["loss"])) == (2, 3, 3)
        assert result["eval_loss"] < result["loss"][0]
        assert result["seconds_total"] >= result["seconds_per_step_median"] > 0
        assert result["seconds_computation_median"] > 0 and result["seconds_rest_median"] >= 0
        assert 0 < sum(result["seconds"]) <= result["seconds_total"] * (1 + 1e-9)
    assert (tmp_path / "new" / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_same_command_under_a_launcher(tmp_path):
    options = ["--algorithm", "oktopk", "--steps", "2", "--json", f"{tmp_path}/t.json"]
    options += ["--workload", "digits", "--nesterov", "--weight-decay", "1e-4"]
    out = run_well(*torchrun(2), "-m", "sparsync", "train", *options)
    assert out.count("bit-identical") == 1  # only rank 0 prints
    result = json.loads((tmp_path / "t.json").read_text())
    assert (result["ranks"], result["algorithm"]) == (2, "oktopk")
    assert result["workload"] == "digits" and 0 <= result["accuracy"] <= 1


@pytest.mark.slow
def test_pytorchs_hooks_are_compared_with_their_bytes():
    settings = TrainSettings(ranks=2, steps=4, layers=1, width=64)
    dense, half, low_rank, ours = train(settings, ["dense", "fp16", "powersgd", "allgather"])
    n = dense.parameters
    assert half.bytes_sent == [dense_bytes_per_step(n, 2, itemsize=2)] * 4
    assert half.loss[0] == dense.loss[0] and half.loss[1] == pytest.approx(dense.loss[1], rel=1e-3)
    full, compressed = dense.bytes_sent[0], low_rank.bytes_sent[2]
    assert low_rank.bytes_sent == [full, full, compressed, compressed]
    # with rank 4, every matrix that shrinks below half its size sends 4 (rows + columns) numbers
    w, embedding, positions = 64, 256 * 64, 64 * 64
    layers = 4 * ((3 * w + w) + (w + w) + 2 * (4 * w + w))
    ends = 2 * 4 * (256 + w)
    norms = 2 * 3 * w
    assert embedding > 8 * (256 + w) and positions > 8 * (64 + w)
    assert compressed == dense_bytes_per_step(layers + ends + 4 * (64 + w) + norms, 2)
    assert [r.bytes_counted for r in (dense, half, low_rank)] == ["formula"] * 3
    assert (ours.bytes_counted, ours.density, half.density) == ("ledger", 0.01, 1.0)
    for r in (dense, half, low_rank, ours):
        assert r.replicas_equal and r.target_step == 4
        assert r.target_loss == dense.loss[3] and r.bytes_kernel is None
    assert dense.speedup_to_target == 1.0


@pytest.mark.slow
def test_a_run_ends_at_the_target_and_clips_like_dense():
    settings = TrainSettings(ranks=2, steps=30, layers=1, width=64, target_step=5)
    dense, half = train(settings, ["fp16", "dense"])  # dense runs first, to set the target
    assert dense.algorithm == "dense" and dense.steps == dense.steps_to_target == 5
    assert half.steps == half.steps_to_target < 30
    assert half.speedup_to_target == pytest.approx(sum(dense.seconds) / sum(half.seconds))
    settings = TrainSettings(workload="lstm", clip=1e-9, ranks=2, steps=3, lr_warmup_steps=0)
    dense, half = train(settings, ["dense", "fp16"])
    for result in (dense, half):  # steps of length 1e-9: different batches, the same model
        assert (result.clip, result.accuracy, result.replicas_equal) == (1e-9, None, True)
        assert result.eval_loss == pytest.approx(dense.loss[0], abs=0.05)
    # gradients are clipped after averaging, so hooks and dense differ only in the rounding of the
    # direction
    assert half.loss == pytest.approx(dense.loss, rel=1e-6)


@pytest.mark.slow
def test_a_plateau_lowers_the_rate_of_all_ranks_at_once():
    common = {"ranks": 2, "steps": 8, "layers": 1, "width": 64, "lr": 1.0, "lr_warmup_steps": 0}
    (found,) = train(TrainSettings(**common, lr_schedule="plateau:1e-6:0:1"), ["dense"])
    worse = next(t for t in range(1, 8) if found.loss[t] > (1 - 1e-4) * min(found.loss[:t]))
    (same,) = train(TrainSettings(**common, lr_schedule=f"step:1e-6:{worse + 1}"), ["dense"])
    assert found.replicas_equal and found.loss == pytest.approx(same.loss, rel=1e-4)
    assert found.eval_loss == pytest.approx(same.eval_loss, rel=1e-4)


@pytest.mark.slow
def test_a_training_in_the_lab(tmp_path):
    try:
        with Lab(2, "1gbit"):
            pass
    except ConfigurationError as error:
        pytest.skip(str(error))
    options = ["--algorithm", "dense,oktopk", "--ranks", "2", "--steps", "3", "--lab", "200mbit"]
    more = [*SMALL, "--transport", "torch", "--json", f"{tmp_path}/t.json"]
    out = run_well("-m", "sparsync", "train", *options, *more)
    assert "on links of 200mbit" in out
    for result in json.loads((tmp_path / "t.json").read_text()):
        assert result["lab"] == 200e6 and result["replicas_equal"] is True
        for counted, kernel in zip(result["bytes_sent"], result["bytes_kernel"], strict=True):
            assert 0.9 * counted < kernel < 1.2 * counted + 20_000


def die(rank, step):
    if (rank, step) == (1, 1):
        # the others must read this rank's messages first, because unread ones may be lost with it
        time.sleep(2)
        os._exit(7)


def interrupt(rank, step):
    if (rank, step) == (0, 1):
        os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does on Ctrl-C


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dense", "oktopk"])
def test_a_rank_that_dies_ends_all_with_a_named_error(algorithm):
    code, _, err = run("-m", __name__, "die", algorithm)
    assert code == 1
    assert "rank 1: died with exit code 7" in err
    for survivor in (0, 2):
        assert f"rank {survivor}: PeerError: rank {survivor}, step 1: " in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_interrupt_ends_all():
    code, _, err = run("-m", __name__, "interrupt", "oktopk")
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.alone
def test_schemes_average_models_and_ranks_are_delayed(tmp_path):
    algorithms = "Dense,Allreduce-SGD,Local SGD:period=2"
    options = ["--algorithm", algorithms, "--workload", "digits"]
    more = ["--ranks", "2", "--steps", "5", "--delay", "persistent:1:0.2"]
    out = run_well("-m", "sparsync", "train", *options, *more, "--json", f"{tmp_path}/t.json")
    assert "delay persistent:1:0.2" in out and "bit-identical" in out
    dense, every, local = results = json.loads((tmp_path / "t.json").read_text())
    assert [r["algorithm"] for r in results] == ["dense", "allreduce", "local:period=2"]
    assert dense["options"] is None
    assert every["options"] == {"buffers": "average"}
    assert local["options"] == {"buffers": "average", "period": 2}
    whole = dense_bytes_per_step(every["parameters"], 2)
    for result in (dense, every, local):
        assert result["replicas_equal"] is True and result["delay"] == "persistent:1:0.2"
        assert result["density"] == 1 and 0 <= result["accuracy"] <= 1
        assert min(result["seconds"]) > 0.19  # rank 1 is the last one on every step
        in_all = sum(result["seconds"]) + result["seconds_finish"]
        assert result["seconds_total"] == pytest.approx(in_all)
        assert result["loss"][0] == dense["loss"][0]
    assert dense["seconds_finish"] < 1
    assert every["bytes_counted"] == local["bytes_counted"] == "ledger"
    models = [[round(sent / whole) for sent in r["bytes_sent"]] for r in (every, local)]
    assert models == [[1, 1, 1, 1, 2], [0, 1, 0, 1, 1]]  # the last step includes the end


def train_elastic_until_interrupted(reached):
    loss = _Run._loss

    def interrupting(run, step):
        if step == 3:
            print("interrupted")
            (os.killpg if reached == "all" else os.kill)(os.getpid(), signal.SIGINT)
        return loss(run, step)

    _Run._loss = interrupting
    train_elastic(TrainSettings(ranks=2, steps=10**6, layers=1, width=32), "dense", "none")


if __name__ == "__main__" and sys.argv[1] == "elastic":
    sys.exit(exit_code(lambda: train_elastic_until_interrupted(sys.argv[2])))
elif __name__ == "__main__":
    happening = {"die": die, "interrupt": interrupt}[sys.argv[1]]
    settings = TrainSettings(ranks=3, steps=3, timeout=30.0)
    sys.exit(exit_code(lambda: train(settings, [sys.argv[2]], happening)))


@pytest.mark.slow
@pytest.mark.alone
def test_ranks_are_killed_and_all_is_told(tmp_path):
    pytest.importorskip("torchft")
    options = ["--elastic", "--ranks=3", "--workload=digits", "--optimizer=sgd", "--kill=random:2"]
    files = [f"--json={tmp_path}/elastic.json", f"--plot={tmp_path}/elastic.png"]
    out = run_well("-m", "sparsync", "train", *options, "--steps=600", *files)
    found = json.loads((tmp_path / "elastic.json").read_text())
    assert 0 < found["kills"] == found["recovered"] and found["replicas_equal"], out
    assert found["survivor_seconds_max"] < 3 and found["lost_norm"] > 0
    assert len(found["loss"]) == len(found["present"]) == found["steps"] == 600
    assert (tmp_path / "elastic.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [["dense"], ["sparcml", "--warmup-steps=3"]])
def test_without_kills_elastic_ranks_train_like_all_others(tmp_path, algorithm):
    pytest.importorskip("torchft")
    options = [
        "--algorithm",
        *algorithm,
        "--ranks=2",
        "--steps=20",
        "--layers=1",
        "--width=32",
    ]
    run_well("-m", "sparsync", "train", *options, f"--json={tmp_path}/plain.json")
    run_well("-m", "sparsync", "train", "--elastic", *options, f"--json={tmp_path}/elastic.json")
    plain, elastic = (
        json.loads((tmp_path / f"{n}.json").read_text()) for n in ("plain", "elastic")
    )
    assert elastic["present"] == elastic["present_fault_free"] == [2] * 20
    assert elastic["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    for name in ("eval_loss", "eval_loss_fault_free"):
        assert elastic[name] == pytest.approx(plain["eval_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["all", "command"])  # as by Ctrl-C, or by kill -INT
def test_an_interrupt_ends_an_elastic_training(reached):
    pytest.importorskip("torchft")
    process = start("-m", __name__, "elastic", reached)
    assert process.stdout.readline() == "interrupted\n"
    began = time.monotonic()
    out, _ = end(process)
    assert process.returncode == 130 and "Traceback" not in out, out
    assert time.monotonic() - began < 10
