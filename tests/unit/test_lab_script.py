"""Test ``sparsync lab`` around its ranks: environment, checks, prefixes, tables and pictures."""

import io
import os
import subprocess
import sys
import threading
from functools import partial

import pytest

from sparsync.cli.lab import Seat
from sparsync.cli.lab_script import guard
from sparsync.cli.lab_script.rank_variables import check_script, rank_variables, searched
from sparsync.cli.lab_script.ranks import ScriptResult, _Printer
from sparsync.cli.lab_script.report import comparison, per_rank, write_plot
from sparsync.errors import ConfigurationError
from sparsync.transports.launchers import detect
from tests.tables import cases

from . import consoles

ADDRESSES = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]


def test_a_rank_is_told_what_torchrun_tells():
    told = rank_variables(2, ADDRESSES, {})
    here = detect(told)
    assert (here.rank, here.world_size, here.local_rank) == (2, 3, 2)
    assert (here.host, here.launcher) == ("10.77.0.1", "torchrun")
    assert told["MASTER_PORT"] == "29500" and told["LOCAL_WORLD_SIZE"] == "3"
    # variables that Lightning's TorchElasticEnvironment reads, and those of torchrun's own options
    assert told["TORCHELASTIC_RUN_ID"] == "sparsync-lab"
    assert told["PET_NNODES"] == "3" and told["PET_LOCAL_ADDR"] == "10.77.0.3"
    assert "PET_NODE_RANK" not in told  # c10d assigns it
    hosts = [rank_variables(rank, ADDRESSES, {})["PET_RDZV_CONF"] for rank in range(3)]
    assert hosts == ["is_host=1", "is_host=0", "is_host=0"]


def test_the_users_own_settings_are_kept_and_a_launchers_are_not():
    given = {"OMP_NUM_THREADS": "5", "HF_HUB_OFFLINE": "0", "LOCAL_RANK": "9", "HOME": "/root"}
    told = rank_variables(1, ADDRESSES, given)
    assert (told["OMP_NUM_THREADS"], told["HF_HUB_OFFLINE"], told["HOME"]) == ("5", "0", "/root")
    assert told["LOCAL_RANK"] == "1" and told["WANDB_MODE"] == "offline"
    assert rank_variables(0, ["10.77.0.1"] * 999, {})["OMP_NUM_THREADS"] == "1"


def test_a_seat_names_the_interface_of_every_transport():
    variables = Seat("/proc/1/fd/9", "10.77.0.2").variables
    assert variables["SPARSYNC_LAB_ADDRESS"] == "10.77.0.2"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert variables[name] == "eth0"
    assert variables["NCCL_SHM_DISABLE"] == variables["NCCL_P2P_DISABLE"] == "1"


def test_a_program_is_found_and_a_job_per_link_refused(tmp_path, monkeypatch):
    environ = {"PATH": str(tmp_path)}
    assert searched(environ).split(os.pathsep)[1] == str(tmp_path)
    assert check_script(["sh", "-c", "true"], 2, {"PATH": "/bin"})[1:] == ["-c", "true"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    no_program = "no program 'train.py'; write -- python train.py"
    for words, message in (([], "no script; write it after --"), (["train.py"], no_program)):
        with pytest.raises(ConfigurationError, match=message):
            check_script(words, 2, environ)


RUN = ["python", "-m", "torch.distributed.run"]


@cases(
    (["--standalone"], "--standalone would start a job of its own on every link"),
    (["--nnodes", "1"], "--nnodes 1 does not fit --ranks 4: .* give 4, or MIN:4"),
    (["--nnodes=2:3"], "--nnodes 2:3 does not fit --ranks 4"),
    (["--nnodes=5"], "--nnodes 5 does not fit --ranks 4"),
    (["--rdzv-endpoint", "head:29400"], "--rdzv-endpoint head:29400 is outside the lab"),
    (["--rdzv_backend=static"], "--rdzv-backend static cannot be used in the lab"),
)
def test_torchruns_that_would_not_meet_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=f"^lab: torchrun {message}"):
        check_script([*RUN, *options, "train.py"], 4, os.environ)


@cases(
    ["--nproc-per-node", "2", "train.py"],
    ["--nnodes", "4", "--node-rank", "0", "--master-addr", "head", "train.py"],
    ["--nnodes", "3:4", "--max-restarts", "3", "-m", "train"],
    ["train.py", "--standalone", "--nnodes", "1"],  # options of the script
    ["--no-such-option", "train.py"],  # torchrun says so
    ["--nnodes", "many", "train.py"],
    ["--help"],
)
def test_other_options_of_torchrun_are_passed_on(words, capfd):
    assert check_script([*RUN, *words], 4, os.environ)[1:] == [*RUN[1:], *words]
    assert capfd.readouterr() == ("", "")


def printed(prefix, target, *written):
    """Let a rank write into the pipe that a printer copies to a target; return the printer."""
    printer, (reading, writing) = _Printer(), os.pipe()
    copier = threading.Thread(target=printer.copy, args=(prefix, os.fdopen(reading, "rb"), target))
    copier.start()
    for text in written:
        os.write(writing, text)
    os.close(writing)
    copier.join(30)
    assert not copier.is_alive()
    return printer


def test_lines_get_a_prefix_and_of_a_bar_its_last_state():
    target = io.StringIO()
    written = b"one\ntw", b"o\r\n 10%\r 50%\r100%\n\nlast \xff"
    printer = printed("[3] ", target, *written)
    assert target.getvalue() == "[3] one\n[3] two\n[3] 100%\n[3] \n[3] last \ufffd\n"
    printer.check()


def test_output_that_nobody_reads_is_an_error_and_the_rank_is_not_held_up():
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError("gone")

    printer = printed("", Gone(), *[b"x" * 8191 + b"\n"] * 40)  # more than a pipe holds
    with pytest.raises(BrokenPipeError):
        printer.check()


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_processes_are_found_by_their_namespace():
    own = guard.identity("/proc/self/ns/net")
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {os.getpid(), child.pid} <= set(guard.inside([own]))
            assert guard.inside([(own[0], own[1] + 10**9)]) == []
        finally:
            child.kill()
    assert child.pid not in guard.inside([own])


def result(run="script", seconds=10.0, sent=(8_000_000, 4_000_000), codes=(0, 0)):
    return ScriptResult(
        **{"run": run, "command": ["python", "train.py"], "ranks": 2, "links": "100mbit"},
        **{"exit_code": max(codes), "exit_codes": list(codes)},
        **{"seconds": seconds, "seconds_start": 2.0, "sampled_seconds": [0.0, 2.0, 2.0 + seconds]},
        **{"bytes_sent": list(sent), "bytes_received": list(reversed(sent))},
        sampled_bytes_sent=[0, 1_000, max(sent)],
    )


shown = partial(consoles.shown, width=200)


def test_a_run_is_reported_by_rank():
    text = shown(per_rank(result(codes=(0, 3))))
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "0", "8", "MB", "4", "MB"] in rows and ["1", "3", "4", "MB", "8", "MB"] in rows
    assert "2 ranks on links of 100mbit" in text and "seconds: 10.0, from the moment" in text
    assert "nothing was sent" not in text
    text = shown(per_rank(result(sent=(9, 0))))
    assert "nothing was sent by rank 1: the script must join" in text


def test_two_runs_are_compared(tmp_path):
    dense, attached = result("dense", 30.0), result("attached", 10.0, (400_000, 300_000))
    rows = [line.split() for line in shown(comparison(dense, attached)).splitlines()]
    assert rows[2] == ["dense", "30.0", "1", "x", "8", "MB", "8", "MB", "1", "x", "2", "s"]
    assert rows[3][:6] == ["attached", "10.0", "3", "x", "400", "kB"]
    assert rows[3][8:10] == ["20", "x"]
    assert "does the script call sparsync.attach?" in shown(comparison(dense, dense))
    assert "does the script" not in shown(comparison(dense, attached))
    pytest.importorskip("matplotlib")
    write_plot([dense, attached], tmp_path / "lab.svg")
    assert "<!-- attached: 3 x as fast, 20 x fewer bytes -->" in (tmp_path / "lab.svg").read_text()
