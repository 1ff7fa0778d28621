"""Test the command line before anything starts: help, and one-line errors for bad input."""

import re
import shlex

import pytest
import torch

import sparsync
from sparsync.cli import app as cli
from sparsync.cli.train.schedule import Plateau, parse_schedule
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import CommunicationError
from tests.fresh import run_python
from tests.tables import cases, refuses


def test_alone_it_prints_help(command):
    code, out, err = command()
    assert (code, err) == (0, "") and "train" in out


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_help_is_whole_in_80_columns(command, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(*[name] * (name is not None), "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out and not re.search(r"^ .*\.\.\.$", out, re.MULTILINE), out


@pytest.mark.parametrize("name", ["reproduce", "time-to-loss"])
def test_a_command_of_the_papers_names_their_package(command, monkeypatch, name):
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    code, out, err = command(name, "--ranks", 4)
    assert (code, out, err.count("\n")) == (2, "", 1)
    said = f"error: sparsync {name} is in the package sparsync-papers, which is not "
    assert err.startswith(said)
    assert "No such command" in command("nonsense")[2]
    assert command()[0] == 0 and "time-to-loss" not in command()[1]


def test_it_tells_its_version(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sparsync", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{sparsync.__version__}\n"


BAD_INPUT = {
    "train": [
        ("--algorithm best", "unknown algorithm 'best'; choose one of allgather, "),
        ("--algorithm best", ", topkdsa, allreduce, local, "),
        ("--algorithm best", ", eager-majority, fp16, powersgd"),
        ("--algorithm wagna", "unknown algorithm 'wagna' (did you mean wagma"),
        ("--density 0", "density is 0.0"),
        (
            "--algorithm dense,updates --density 0.1",
            "no effect on dense, updates; leave it out, or",
        ),
        ("--ranks 0", "ranks is 0; give at least 1"),
        ("--steps many", "--steps"),
        ("--seed -1", "seed is -1"),
        ("--optimizer lion", "optimizer is lion; give sgd, adam, adamw or muon"),
        ("--nesterov --momentum 0", "choose --optimizer sgd --momentum 0.9"),
        ("--weight-decay -1", "weight_decay is -1.0; give at least 0"),
        ("--workload mnist", "unknown workload 'mnist'; choose one of bytes, "),
        ("--workload digits --width 64", "width is 64, but digits has no width"),
        ("--lr nan", "lr is nan"),
        ("--momentum 1", "momentum is 1.0"),
        ("--warmup-steps -1", "warmup_steps is -1"),
        ("--timeout 0", "timeout is 0.0"),
        ("--width 100", "width is 100; give a multiple of 32"),
        ("--target-step 500", "target_step is 500; give a step of the run, from 1 to 300"),
        ("--algorithm fp16 --target-step 9", "add dense"),
        ("--transport pigeon", "unknown transport 'pigeon'"),
        ("--transport torch --curve-keys .", "gloo neither encrypts"),
        ("--lab fast", "fast"),
        ("--delay random:2", "delay is 'random:2'; give none, random:COUNT:SECONDS"),
        ("--delay persistent:4:1", "delay is persistent:4:1; give a rank from 0 to 3"),
        ("--buffers none", "buffers is none; give average or local"),
        ("--algorithm wagma:deadline=inf", "deadline is inf; give seconds > 0"),
        ("--algorithm local:neighbours=2", "local has no option neighbours; it has period"),
        ("--algorithm wagma:tau=8", "wagma has no option tau (did you mean sync_period?)"),
        ("--period 2", "period is 2, but none of budgeted has it"),
        ("--algorithm local --period 0", "period is 0; give at least 1"),
        ("--algorithm sgp:neighbours=0", "neighbours is 0; give a whole number, at least 1"),
        ("--algorithm quantised:bits=7", "7"),
        ("--algorithm fp16:bits=7", "fp16 has no option bits; it has none"),
        ("--elastic --algorithm D-PSGD", "dpsgd averages models"),
        ("--elastic --algorithm dense,budgeted", "--elastic trains by one algorithm"),
        ("--elastic --lr-schedule plateau:0.5:1:9", "has no --lr-schedule plateau: ranks"),
        ("--elastic --space local", "--elastic has no --space: it exchanges"),
        ("--elastic --algorithm dense --target-step 9", "has no --target-step: it"),
        ("--elastic --buffers local", "--elastic has no --buffers local: that"),
        ("--elastic --momentum-correction", "has no momentum before the exchange: ranks"),
        ("--elastic --algorithm redsync", "add --no-momentum-correction"),
        ("--elastic --period 2", "period is 2, but none of budgeted has it"),
        (
            "--elastic --algorithm updates --optimizer adamw --warmup-steps 9",
            "updates exchanges updates; give its own, updates:warmup_steps=9",
        ),
        ("--algorithm dense,local --target-step 9", "leave it out for local, and compare the"),
        ("--json .", "cannot write to '.'"),
        ("--json -", "'-' is not a file"),
        ("--plot loss.txt", "cannot draw 'loss.txt'"),
        ("--stpes 3", "--stpes"),
        (f"--seed {2**64}", f"seed is {2**64}; give at most 4.295e+09"),
        ("--batch-size 1000000", "give a smaller --batch-size"),
        ("--algorithm wagma:group_size=100 --ranks 2", "group_size is 100 of 2"),
        ("--kill random:30", "--kill is only for --elastic"),
        ("--timeout 1e-6", "timeout is 1e-06; give at least 0.1"),
        ("--optimizer adamw --momentum 0.5", "momentum is 0.5; give --optimizer sgd"),
        ("--json /dev/full", "cannot write to '/dev/full' (No space left on device)"),
        (f"--data {'a' * 300}", "cannot be read (File name too long)"),
    ],
    "bench": [
        ("--collectives best", "unknown algorithm 'best'; choose one of allgather, "),
        ("--collectives WAGMA-SGD", "or on the command line: sparsync train --algorithm WAGMA"),
        ("--collectives oktopk:cap", "oktopk: 'cap' is not OPTION=VALUE"),
        ("--collectives dense,cap=2", "'cap=2' follows no NAME: of an algorithm"),
        ("--ranks 0", "ranks is 0; give at least 1"),
        ("--size many", "size is 'many'; give whole numbers"),
        ("--size 0", "size is 0; give at least 1"),
        ("--size 1,,2", "size is '1,,2'"),
        ("--density 0.1,x", "density is '0.1,x'; give numbers"),
        ("--density 2", "density is 2.0"),
        ("--density nan", "density is nan"),
        ("--steps 0", "steps is 0; give at least 1"),
        ("--warmup -1", "warmup is -1; give at least 0"),
        ("--input odd", "unknown input 'odd'; choose one of uniform"),
        ("--transport pigeon", "unknown transport 'pigeon'; choose one of sim, auto"),
        ("--verify some", "verify is some; give auto, every, ends, digest"),
        ("--lab fast", "fast"),
        ("--lab 1gbit --transport sim", "--lab needs real ranks"),
        ("--rtt 20ms", "these links have no rate; add --lab 100mbit"),
        ("--lab 1gbit --loss 2", "cannot read '2'; write the loss like 0.1%"),
        ("--lab 1gbit,20ms --up 1mbit", "rate '1gbit,20ms' is not a number"),
        ("--curve-keys .", "--curve-keys needs real ranks"),
        ("--curve-keys . --transport torch", "gloo neither encrypts"),
        ("--curve-keys nowhere --transport zmq", "'nowhere' is not a folder"),
        ("--network 1gbit", "has no latency"),
        ("--timeout 0", "timeout is 0.0"),
        ("--json .", "cannot write to '.'"),
        ("--szie 3", "--szie"),
        ("--kernels --plot s.png", "add --selectors"),
        ("--kernels --selectors", "choose one of them"),
        ("--device cuda", "--device is only for --kernels or --selectors"),
        ("--sizes 64KB", "--sizes is only for --selectors"),
        ("--kernels --verify every", "--kernels has no --verify; leave it out"),
        ("--size 1000000000000", "give a smaller --size, or fewer --ranks"),
        (f"--size {'9' * 30}", "give at most 1e+12"),
        ("--transport torch --network 1mbit,1ms", "--network describes the simulated network"),
    ],
    "bench --selectors": [
        ("--sizes big", "sizes is 'big'; give bytes separated by commas, e.g. 64KB,1MB"),
        ("--sizes 64KB,,1MB", "sizes is '64KB,,1MB'"),
        ("--sizes 0KB", "sizes is '0KB'"),
        ("--input dominant", "input is dominant; give uniform, normal"),
        ("--density 0.1,0.2", "density is '0.1,0.2'; --selectors takes one"),
        ("--density 2", "density is 2.0"),
        ("--device tpu", "--device is 'tpu'; here it can be: cpu"),
        ("--json .", "cannot write to '.'"),
        ("--plot s.txt", "cannot draw 's.txt'"),
    ],
    "simulate": [
        ("--algorithm redsync:thsd1=x", "redsync: thsd1 is 'x'; give a number or none"),
        ("--algorithm best", "unknown algorithm 'best'; choose one of allgather, "),
        ("--ranks 0", "ranks is 0; give at least 1"),
        ("--ranks many", "ranks is 'many'; give whole numbers"),
        ("--model-size 0", "model_size is 0"),
        ("--density 2", "density is 2.0"),
        ("--network fast", "cannot read 'fast'"),
        ("--inner-network 1gbit,1us", "give --nodes RANKS"),
        ("--nodes 0", "nodes is 0; give at least 1"),
        ("--compute long", "compute is 'long'; give SEC or SEC,spread"),
        ("--compute 1,2,3", "compute is '1,2,3'"),
        ("--compute -1", "compute is -1.0; give at least 0"),
        ("--compute 1,nan", "spread is nan; give at least 0"),
        ("--scale 0.5", "scale is 0.5; give at least 1"),
        ("--steps 0", "steps is 0"),
        ("--warmup -1", "warmup is -1"),
        ("--buckets 0", "buckets is 0"),
        ("--straggler 3", "straggler is '3'; give RANK:FACTOR"),
        ("--straggler 99:2", "straggler is 99:2; give RANK:FACTOR with a rank in [0, 32)"),
        ("--ranks 4,2 --compute 1 --straggler 3:2", "3:2; give RANK:FACTOR with a rank in [0, 2)"),
        ("--straggler 1:0.5", "a factor >= 1"),
        ("--straggler 1:2", "slows computation, which takes 0 s; add --compute SEC"),
        ("--inputs uniform --shared 0.9", "--shared is only for --inputs spread, not"),
        ("--ports two", "ports is 'two'; give single or unlimited"),
        ("--machine nowhere.json", "cannot read --machine 'nowhere.json'"),
        ("--inputs nowhere.pt", "inputs is 'nowhere.pt'; give a file of recorded gradients, or"),
        ("--shared 1.5", "shared is 1.5; give a fraction of the entries, in [0, 1]"),
        ("--plot a.txt", "cannot draw 'a.txt'"),
        ("--buckets 5000", "buckets is 5000; give at most 1,000"),
        ("--machine /dev/zero", "cannot read --machine '/dev/zero' (not a regular file)"),
    ],
    "plan --ranks 2 --model-size 1000": [
        ("", "name one, e.g. --network 10gbit,20us, or give --machine FILE"),
        ("--network fast", "cannot read 'fast'"),
        ("--machine missing.json", "cannot read --machine 'missing.json' (No such file"),
        ("--machine .", "cannot read --machine '.' (Is a directory)"),
    ],
    "plan --ranks 2 --model-size 1000 --network 1gbit,1us": [
        ("--algorithm topk", "(did you mean TopkA or gtopk"),
        ("--algorithm gtopk --all", "choose one of them"),
        (
            "--algorithm dense,Auto:budget=9",
            "omit --algorithm, or choose among allgather, budgeted",
        ),
        ("--density 7", "density is 7.0"),
        ("--ranks 0", "ranks is 0; give at least 1"),
        ("--ranks two", "ranks is 'two'; give whole numbers separated"),
        ("--ranks 2,0", "ranks is 0; give at least 1"),
        ("--rtt 80", "--rtt '80' is not a duration; write it like 80ms"),
        ("--model none", "model is 'none'; give full or paper"),
        ("--model paper --compute 1 --all", "the paper's model knows no --compute, --all; omit it"),
        ("--model paper --algorithm budgeted,TopkA", "has no budgeted; choose among dense, allg"),
        ("--model paper --density 2", "density is 2.0"),
        ("--budget 5", "give a larger budget"),
        ("--compute -1", "compute is -1.0"),
        ("--model-size 99999999999999999999", "give at most 1e+15"),
        ("--model-size 7.5", "'7.5' is not a whole number"),
        ("--optimizer adam", "choose one of sgd, sgd-momentum, adamw, muon"),
        ("--json /proc/none/plan.json", "cannot write to"),
    ],
    "plan --model-size 1e9 --optimizer adamw": [
        ("--algorithm oktopk", "--algorithm: for predictions of time, which need --network"),
        ("--all", "--all: for predictions of time, which need --network"),
        ("--budget 1e6", "--budget: for predictions of time, which need --network"),
        ("--compute 0.1", "--compute: for predictions of time, which need --network"),
        ("--ranks 8", "--ranks: for predictions of time, which need --network"),
        ("--optimizer muon --density 0.1", "no effect on the memory of muon, with"),
        ("--optimizer adam --density 0.1", "choose one of sgd, sgd-momentum, adamw, muon"),
    ],
    "linear": [
        ("--data nowhere.svm", "--data 'nowhere.svm' is not a file; name an svmlight file"),
        ("--model ridge", "unknown model 'ridge'; choose one of logistic, svm"),
        ("--solver newton", "solver is newton; give sgd or scd"),
        ("--solver scd --model svm", "choose logistic"),
        ("--solver scd --aggregation async", "scd is synchronous"),
        ("--exchange best", "unknown exchange 'best'; choose one of dense, allgather"),
        ("--exchange DSAR_Split_algather", "(did you mean DSAR_Split_allgather"),
        ("--exchange ring:cap=2", "ring has no option cap; it has dense (true or false)"),
        ("--compare oktopk", "unknown exchange 'oktopk'"),
        ("--aggregation late", "aggregation is late; give sync or async"),
        ("--staleness 3", "staleness is 3 with --aggregation sync"),
        ("--aggregation async --staleness -1", "staleness is -1"),
        ("--batch 0", "batch_size is 0"),
        ("--lr nan", "lr is nan"),
        ("--l1 -1", "l1 is -1.0"),
        ("--schedule cosine", "unknown schedule 'cosine'"),
        ("--held-out-every 1", "held_out_every is 1"),
        ("--transport sim --lab 1gbit", "--lab needs real ranks"),
        ("--network fast", "cannot read 'fast'"),
        ("--threads 99999999999", "threads is 99999999999; give at most 1,024"),
        ("--dimensions 99999999999", "give at most 2.147e+09"),
        ("--solver scd --batch 5", "batch_size is 5, which scd does not have"),
    ],
    "keys": [
        ("/dev/null", "cannot make the folder /dev/null for keys: File exists"),
        ("/proc/none/x", "cannot make the folder /proc/none/x for keys: No such file"),
        ("''", "the folder for the keys has no name"),
        ("new --ranks 99999999999", "ranks is 99999999999; give at most 4,096"),
    ],
    "lab": [
        ("fast python", "rate 'fast' is not a number and kbit, mbit or gbit"),
        ("100mbit", "Missing argument"),
        ("100mbit --ranks 0 python", "ranks is 0; give at least 1"),
        ("100mbit --ranks 1000 python", "ranks is 1000; give at most 999"),
        ("100mbit --grace nan python", "grace is nan; give at least 0"),
        ("100mbit;2=1mbit python", "link '2=1mbit' belongs to none of 2 ranks"),
        ("100mbit -- pyton a.py", "there is no program 'pyton'; give one after --"),
        ("100mbit --plot a.txt python", "cannot draw 'a.txt'"),
        ("100mbit,1ms --up 1mbit python", "rate '100mbit,1ms' is not a number"),
    ],
    "doctor": [
        ("--ranks 0", "ranks is 0; give at least 1"),
        ("--seconds 0", "seconds is 0; give some > 0 and at most --timeout, 60"),
        ("--seconds 61", "seconds is 61; give some > 0 and at most --timeout, 60"),
        ("--seconds nan", "seconds is nan; give some > 0"),
        ("--timeout 1e9", "timeout is 1000000000.0; give at most 1e+06"),
        ("--transport sim", "unknown transport 'sim'; choose one of auto, torch"),
        ("--model-size many", "model"),
        ("--model-size 7e9 --optimizer adam2", "optimizer is 'adam2'"),
        ("--optimizer sgd", "give --model-size as well"),
    ],
}


@cases(*((line, *case) for line, its in BAD_INPUT.items() for case in its))
def test_bad_input_is_one_line_and_exit_code_2(line, arguments, said, command):
    code, out, err = command(*line.split(), *shlex.split(arguments))
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


@cases(
    ("0", "train --elastic --steps 2", "start it as one process, without a launcher"),
    ("0", "bench --steps 1", "sim needs no launcher"),
    ("0", "bench --steps 1 --lab 1gbit", "--lab starts its own ranks"),
    ("x", "train", "RANK"),
)
def test_a_launcher_that_does_not_fit_is_one_line(rank, line, said, command, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = command(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err


@pytest.mark.parametrize(("given", "seconds"), [([], 5.0), (["--timeout", "20"], 20.0)])
def test_the_timeout_of_elastic_ranks_is_the_one_given(command, monkeypatch, given, seconds):
    seen = []
    monkeypatch.setattr("sparsync.cli.train.command._elastic", lambda *given: seen.append(given[0]))
    code, _, err = command("train", "--elastic", *given)
    assert code == 0, err
    assert seen[0].timeout == seconds


INTERRUPTED = """
import os, signal, sys
from sparsync.cli.launch import fork_server

os.setpgid(0, 0)
signal.signal(signal.SIGINT, lambda *_: print("the command", flush=True))
context = fork_server("torch")
os.killpg(0, signal.SIGINT)  # as a terminal does on Ctrl-C, here while the server starts
process = context.Process(target=signal.raise_signal, args=(signal.SIGINT,))
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_an_interrupt_reaches_the_command_alone():
    done = run_python(INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the command\n", "")


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


def rates(steps, schedule, at, **options):
    settings = TrainSettings(lr=1.0, steps=steps, lr_schedule=schedule, **options)
    return [settings.learning_rate_at(step) for step in at]


def test_the_learning_rate_falls_in_steps_or_to_zero():
    at = (0, 3, 79, 80, 119, 120, 159)
    expected = pytest.approx([0.25, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])
    for schedule in ("step:0.1:80+120", "step:0.1:50%+75%"):
        assert rates(160, schedule, at, lr_warmup_steps=4) == expected
    assert rates(100, "linear", (19, 20, 60, 99), lr_warmup_steps=20) == [1.0, 1.0, 0.5, 0.0125]


def test_milestones_are_those_of_torch():
    """Compare with MultiStepLR, stepped after every step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.5)
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(10, "step:0.5:3+7", range(10), lr_warmup_steps=0) == theirs


def test_a_plateau_halves_the_rate_after_the_windows_it_accepts():
    plateau, factors = Plateau(parse_schedule("plateau:0.5:1:2")), []
    for loss in (4.0, 2.0, 3.0, 3.0, 2.0, 4.0, 1.0, 1.0, 5.0, 5.0):  # windows: 3, 3, 3, 1, 5
        factors.append(plateau.factor)
        if plateau.is_due(loss):
            plateau.judge(plateau.mean)
    assert factors == [1.0] * 6 + [0.5] * 4  # two windows no better than the first


@refuses(
    ("cosine", "constant, linear, step:FACTOR:AT"),
    ("linear:3", "'linear:3'; give constant"),
    ("step:0.1", "'step:0.1'; give"),
    ("step:0.1:", r"AT\+AT"),
    ("step:2:80", "FACTOR is 2.0; give a number between 0 and 1"),
    ("step:0.1:120+80", "rising steps"),
    ("step:0.1:50%+80", "rising percentages"),
    ("step:0.1:50%+120%", r"'step:0.1:50%\+120%'; give"),
    ("step:0.1:x", "'step:0.1:x'; give"),
    ("plateau:0.5:1", "'plateau:0.5:1'; give"),
    ("plateau:0.5:-1:5", "PATIENCE is -1; give a number >= 0"),
    ("plateau:0.5:1:0", "EVERY is 0; give a number of steps >= 1"),
)
def test_a_wrong_schedule_is_refused_in_one_line(schedule):
    TrainSettings(lr_schedule=schedule)


def test_defaults_are_the_workloads():
    bytes_, lstm = TrainSettings(), TrainSettings(workload="lstm")
    assert (bytes_.lr, bytes_.batch_size, bytes_.clip) == (0.1, 8, 0)
    assert lstm.clip == 0.25
    assert TrainSettings(workload="lstm", clip=0.0).clip == 0
    digits = TrainSettings(workload="digits", lr=2.0)
    assert (digits.lr, digits.batch_size) == (2.0, 32)


@cases(
    ({"nesterov": True}, torch.optim.SGD, {"nesterov": True, "momentum": 0.9}),
    ({"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    ({"optimizer": "adam"}, torch.optim.Adam, {"weight_decay": 0.0, "lr": 1e-3}),
    ({"optimizer": "adamw"}, torch.optim.AdamW, {"weight_decay": 0.01, "lr": 1e-3}),
    ({"optimizer": "adamw", "weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
)
def test_the_optimizer_is_torchs_with_these_settings(options, kind, expected):
    (optimizer,) = TrainSettings(**options).make_optimizers(torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in expected} == expected


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has the first Muon")
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    settings = TrainSettings(optimizer="muon", width=32, layers=1)
    model = settings.make_workload().make_model(0)
    muon, adam = settings.make_optimizers(model)
    of_muon, of_adam = (
        {id(p) for group in o.param_groups for p in group["params"]} for o in (muon, adam)
    )
    names = {name for name, p in model.named_parameters() if id(p) in of_muon}
    assert type(muon) is torch.optim.Muon and type(adam) is torch.optim.AdamW
    assert names and all("embedding" not in n and not n.startswith("head.") for n in names)
    assert of_muon | of_adam == {id(p) for p in model.parameters()} and not of_muon & of_adam
