"""Replicas under torchft's lighthouse are killed, stopped, ended and restarted, and stay bit-equal."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchft")
from torchft.coordination import LighthouseServer

from sparsync.cli.lab import Lab
from sparsync.cli.train.elastic import be_lighthouse
from sparsync.transports.zmq import make_curve_keys

from .elastic_jobs import train
from .test_lab import IN_THE_LAB

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

SECONDS = 60.0


class Job:
    """Replicas, their lighthouse, and their reports."""

    def __init__(
        self, replicas, timeout=3.0, lab=None, outer=None, keys=None, apart=False, **options
    ):
        self.outer = outer  # settings of exchanges of updates; None: of gradients
        self.keys, self.options = keys, options  # more of managers
        self.errors = tempfile.TemporaryDirectory(prefix="sparsync-members-")
        self.context = multiprocessing.get_context("forkserver")
        self.until, self.timeout = self.context.Value("i", 10**6), timeout
        self.processes, self.pipes, self.steps, self.ends = {}, {}, {}, {}
        self.lab, self.port, self.lighthouse = lab, 0, None
        if apart or lab is not None:  # on a link of its own
            self.light_apart(None if lab is None else lab.seat(replicas))
        else:
            self.light()
        for number in range(replicas):
            self.start(number)

    def light(self):
        """Start a lighthouse, where the last one was."""
        # in this process, because pytest then shows its output if a test fails
        self.lighthouse = LighthouseServer(
            bind=f"127.0.0.1:{self.port}",
            min_replicas=1,
            join_timeout_ms=60_000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=500,
        )
        self.port = int(self.lighthouse.address().rpartition(":")[2])
        self.address = f"http://127.0.0.1:{self.port}"

    def light_apart(self, seat=None):
        """Start a lighthouse in a process of its own, at the address of the last one."""
        self.light_pipe, theirs = self.context.Pipe()  # it ends together with this process
        call = theirs, seat, self.port
        self.processes["lighthouse"] = self.context.Process(target=be_lighthouse, args=call)
        self.processes["lighthouse"].start()
        self.address = self.light_pipe.recv()
        self.port = int(self.address.rpartition(":")[2])

    def start(self, number, seed=0, late=False, **options):
        self.pipes[number], theirs = self.context.Pipe(duplex=False)
        seat = None if self.lab is None else self.lab.seat(number)
        options = {**self.options, **options}
        if self.keys is not None:
            options.setdefault("curve_keys", self.keys / f"rank-{number}.key_secret")
        call = theirs, number, self.address, self.until, self.timeout, seed, seat, self.outer, late
        call += (f"{self.errors.name}/{number}", options)
        self.processes[number] = self.context.Process(target=train, args=call, daemon=True)
        self.processes[number].start()
        theirs.close()

    def kill(self, number, sort=signal.SIGKILL):
        os.kill(self.processes[number].pid, sort)
        return time.time()

    def hear(self, seconds=0.1):
        """Read the replicas' reports; check that all that apply a step have equal weights and rates."""
        ready = wait(list(self.pipes.values()), timeout=seconds)
        for number, pipe in [(n, p) for n, p in self.pipes.items() if p in ready]:
            try:
                said = pipe.recv()
            except (EOFError, ConnectionError):
                del self.pipes[number]
                continue
            if isinstance(said, dict):
                self.ends[number] = said
                continue
            when, step, contributors, counts, weights = said
            known = self.steps.setdefault(step, {})
            known[number] = when, contributors, counts
            if weights is not None:
                assert known.setdefault("weights", weights) == weights, f"replicas differ at {step}"

    def wait_for(self, what):
        deadline = time.monotonic() + SECONDS
        while not what():
            if time.monotonic() > deadline:
                pytest.fail(f"nothing happened in {SECONDS:.0f} s\n{self.errors_of_replicas()}")
            self.hear()

    def errors_of_replicas(self):
        """Return the last lines that replicas wrote to stderr, without torchft's."""
        parts = []
        for path in sorted(Path(self.errors.name).iterdir()):
            lines = [x for x in path.read_text().splitlines() if "[INFO]" not in x]
            parts += [f"--- replica {path.name}: {len(lines)} lines", *lines[-40:]]
        return "\n".join(parts)

    def contributed(self, number, since):
        """Return whether the gradient of a replica was counted after a given moment."""
        found = [ones[number] for ones in self.steps.values() if number in ones]
        return any(when > since and counts for when, _, counts in found)

    def all_contribute(self, numbers, since=0.0):
        self.wait_for(lambda: all(self.contributed(number, since) for number in numbers))

    def finish(self):
        """Let all replicas end together; return the changes that they reported."""
        self.until.value = max(self.steps) + 15
        self.wait_for(lambda: not self.pipes)
        weights = {end["weights"] for end in self.ends.values()}
        assert len(weights) == 1, f"replicas differ at the end\n{self.errors_of_replicas()}"
        return self.ends

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()
        self.errors.cleanup()


@pytest.fixture
def job():
    jobs = []

    def make(*args, **options):
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield make
    for one in jobs:
        one.close()


KINDS = pytest.mark.parametrize(
    "outer",
    [None, {}, {"delay": 1, "period": 3, "momentum": 0.5, "outer_lr": 0.7}],
    ids=["gradients", "updates", "updates with delay and momentum"],
)
BOTH = pytest.mark.parametrize("outer", [None, {}], ids=["gradients", "updates"])
# of gradients in `make test-slow` alone
UPDATES_FIRST = pytest.mark.parametrize(
    "outer", [pytest.param(None, marks=pytest.mark.slow), {}], ids=["gradients", "updates"]
)


@pytest.mark.fast(2)
@KINDS
def test_a_killed_replica_returns_while_the_others_go_on(job, outer):
    run = job(3, outer=outer)
    run.all_contribute([0, 1, 2])
    killed = run.kill(1)
    run.all_contribute([0, 2], since=killed + 0.3)
    run.start(1)
    run.all_contribute([1], since=killed)
    changes = run.finish()[0]["changes"]
    assert sum(c["came"] for c in changes) == 4
    assert [c["lost_norm"] > 0 for c in changes if c["died"]] == [True], changes


@UPDATES_FIRST
def test_frozen_layers_and_integers_are_equal_as_well(job, outer):
    run = job(0, outer=outer)
    for number in range(2):
        run.start(number, frozen=number)
    run.all_contribute([0, 1])
    run.start(2, frozen=2)
    run.all_contribute([2])
    assert len(run.finish()) == 3  # it compares weights at the end


def test_a_replica_catches_up_where_optimizers_step_in_turn(job):
    run = job(2, in_turn=True)
    run.all_contribute([0, 1])
    run.start(2, seed=5)
    run.all_contribute([2])
    run.finish()


def test_a_replica_arrives_in_an_exchange_that_all_refuse(job):
    run = job(2, outer={"period": 1}, spoils=True)
    run.all_contribute([0, 1])
    run.start(2, seed=5)
    run.all_contribute([2])
    run.finish()


@pytest.mark.fast(1)
@pytest.mark.parametrize("way", ["gloo", "keys"])
def test_a_killed_replica_returns_over_gloo_and_encrypted(job, way, tmp_path):
    make_curve_keys(tmp_path, 3)
    more = {"transport": "torch"} if way == "gloo" else {"outer": {}, "keys": tmp_path}
    run = job(3, **more)
    run.all_contribute([0, 1, 2])
    killed = run.kill(0)  # in whose store the others met
    run.all_contribute([1, 2], since=killed + 0.3)
    run.start(0)
    run.all_contribute([0], since=killed)
    changes = run.finish()[1]["changes"]
    assert sum(c["died"] for c in changes) >= 1 and sum(c["came"] for c in changes) >= 4


def test_a_replica_with_keys_of_its_own_does_not_get_in(job, tmp_path):
    """The replica has the others' public keys, but they do not have its key."""
    ours, its = tmp_path / "ours", tmp_path / "its"
    make_curve_keys(ours, 2)
    make_curve_keys(its, 3)
    for public in ours.glob("*.key"):
        (its / public.name).write_bytes(public.read_bytes())
    run = job(2, keys=ours)
    run.all_contribute([0, 1])
    run.start(2, curve_keys=its / "rank-2.key_secret")
    run.wait_for(lambda: 2 not in run.pipes)
    run.processes[2].join(10)
    assert run.processes[2].exitcode == 1
    run.all_contribute([0, 1], since=time.time())
    changes = run.finish()[0]["changes"]
    assert max(c["ranks"] for c in changes) == 2 and not any(
        2 in ones for ones in run.steps.values()
    )


def test_the_density_is_said_by_one_replica_and_by_none_that_joins(job):
    """The newcomer is the lowest rank, because ranks are ordered by name."""
    run = job(0, density=None)
    for number in (1, 2):
        run.start(number)
    run.all_contribute([1, 2])
    run.start(0)
    run.all_contribute([0, 1, 2], since=time.time())
    run.finish()
    said = run.errors_of_replicas()
    assert said.count("exchanges all 880 gradient entries") == 1
    assert "exchanges" not in Path(run.errors.name, "0").read_text()


@pytest.mark.fast(1)
@BOTH
def test_one_that_has_not_caught_up_at_the_end_gets_the_last_weights(job, outer):
    run = job(2, outer=outer)
    run.all_contribute([0, 1])
    run.start(2, seed=5, late=True)
    run.wait_for(lambda: any(2 in ones for ones in run.steps.values()))
    ends = run.finish()
    assert len(ends) == 3 and not run.contributed(2, 0.0)


@pytest.mark.slow
@BOTH
def test_a_replica_that_is_asked_to_end_leaves_its_residual(job, outer):
    run = job(3, outer=outer)
    run.all_contribute([0, 1, 2])
    asked = run.kill(2, signal.SIGTERM)
    run.wait_for(lambda: 2 not in run.pipes)
    run.processes[2].join(10)
    assert run.processes[2].exitcode == -signal.SIGTERM
    run.all_contribute([0, 1], since=asked + 0.5)
    ends = run.finish()
    changes = ends[0]["changes"]
    assert (sum(c["left"] for c in changes), sum(c["died"] for c in changes)) == (1, 0)
    assert ends[0]["lost_norm"] == 0


@UPDATES_FIRST
def test_a_handler_of_the_program_runs_after_the_replica_has_left(job, outer):
    run = job(2, outer=outer)
    run.start(2, handles=True)
    run.all_contribute([0, 1, 2])
    run.kill(2, signal.SIGTERM)
    run.wait_for(lambda: 2 not in run.pipes)
    run.processes[2].join(10)
    assert run.processes[2].exitcode == 7
    changes = run.finish()[0]["changes"]
    assert (sum(c["left"] for c in changes), sum(c["died"] for c in changes)) == (1, 0)


@UPDATES_FIRST
def test_a_replica_that_takes_no_step_leaves_in_the_others_steps(job, outer):
    """At whatever point a replica leaves, none of its contributions is lost or counted twice."""
    exact = {"algorithm": "allgather", "density": 0.1}  # which rounds nothing away
    run = job(1, outer=exact) if outer == {} else job(1, algorithm="allgather")
    put = []
    run.all_contribute([0])
    run.start(1)
    run.all_contribute([0, 1])
    for number, where in enumerate(["shared", "native", "asleep", "returns"], start=2):
        run.start(number, pauses=where)
        run.wait_for(lambda number=number: number in run.ends)
        held = run.ends.pop(number)
        assert held["mean residual"] > 0
        put.append(held["put"])
        asked = run.kill(number, signal.SIGTERM)
        run.processes[number].join(15)
        assert time.time() - asked < 7, "it has waited for its end"
        assert run.processes[number].exitcode == (0 if where == "returns" else -signal.SIGTERM)
        run.wait_for(lambda number=number: number not in run.pipes)
        run.ends.pop(number, None)
        since = [ones[0] for ones in run.steps.values() if 0 in ones and ones[0][0] > asked]
        if outer is None:  # it has contributed no gradient, so averages do not count it
            assert since and {contributors for _, contributors, _ in since} == {2}
        run.all_contribute([0, 1], since=asked + 0.5)
    ends = run.finish()
    assert sorted(ends) == [0, 1], run.errors_of_replicas()
    changes = ends[0]["changes"]
    assert (sum(c["left"] for c in changes), sum(c["died"] for c in changes)) == (4, 0)
    assert ends[0]["lost_norm"] == 0
    put += [ends[number]["put"] for number in (0, 1)]
    there = ends[0]["applied"] + ends[0]["residual"] + ends[1]["residual"]
    assert np.allclose(sum(put), there, rtol=1e-4, atol=1e-4), abs(sum(put) - there).max()


@pytest.mark.fast(1)
@BOTH
def test_all_replicas_are_asked_to_end_at_once(job, outer):
    """As at Slurm's time limit, no rank remains to take over residuals, and none waits for one."""
    run = job(2, outer=outer, pauses="asleep")
    run.wait_for(lambda: run.ends)
    asked = run.kill(0, signal.SIGTERM)
    run.kill(1, signal.SIGTERM)
    for number in (0, 1):
        run.processes[number].join(15)
    assert time.time() - asked < 7, run.errors_of_replicas()
    assert [run.processes[n].exitcode for n in (0, 1)] == [-signal.SIGTERM] * 2
    assert "SIGTERM" not in run.errors_of_replicas()


@UPDATES_FIRST
def test_a_replica_that_joins_with_a_schedule_of_its_own_is_refused(job, outer):
    """Its weights would diverge from the others', which continue without it."""
    run = job(2, outer=outer)
    run.all_contribute([0, 1])
    run.wait_for(lambda: max(run.steps, default=0) > 20)
    run.start(2, carries=False)
    run.wait_for(lambda: 2 not in run.pipes)
    run.processes[2].join(10)
    assert run.processes[2].exitcode == 1
    run.all_contribute([0, 1], since=time.time())
    run.finish()


@pytest.mark.slow
@BOTH
def test_a_replica_that_stood_still_comes_back_with_its_residual(job, outer):
    run = job(3, outer=outer)
    run.all_contribute([0, 1, 2])
    stopped = run.kill(1, signal.SIGSTOP)
    run.all_contribute([0, 2], since=stopped + 5)
    awake = run.kill(1, signal.SIGCONT)
    run.all_contribute([1], since=awake)
    ends = run.finish()
    assert ends[0]["lost_norm"] == 0 and sum(c["back"] for c in ends[0]["changes"]) == 1


@pytest.mark.slow
@BOTH
def test_one_is_left_and_two_join_at_once(job, outer):
    run = job(3, outer=outer)
    run.all_contribute([0, 1, 2])
    killed = run.kill(1)
    run.kill(2)
    run.all_contribute([0], since=killed + 1)
    for number in (1, 2):
        run.start(number, seed=number)  # with other weights: they take the remaining replica's
    run.all_contribute([1, 2], since=killed)
    changes = run.finish()[0]["changes"]
    assert sum(c["died"] for c in changes) == 2 and sum(c["came"] for c in changes) == 5


@pytest.mark.slow
def test_training_waits_for_a_lighthouse_that_is_started_again(job):
    run = job(2, apart=True)
    run.all_contribute([0, 1])
    run.kill("lighthouse")
    time.sleep(2)
    gone = time.time()
    run.hear()
    run.light_apart()
    run.all_contribute([0, 1], since=gone)
    ends = run.finish()
    assert ends[0]["lost_norm"] == 0


@pytest.mark.slow
def test_most_weights_hold_at_the_start(job):
    run = job(2)
    run.start(2, seed=5)
    run.all_contribute([0, 1, 2])
    run.finish()


@IN_THE_LAB
@pytest.mark.slow
@pytest.mark.parametrize("cut", [[1], [1, 2]])
def test_of_a_group_that_is_cut_in_two_one_half_trains_on(job, cut):
    """The lighthouse's link is cut; the half without it waits, and continues when the link is back."""
    with Lab(5, "100mbit") as lab:
        run = job(4, lab=lab)
        everyone, there = range(4), [number for number in range(4) if number not in cut]
        run.all_contribute(everyone)
        for number in cut:
            lab._run(lab._bridge, f"ip link set rank{number} down")
        gone = time.time()
        run.all_contribute(there, since=gone + 20)
        for number in cut:
            lab._run(lab._bridge, f"ip link set rank{number} up")
        whens = [ones[n][0] for ones in run.steps.values() for n in cut if n in ones]
        assert max(whens) < gone + 1, "a rank has trained on alone"
        run.all_contribute(everyone, since=time.time())
        run.finish()
