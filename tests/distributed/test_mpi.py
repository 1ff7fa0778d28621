"""The MPI transport between real processes of ``mpiexec``: few and grouped, starting is slow."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync import ConfigurationError, testing
from sparsync.cli.bench.command import BenchSettings
from sparsync.cli.launch import RankError, launch
from sparsync.cli.mpiexec import mpiexec_command
from sparsync.transports.sim import simulate
from tests.contracts.table import ALGORITHMS, CALLS, OTHERS, exercise

from . import mpi_programs

ROOT = Path(__file__).parents[2]
RANKS = 4
WHOLE = ["budgeted"]


def missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'sparsync[mpi]'"
    try:
        mpiexec_command(1)
    except ConfigurationError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.gloo, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_the_lab_refuses_mpi():
    with pytest.raises(ConfigurationError, match="share memory, past the lab's links"):
        BenchSettings(transport="mpi", lab="1gbit")


@pytest.fixture(scope="module")
def mpi():
    return launch(mpi_programs.everything, RANKS, CALLS, WHOLE, timeout=120.0, mpi=True)


def check_rows(names, mpi):
    """Compare the digests and the ledger's numbers of collectives with the simulator's."""
    for name in names:

        async def program(comm, name=name):
            digests = await exercise(comm, name)
            total = comm.ledger.total()
            return digests, [
                total.sent,
                total.received,
                total.messages_sent,
                total.messages_received,
            ]

        digests, booked = simulate(program, RANKS).results[0]
        assert mpi["digests"][name] == digests, name
        # a native allreduce is booked by its formula, the simulator's is padded to whole blocks
        few = 0 if name == "allgather" else 0.02
        assert mpi["booked"][name] == pytest.approx(booked, rel=few), name


def test_mpi_equals_the_simulator_bit_for_bit_and_in_its_books(mpi):
    check_rows(CALLS, mpi)
    for name in WHOLE:

        async def whole(comm, name=name):
            return await testing.exercise_algorithm(comm, ALGORITHMS[name])

        assert mpi["digests"][name] == simulate(whole, RANKS).results[0], name


@pytest.mark.slow
def test_the_other_collectives_equal_the_simulators():
    check_rows(OTHERS, launch(mpi_programs.rows, RANKS, OTHERS, timeout=120.0, mpi=True))


def test_agents_average_models_beside_the_training(mpi):
    assert len(set(mpi["averaged"])) == 1 and len(mpi["averaged"]) == RANKS


def test_calls_without_a_model_overlap(mpi):
    assert all(mpi["calls"].values()), mpi["calls"]


def test_channels_in_flight_do_not_wait_for_each_other_in_circles(mpi):
    assert mpi["in flight"]


def test_every_dtype_is_reduced_and_no_nan_is_lost(mpi):
    assert all(mpi["numbers"].values()), mpi["numbers"]


def test_a_group_of_some_ranks_connects(mpi):
    assert mpi["part"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "silent",
            ["DeadlineError: rank 0, step 4: message from rank 1 in phase 'split'", "0.5 s"],
        ),
        ("longer", ["PeerError: rank 0, step 4: message from rank 1", "10 bytes", "is longer"]),
        ("shorter", ["PeerError: rank 0, step 4: message from rank 1", "9 bytes where 10"]),
        ("alone", ["DeadlineError: rank 0, step 4: wait for all ranks", "channel 0", "0.5 s"]),
        ("tag", ["ConfigurationError: channel 1099511627776", "tags from 0 to"]),
        ("closed", ["ConfigurationError: rank 0", "is closed; connect again"]),
        ("comm", ["ConfigurationError: comm is of type int", "Intracomm"]),
    ],
)
def test_errors_name_rank_step_and_phase(mpi, name, words):
    message = mpi["errors"][name]
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_fails_ends_the_job(dies):
    program = mpi_programs.one_rank_dies if dies else mpi_programs.one_rank_refuses
    with pytest.raises(RankError) as caught:
        launch(program, 2, 1, timeout=30.0, grace=10.0, mpi=True)
    lines = str(caught.value).splitlines()
    if dies:
        assert re.match(r"rank 1: died or was ended by mpiexec, whose exit code is \d+", lines[1])
    else:
        assert lines[0].startswith(
            "rank 0: DeadlineError: rank 0, step 0: message from rank 1 in phase 'barrier'"
        )
        assert lines[1] == "rank 1: ConfigurationError: this one does not want to"


@pytest.mark.slow
def test_the_command_starts_mpiexec_itself(tmp_path):
    options = ["--transport", "mpi", "--ranks", "2", "--collectives", "dense,oktopk"]
    more = ["--size", "5000", "--steps", "2", "--warmup", "1", "--json", f"{tmp_path}/b.json"]
    command = [sys.executable, "-m", "sparsync", "bench", *options, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(r["collective"], r["ranks"], r["transport"], r["wrong"]) for r in rows] == [
        ("dense", 2, "mpi", 0),
        ("oktopk", 2, "mpi", 0),
    ]


def test_arrays_and_ddp_under_mpiexec():
    program = [sys.executable, "-m", "tests.distributed.mpi_programs"]
    example = ["examples/train_ddp.py", "--transport", "mpi", "--steps", "15"]
    done = subprocess.run(
        [*mpiexec_command(2), *program, *example],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"^2 ranks, 15 steps: loss ([\d.]+) -> ([\d.]+),.*equal: (\w+)$", done.stdout, re.M
    )
    assert found, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
    assert found[3] == "True"
