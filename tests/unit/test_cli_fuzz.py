"""Try hostile values for every option of every command, as listed by the commands.

A call must end with code 0 or 2 within its limits of memory and time, without a traceback; code 1
is allowed if a valid input needs more memory. With code 2, the call must have printed one line and
nothing else. No rank is started: if a command would start ranks, the call counts as accepted. Some
of the accepted calls are then repeated with ranks.
"""

import contextlib
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import typer.main

from sparsync.cli import app as cli
from sparsync.cli import launch, network_choice
from tests.fresh import run_python

CALLS, SHARE = 600, 32  # of the slow test, and of `make test`
GIB = 1 << 30
MEMORY = 4 * GIB  # of address space, in addition to the process's initial size
SECONDS = 60  # of a call, on a busy machine

BEYOND = [str(n) for n in (2**63, 2**64, 10**20 - 1, 5000, 4096, 65537)]
NUMBERS = ["0", "-1", "1", "2", "3", "7", "1.5", "-0.0", "1e26", "1e400", "-1e400", "nan", "inf"]
NUMBERS += ["-inf", *BEYOND, "1e-320", "1e-6", "0x10", "1_000", "٣"]
WORDS = ["", " ", "-", ".", "..", "none", "auto", "every", "dense", "oktopk,,dense", ",", "="]
WORDS += [":::"]
WORDS += ["a" * 5000, "\x1b[2J", "é", "\udcff", "1gbit,50us", "0gbit,1us", "1e400gbit,1us"]
WORDS += ["9" * 400, "random:1:nan", "persistent:-1:1", "1,1", "nan,nan", "0:inf", "3:2.5", "64KB"]
WORDS += [f"{9**30}GB"]
WORDS += ["%s", "oktopk:cap=nan,floor=-1", "wagma:group_size=-1", "a:b=c,d=e", "Ok-Topk:", "x=1"]
WORDS += ["budgeted:codec=a:b", "auto:candidates=+", "sparcml:block=99999999999,bits=none"]


def files(folder):
    """Make hostile files; return their paths."""
    deep = folder / "deep.json"
    deep.write_text("[" * 100_000)
    odd = {"list.json": "[]", "wrong.json": '{"machine": [1]}', "empty": "", "bad.svm": "1 x:y"}
    odd |= {"null.json": '{"machine": null}', "nan.json": '{"machine": {"alpha": NaN}}'}
    for name, text in odd.items():
        (folder / name).write_text(text)
    (folder / "bytes.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff{" + b"\xff" * 50)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    devices = ["/dev/full", "/dev/zero", "/dev/null", "/proc/self/mem", "/proc/none/x"]
    return [*map(str, folder.iterdir()), str(folder), str(folder / "bad.svm" / "x"), *devices]


def commands():
    return dict(typer.main.get_command(cli.make_app()).commands)


# settings that make a command short, unless a hostile value replaces them
SHORT = {
    "train": "",
    "bench": "--ranks 2 --size 1000 --steps 1 --warmup 0",
    "linear": "--ranks 2 --rows 200 --dimensions 5000 --epochs 1",
    "lab": "",
    "doctor": "",
    "plan": "--ranks 4 --model-size 1000000 --network 1gbit,50us",
    "simulate": "--ranks 2 --model-size 100000 --steps 1 --warmup 0",
    "keys": "--ranks 2",
    "reproduce": "",
    "time-to-loss": "--ranks 4 --model-size 1000 --network 1gbit,1us --optimizer sgd",
}
# more steps, ranks or bytes are legal, but take too long
LONG = {"--steps", "--warmup", "--epochs", "--sizes", "--scale"}


def drawn(rng, name, command, paths, numbers=NUMBERS):
    """Draw a command line: some options, each with a value that a user might give."""
    options = [p for p in command.params if p.param_type_name == "option"]
    line = [name]
    for option in rng.sample(options, min(rng.randint(1, 3), len(options))):
        flag = rng.choice(option.opts)
        if option.is_flag:
            line.append(flag)
            continue
        pool = [numbers, WORDS, paths][rng.choices(range(3), _weights(option))[0]]
        value = rng.choice(pool)
        if flag in LONG and value in ("65537", "5000", "4096", "1_000"):
            value = "3"
        if (name, flag, value) == ("linear", "--ranks", "1_000"):  # virtual ones: they take minutes
            value = "3"
        line += [flag, value]
    if name == "keys":
        line.append(rng.choice([*paths, "new", "", "a" * 300]))
    if name == "lab":
        rate = rng.choice(["1gbit", "1gbit,50us", rng.choice(WORDS)])
        line += ["--", rate, rng.choice(["python", "", *paths])]
    if name == "reproduce":
        line.append(rng.choice(["oktopk-table1", "--all", "", "a" * 300]))
    short = SHORT[name]
    if name == "bench" and "--selectors" in line:
        short = "--sizes 64KB"
    elif name == "bench" and "--kernels" in line:
        short = "--size 1000"
    return shortened(line, short)


def shortened(line, short):
    """Add those settings that a command line does not give."""
    words = short.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return [*line, *(word for pair in pairs if pair[0] not in line for word in pair)]


def _weights(option):
    kind = str(option.type_descriptor.annotation)
    if "int" in kind or "float" in kind:
        return 8, 1, 1
    return (1, 1, 8) if "Path" in kind else (2, 5, 2)


class Slow(BaseException):
    pass


@contextlib.contextmanager
def limits():
    """Limit the address space of this process, and the seconds that the block may take."""

    def ring(*_):
        raise Slow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    old = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def call(line):
    """Run a command line in this process; return its fault ("" if there is none), and its exit code."""

    def accepted(*_args, **_options):
        raise SystemExit(0)

    out, err = io.StringIO(), io.StringIO()
    code = None
    try:
        with (
            limits(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "argv", ["sparsync", *line]),
            mock.patch.object(network_choice, "launch", accepted),
            mock.patch.object(launch, "launch", accepted),
            mock.patch("sparsync.cli.train.command._elastic", accepted),
            mock.patch("sparsync_papers.reproduce.command.reproduce", accepted),
            mock.patch("sparsync.cli.network_choice.ensure_privileges", lambda: None),
            mock.patch("sparsync.cli.network_choice.Lab", mock.MagicMock()),
            mock.patch("sparsync.cli.lab_script.command.run_script", accepted),
        ):
            cli.main()
    except SystemExit as end:
        code = end.code
    except Slow:
        return "no end", code
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}", code
    said = err.getvalue()
    if code not in (0, 1, 2):
        return f"ends with {code}", code
    if code == 2 and (out.getvalue() or said.count("\n") != 1 or not said.startswith("error: ")):
        return f"ends with 2, and says {said[-300:]!r}", code
    # some files, e.g. on a full disk, refuse data only when it is written
    if code == 1 and not ("out of memory" in said or "[Errno 5] Input/output error" in said):
        return f"a wrong input ends with 1, and says {said[-300:]!r}", code
    return ("a traceback" if "Traceback" in said else "", code)


def fuzz(count, seed, folder):
    """Return the calls that ended wrongly, and the number of calls for each exit code."""
    rng, paths = random.Random(seed), files(folder)
    known, wrong, codes = commands(), [], {}
    with contextlib.suppress(ImportError):
        import sklearn.datasets  # noqa: F401  seconds, and broken for good if an alarm interrupts it
    for number in range(count):
        name = sorted(known)[number % len(known)]
        line = drawn(rng, name, known[name], paths)
        why, code = call(line)
        codes[code] = codes.get(code, 0) + 1
        if why:
            wrong.append((why, [part[:80] for part in line]))
    return wrong, codes


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.chdir(made)
        hostile = Path(made) / "hostile"
        hostile.mkdir()
        yield hostile


def test_every_command_that_there_is_is_tried():
    assert set(SHORT) >= set(commands()) >= set(cli.COMMANDS)


def test_hostile_values_end_in_one_line(folder):
    wrong, codes = fuzz(SHARE, 0, folder)
    assert not wrong and codes[2] > SHARE / 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_values_end_in_one_line(folder):
    wrong, codes = fuzz(CALLS, 1, folder)
    print(f"{CALLS} calls, by exit code: {codes}; wrong: {len(wrong)}")
    for why, line in wrong:
        print(why, line)
    assert not wrong


# settings that keep commands with ranks short
STARTED = {
    "train": "--ranks 2 --steps 2 --workload digits --timeout 20",
    "bench": SHORT["bench"],
    "linear": SHORT["linear"],
    "doctor": "--ranks 2",
}
FEW = [number for number in NUMBERS if number not in BEYOND]
STARTS = 8
ENDS = 120  # seconds of a call with ranks


def started(line):
    """Repeat an accepted call with its ranks, in a separate process; return its fault."""
    command, environment = [sys.executable, "-m", "sparsync", *line], {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "errors": "replace"}
    options = {**pipes, "env": os.environ | environment, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        try:
            _, said = process.communicate(timeout=ENDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "no end"
    if "Traceback" in said:
        return f"a traceback: {said[-300:]!r}"
    if process.returncode not in (0, 1, 2):
        return f"ends with {process.returncode}: {said[-300:]!r}"
    if process.returncode and "error: " not in said:
        return f"ends with {process.returncode}, and does not say why: {said[-300:]!r}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_accepted_calls_end_with_their_ranks(folder):
    rng, paths, known, wrong, made = random.Random(2), files(folder), commands(), [], 0
    while made < STARTS:
        name = sorted(STARTED)[made % len(STARTED)]
        line = shortened(drawn(rng, name, known[name], paths, FEW), STARTED[name])
        if call(line) != ("", 0):
            continue  # refused, or made without ranks
        made += 1
        if why := started(line):
            wrong.append((why, [part[:80] for part in line]))
    assert not wrong


def run(*arguments, stdout=subprocess.PIPE, **environ):
    line = [sys.executable, "-m", "sparsync", *arguments]
    given = {**os.environ, "COLUMNS": "80", **environ}
    return subprocess.run(
        line, env=given, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )


PLAN = ("plan", "--ranks", "4", "--model-size", "1000000", "--network", "1gbit,50us")


def test_a_terminal_without_unicode():
    ended = run(*PLAN, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


def test_a_plan_under_a_launcher_whose_numbers_are_none():
    main = f"import sys; sys.argv[1:] = {PLAN}; from sparsync.cli.app import main; main()"
    ended = run_python(main, COLUMNS="80", RANK="x", WORLD_SIZE="2")
    assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr


def test_an_output_that_is_full_is_an_error_of_one_line():
    with Path("/dev/full").open("w") as full:
        ended = run(*PLAN, stdout=full)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "No space left on device" in ended.stderr


# as Python starts after ``>&-``
CLOSED = """
import os, sys
for number, name in enumerate(("stdout", "stderr")[:{streams}], start=1):
    os.close(number)
    setattr(sys, name, None)
sys.argv[1:] = {arguments}
from sparsync.cli.app import main
main()
"""


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("options", [(), ("--json", "-"), ("--ranks", "x")])
def test_closed_outputs_discard_what_is_written(streams, options):
    ended = run_python(CLOSED.format(streams=streams, arguments=[*PLAN, *options]))
    refused = options == ("--ranks", "x")
    assert (ended.returncode, ended.stdout) == (2 if refused else 0, "")
    assert ended.stderr.count("\n") == (refused and streams == 1), ended.stderr
