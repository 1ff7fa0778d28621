"""The command line before anything starts: help, and one clear line for bad input."""

import sys

import pytest
import torch

import sparsync
from sparsync.cli import app as cli
from sparsync.cli import network
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import CommunicationError


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``sparsync`` with arguments where starting a rank is an error."""

    def launch(*_args, **_options):
        raise AssertionError("ranks were started")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sparsync", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    monkeypatch.setattr(network, "launch", launch)
    monkeypatch.delenv("RANK", raising=False)
    return run


def test_alone_it_prints_help(command):
    code, out, err = command()
    assert (code, err) == (0, "") and "train" in out


def test_it_tells_its_version(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sparsync", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{sparsync.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "best"], "unknown algorithm 'best'; choose one of allgather, "),
        (["--algorithm", "best"], ", fp16, powersgd, allreduce, local, "),
        (["--density", "0"], "density is 0.0"),
        (["--ranks", "0"], "ranks is 0; give at least 1"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], "seed is -1"),
        (["--optimizer", "lion"], "optimizer is lion; give sgd, adam or adamw"),
        (["--nesterov", "--momentum", "0"], "choose --optimizer sgd --momentum 0.9"),
        (["--weight-decay", "-1"], "weight_decay is -1.0; give a number >= 0"),
        (["--workload", "mnist"], "unknown workload 'mnist'; choose one of bytes, "),
        (["--workload", "digits", "--width", "64"], "width is 64, but digits has no width"),
        (["--lr", "nan"], "lr is nan"),
        (["--momentum", "1"], "momentum is 1.0"),
        (["--warmup-steps", "-1"], "warmup_steps is -1"),
        (["--timeout", "0"], "timeout is 0.0"),
        (["--width", "100"], "width is 100; give a multiple of 32"),
        (["--target-step", "500"], "target_step is 500; give a step of the run, from 1 to 300"),
        (["--algorithm", "fp16", "--target-step", "9"], "add dense"),
        (["--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["--transport", "torch", "--curve-keys", "."], "gloo neither encrypts"),
        (["--lab", "fast"], "fast"),
        (["--delay", "random:2"], "delay is 'random:2'; give none, random:COUNT:SECONDS"),
        (["--delay", "persistent:4:1"], "delay is persistent:4:1; give a rank from 0 to 3"),
        (["--buffers", "none"], "buffers is none; give average or local"),
        (["--deadline", "inf"], "deadline is inf; give seconds > 0"),
        (["--neighbours", "2"], "neighbours is 2, but none of "),
        (["--algorithm", "allreduce,local", "--neighbours", "2"], "choose one of sgp"),
        (["--algorithm", "local", "--period", "0"], "period is 0; give at least 1"),
        (["--algorithm", "sgp", "--neighbours", "0"], "0 neighbours per step; give at least 1"),
        (["--algorithm", "dense,local", "--target-step", "9"], "none could be ahead in local"),
        (["--json", "."], "cannot write to '.'"),
        (["--json", "-"], "'-' is no file"),
        (["--plot", "loss.txt"], "cannot draw 'loss.txt'"),
        (["--stpes", "3"], "--stpes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, said):
    code, out, err = command("train", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert said in err


def test_an_unknown_command_is_one_line(command):
    code, _, err = command("trian")
    assert code == 2 and err.count("\n") == 1 and "trian" in err


def test_only_the_first_rank_of_a_launcher_complains(command, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("train", "--steps", "0") == (2, "", "")


def test_exit_codes(capsys):
    def failing(error):
        def run():
            raise error

        return run

    assert cli.exit_code(lambda: None) == 0
    assert cli.exit_code(failing(CommunicationError("rank 3: died"))) == 1
    assert cli.exit_code(failing(OSError("disk full"))) == 1
    assert cli.exit_code(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "error: rank 3: died\nerror: disk full\n"


def test_dense_ends_at_the_target():
    settings = TrainSettings(steps=20, target_step=7)
    assert [settings.steps_of(name) for name in ("dense", "fp16")] == [7, 20]
    assert TrainSettings(steps=20).steps_of("dense") == 20


def test_the_learning_rate_warms_up():
    settings = TrainSettings(lr_warmup_steps=4)
    assert [settings.learning_rate_at(step) for step in (0, 1, 3, 50)] == [0.025, 0.05, 0.1, 0.1]
    assert TrainSettings(optimizer="adam", lr_warmup_steps=0).learning_rate_at(0) == 1e-3


def test_defaults_are_the_workloads():
    bytes_, lstm = TrainSettings(), TrainSettings(workload="lstm")
    assert (bytes_.lr, bytes_.batch_size, bytes_.clip) == (0.1, 8, 0)
    assert lstm.clip == 0.25
    assert TrainSettings(workload="lstm", clip=0.0).clip == 0
    digits = TrainSettings(workload="digits", lr=2.0)
    assert (digits.lr, digits.batch_size) == (2.0, 32)


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"nesterov": True}, torch.optim.SGD, {"nesterov": True, "momentum": 0.9}),
        ({"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
        ({"optimizer": "adam"}, torch.optim.Adam, {"weight_decay": 0.0, "lr": 1e-3}),
        ({"optimizer": "adamw"}, torch.optim.AdamW, {"weight_decay": 0.01, "lr": 1e-3}),
        ({"optimizer": "adamw", "weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ],
)
def test_the_optimizer_is_torchs_with_these_settings(options, kind, expected):
    optimizer = TrainSettings(**options).make_optimizer(torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in expected} == expected
