"""The ZeroMQ transport between real processes: few and grouped, because starting is slow."""

import re

import pytest

from sparsync import testing
from sparsync.cli.launch import RankError, launch
from sparsync.transports.sim import simulate
from sparsync.transports.zmq import make_curve_keys
from tests.contracts.table import ALGORITHMS, CALLS, OTHERS, exercise

from . import zmq_programs

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("rows", [CALLS, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_zmq_equals_gloo_and_the_simulator_bit_for_bit(tmp_path, rows):
    make_curve_keys(tmp_path, 3)
    on_zmq = launch(zmq_programs.contracts, 3, rows, str(tmp_path), timeout=60.0)
    for name in rows:

        async def program(comm, name=name):
            return await exercise(comm, name)

        assert on_zmq[name] == simulate(program, 3).results[0], name

    async def whole_steps(comm):
        return await testing.exercise_algorithm(comm, ALGORITHMS["oktopk"])

    assert on_zmq["algorithm oktopk"] == simulate(whole_steps, 3).results[0]
    assert on_zmq["gloo"] == on_zmq["encrypted"] == on_zmq[rows[0]]


@pytest.mark.parametrize(("program", "step"), [("one_rank_dies", 4), ("one_rank_never_spoke", 0)])
def test_a_dead_rank_is_named_within_about_a_second(program, step):
    with pytest.raises(RankError) as caught:
        launch(getattr(zmq_programs, program), 3, 1, timeout=30.0)
    lines = str(caught.value).splitlines()
    assert lines[1] == "rank 1: died with exit code 7"
    for rank in (0, 2):
        where = f"rank {rank}, step {step}: message from rank 1 in phase 'split' will not come"
        assert lines[rank].startswith(f"rank {rank}: PeerError: {where}"), lines[rank]
        seconds = re.search(r"\(after ([\d.]+) s\)", lines[rank])
        assert seconds and float(seconds[1]) < 5, lines[rank]  # the deadline is 20


def test_a_silent_rank_runs_into_the_deadline():
    with pytest.raises(RankError) as caught:
        launch(zmq_programs.one_rank_sleeps, 2, 1, timeout=30.0)
    assert "rank 0: DeadlineError: rank 0, step 0: message from rank 1" in str(caught.value)
    assert "within 1.5 s" in str(caught.value)


def test_a_rank_that_is_missing_while_others_connect_is_named_and_may_come_later():
    said = launch(zmq_programs.one_rank_is_late, 3, 1, timeout=30.0)
    missing = "phase 'rendezvous': no address from ranks 1 within 1 s"
    assert said["zmq"].startswith(f"rank 0, {missing}")
    assert said["torch"].startswith(f"rank 0, {missing}")
    assert said["default"] == "ZmqCommunicator"
