"""Test that elastic training refuses bad arguments in one line, before it connects."""

import json
import os
import select
import signal
import time
from threading import Event
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import sparsync
from sparsync.cli.train.elastic import (
    Applied,
    ElasticResult,
    Ended,
    Ready,
    _Run,
    check_kill,
    write_elastic_plot,
)
from sparsync.cli.train.exchanges import attach_elastic
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads.workload import Evaluation, is_hidden_matrix
from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.feedback.correction import Correction
from sparsync.options import Compression
from sparsync.updates import AdaptivePeriod, OuterStep
from tests.fresh import run_python

pytest.importorskip("torchft")
from sparsync.elastic import ElasticGroup
from sparsync.elastic import attendance as attendance_of_a_rank
from sparsync.elastic.catch_up import keep_gradients, make_copy, rates_of, repeat
from sparsync.elastic.group import Quorum, group_of
from tests.tables import cases, refused, refuses


@pytest.fixture
def manager():
    group = ElasticGroup(interface="127.0.0.1")
    yield SimpleNamespace(_pg=group, start_quorum=lambda **_: None)
    group.shutdown()


def test_nobody_is_killed_while_the_others_have_not_returned():
    run = _Run(TrainSettings(ranks=3), "budgeted", 1.0, Event())
    run.starts = [(0.0, rank) for rank in range(3)]
    for step in range(3):
        run.applied[step] = {r: Applied(1.0 + step, step, 1, 3, True, 0.0) for r in range(3)}
    assert run._contributing() == [0, 1, 2]
    run.starts += [(5.0, 1), (5.1, 2)]  # killed and started again; no step since
    assert run._contributing() == [0]
    for step in (3, 4):
        current, behind = (Applied(6.0, step, 2, 1, counts, 0.0) for counts in (True, False))
        run.applied[step] = {0: current, 1: behind}
    assert run._contributing() == [0]  # rank 1 takes part, and is behind


def test_no_rank_starts_before_all_are_ready_and_one_that_returns_does_not_wait():
    run = _Run(TrainSettings(ranks=2), "budgeted", 1.0, Event())
    ranks = {}
    for rank in range(2):
        run.pipes[rank], ranks[rank] = run.context.Pipe()
    ranks[1].send(Ready())
    assert run._hear(1, run.pipes[1])
    assert not ranks[1].poll() and not run.began
    ranks[0].send(Ready())
    assert run._hear(0, run.pipes[0])
    assert [ranks[rank].poll() and ranks[rank].recv() for rank in range(2)] == [None, None]
    assert run.began
    run.pipes[0], restarted = run.context.Pipe()
    restarted.send(Ready())
    assert run._hear(0, run.pipes[0])
    assert restarted.poll() and not ranks[1].poll()


def test_a_rank_that_dies_by_itself_ends_the_run_at_once():
    run = _Run(TrainSettings(ranks=2), "budgeted", 1.0, Event())
    pipes = [run.context.Pipe() for _ in range(2)]
    run._start = lambda rank, *_: run.pipes.update({rank: pipes[rank][0]})
    run.processes[1] = SimpleNamespace(join=lambda: None, exitcode=-9)
    pipes[1][1].close()
    with pytest.raises(PeerError, match="rank 1: died with exit code -9"):
        run._play(None, "", None)


def test_a_run_of_one_step_has_a_duration():
    run = _Run(TrainSettings(ranks=1, steps=1), "budgeted", 0.0, Event())
    ours, theirs = run.context.Pipe()
    run._start = lambda *_: run.pipes.update({0: ours})
    theirs.send(Ready())
    theirs.send(Applied(time.time() + 2, 1, 1, 1, True, 3.0))
    theirs.send(Ended(Evaluation(), "weights"))
    run._play(None, "", lambda *_: None)
    assert 1.5 < run.seconds < 2.5


def test_a_stopped_run_ends_at_once():
    run = _Run(TrainSettings(ranks=1), "budgeted", 1.0, Event())
    pipes = run.context.Pipe()
    run._start = lambda *_: run.pipes.update({0: pipes[0]})
    run.stopped.set()
    with pytest.raises(PeerError, match="stopped"):
        run._play(None, "", None)


def test_a_run_without_faults_that_lacked_a_rank_is_no_baseline():
    run = _Run(TrainSettings(ranks=2), "budgeted", 0.0, Event())
    for step, present in enumerate((0, 2, 2), start=1):  # 0: updates before the first exchange
        run.applied[step] = {0: Applied(1.0 * step, step, 1, present, True, 0.0)}
    run._check_whole()
    run.applied[4] = {0: Applied(4.0, 4, 2, 1, True, 0.0)}
    with pytest.raises(PeerError, match="step 4: without faults, 1 of 2 ranks contributed"):
        run._check_whole()


# standard error is a pipe, so that it ends together with the last process
KILLED = """
import multiprocessing, os, signal, time
import torchft.coordination
from sparsync.cli.train import elastic

class Seat:
    def enter(self):
        os.kill(os.getppid(), signal.SIGKILL)
        raise FileNotFoundError(2, "gone with the parent", "/proc/1/fd/6")

def blocked(*_, **__):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(20)

elastic._train = torchft.coordination.LighthouseServer = blocked
os.dup2(os.open({errors!r}, os.O_WRONLY), 2)
pipe = multiprocessing.get_context("fork").Pipe()[1]
call = {{"target": elastic.{function}, "args": (pipe, {seat}), "daemon": True}}
multiprocessing.get_context("fork").Process(**call).start()
time.sleep(20)
"""


@pytest.mark.parametrize("seat", ["None", "Seat()"])
@pytest.mark.parametrize("function", ["_be_rank", "be_lighthouse"])
def test_processes_end_silently_with_the_command(tmp_path, function, seat):
    errors = f"{tmp_path}/errors"
    os.mkfifo(errors)
    file = os.open(errors, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = run_python(KILLED.format(errors=errors, function=function, seat=seat))
        assert done.returncode == -signal.SIGKILL, done.stderr
        ended, _, _ = select.select([file], [], [], 10)
        assert ended and os.read(file, 1 << 16) == b""
    finally:
        os.close(file)


CHANGING = OuterStep(period=AdaptivePeriod(0.01))


@pytest.fixture
def net():
    return torch.nn.Linear(4, 2)


def attached(net, manager, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1)
    return sparsync.attach(net, optimizer, elastic=manager, **options)


@refuses(
    ({"correction": Correction(momentum=0.9)}, r"correction= is not for elastic="),
    ({"transport": sparsync.Transport("torch")}, r"Transport\('torch'\) is not for elastic="),
    ({"transport": sparsync.Transport(timeout=9)}, r"Transport\(timeout=...\) is not for elas"),
    ({"transport": sparsync.Transport(hierarchy="node")}, r"hierarchy=...\) is not for elastic="),
    ({"monitoring": sparsync.Monitoring(sentinel=sparsync.Sentinel(5))}, "sentinel"),
    ({"replicate": object()}, r"whole on every rank; omit replicate="),
    ({"algorithm": "streaming-diloco"}, r"fragments=10 is not for elastic="),
    ({"algorithm": "demo"}, r"sign=True is not for elastic="),
    ({"algorithm": CHANGING}, "an AdaptivePeriod is not for elastic="),
)
def test_what_does_not_fit_is_refused(options, net, manager):
    attached(net, manager, **options)


@pytest.fixture
def attach():
    with mock.patch("sparsync.cli.train.exchanges.attach") as replaced:
        yield replaced


def test_train_passes_the_options_of_gradients(attach):
    settings = TrainSettings(ranks=2, warmup_steps=7, density=0.03)
    attach_elastic(settings, "sparcml:bits=8", None, [], None)
    _, _, algorithm, density = attach.call_args.args
    assert (algorithm.name, algorithm.options, density) == ("sparcml", (("bits", 8),), 0.03)
    compression = Compression(compress=is_hidden_matrix, warmup_steps=7)
    assert attach.call_args.kwargs["compression"] == compression  # as in an ordinary training


def test_train_passes_the_options_of_updates(attach):
    settings = TrainSettings(ranks=2, optimizer="adamw", period=5, density=0.03)
    attach_elastic(settings, "sparseloco:outer_lr=0.5", None, [], None)
    outer = attach.call_args.args[2]
    assert (outer.period, outer.density, outer.outer_lr) == (5, 0.03, 0.5)


def test_sums_of_sgd_have_the_rate_of_a_mean():
    settings = TrainSettings(ranks=4)
    assert (settings.lr_divisor(sums=True), settings.lr_divisor(sums=False)) == (4, 1)
    assert TrainSettings(ranks=4, optimizer="adamw").lr_divisor(sums=True) == 1


@refuses(("gradients", "needs the optimizer"), ("updates", "needs the optimizer"))
def test_the_optimizer_is_needed(exchange, net, manager):
    sparsync.attach(net, exchange=exchange, elastic=manager)


def test_only_a_manager_with_the_right_group_will_do(net):
    with refused(r"elastic is str; give a torchft.Manager whose pg"):
        attached(net, "manager")


def test_a_torchft_that_passes_no_addresses_on_is_refused_at_the_import():
    """With releases of torchft up to 0.2.0, every quorum would fail."""
    old = "import torchft.manager as m; del m.Manager._reconfigure_pg; import sparsync.elastic"
    process = run_python(old)
    assert process.returncode == 1
    assert "this torchft passes no reconfigure handles between ranks" in process.stderr
    assert "pip install 'sparsync[elastic]'" in process.stderr


def test_a_group_tells_its_addresses_and_takes_those_of_others(manager):
    group = group_of(manager)
    mine = group.get_reconfigure_handle()
    assert json.loads(mine)["exchange"].startswith("tcp://127.0.0.1:")
    places = {"exchange": "tcp://127.0.0.1:1", "copies": "tcp://127.0.0.1:2"}
    other = json.dumps({"name": "b", **places})
    group.reconfigure(SimpleNamespace(uuid=3, handles=[other, mine]))
    first = group.quorum
    assert (first.rank, first.names[0], group.size()) == (1, "b", 2)
    group.reconfigure(SimpleNamespace(uuid=4, handles=[other, mine]))
    assert first.number != group.quorum.number > 0
    with pytest.raises(ConfigurationError, match="another kind of process group"):
        group.reconfigure(SimpleNamespace(uuid=4, handles=["{}", mine]))
    with pytest.raises(ConfigurationError, match=r"carries sparsync's exchanges alone"):
        group.allreduce([torch.zeros(1)], None)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_ranks_with_other_frozen_layers_begin_with_other_weights(manager, kind):
    histories = []
    for value in (0.0, 0.0, 1.0):
        net = torch.nn.ParameterDict({name: torch.full((4,), value) for name in ("base", "head")})
        torch.nn.init.zeros_(net["head"])
        net["base"].requires_grad_(False)
        with attached(net, manager, kind([net["head"]], 0.1)) as sync:
            histories.append(sync.membership.attendance.members._past)
    assert histories[0] == histories[1] != histories[2]


def test_what_is_carried_has_a_state(net, manager):
    with attached(net, manager) as sync:
        with refused("epoch is int; give an object with state_dict"):
            sync.carry(epoch=3)
        assert (sync.steps, sync.left, sync.stats()["elastic"]["ranks"]) == (0, False, 1)


def test_a_rank_that_cannot_leave_without_steps_of_its_own_says_why(net, manager):
    scaled = sparsync.Monitoring(scaler=torch.amp.GradScaler("cpu"))
    with attached(net, manager, monitoring=scaled) as sync:
        leave_within = sync.membership.leave_within
        assert leave_within(1.0) == ""  # it has met nobody
        sync.membership.attendance.members.attempt = 1
        lost = "; it ends, and its residual is lost"
        assert "1 s of SIGTERM (its residual has the scale of a GradScaler" in leave_within(1)
        sync.membership.attendance.offered = True
        assert leave_within(1).endswith(f"(another rank is fetching this rank's weights){lost}")
        sync.membership.turns.take()
        words = "this rank has not left within 0.1 s of SIGTERM (a step of its own was under way)"
        assert leave_within(0.1) == words + lost


def test_a_leaving_waits_for_the_pass_that_follows_a_broken_one(net, manager):
    """Otherwise the rank might leave as that pass begins, and its gradients would be dropped."""
    with attached(net, manager) as sync:
        turns, ranks, could_leave = sync.membership.turns, sync._steps.ranks, []

        def begin(*, again):
            could_leave.append(turns.begin_leaving(0))
            raise KeyError("enough")

        turns.take()
        sync._source._open = SimpleNamespace(task=-2)  # of a backward pass that has raised
        ranks.begin = begin
        with pytest.raises(KeyError):
            net(torch.ones(4)).sum().backward()
        assert could_leave == [False]
        assert turns.begin_leaving(0)
        turns.end_leaving()


def test_updates_are_handed_over_but_for_those_from_weights_of_the_programs(net, manager):
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    with attached(net, manager, optimizer) as sync:
        start, own = sync.outer.memory["shared"].clone(), slice(sync.outer.layout.end)
        with torch.no_grad():
            net.weight.add_(1.0)
        sync._start.pending = False  # as after a step
        sync._changes.remember()
        stepped = sync._weights.read(slice(None))
        assert not torch.equal(stepped[own], start[own])
        assert torch.equal(sync._ranks._go_apart().vector, stepped)
        with sync.shared():
            assert torch.equal(sync._weights.read(slice(None)), start)
            assert torch.equal(sync._ranks._go_apart().vector, stepped)
            with sync.shared():
                assert torch.equal(sync._ranks._go_apart().vector, stepped)
        net.weight.data = torch.zeros_like(net.weight)
        assert torch.equal(sync._ranks._go_apart().vector, start)


def test_a_rank_does_not_catch_up_in_the_exchange_in_which_it_joins(net, manager):
    """That exchange runs outside the loop's steps, so its schedulers would be a step late."""
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    with attached(net, manager, optimizer) as sync:
        attendance = sync.membership.attendance
        attendance.catch_up = SimpleNamespace(done=True, stop=lambda: None)
        attendance.members.behind = True
        attendance._met = True
        with attendance.outside_steps():
            attendance.ready()
        assert not attendance._ready
        attendance._met = True
        attendance.ready()
        assert attendance._ready
        attendance.catch_up = None


def test_ranks_that_cannot_meet_say_so_once_and_end(net, manager, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(attendance_of_a_rank, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def fail(*_):
        clock[0] += 90.0
        raise PeerError("rank 1 is gone")

    with attached(net, manager) as sync:
        attendance, quorum = sync.membership.attendance, Quorum(1, 1, 0, ("a",), [""], [])
        monkeypatch.setattr(attendance.group.comm, "regroup", lambda *_: None)
        monkeypatch.setattr(attendance.members, "call_the_roll", fail)
        monkeypatch.setattr(attendance, "_again", lambda _error: quorum)
        words = r"have not all met for 600 s \(rank 1 is gone\); end the rank"
        with pytest.raises(DeadlineError, match=words):
            attendance._meet(quorum)
    assert clock[0] == 720.0  # the first failure, and 600 s
    assert capsys.readouterr().err.count("have not all met (rank 1 is gone)") == 1


def two_optimizers(seed):
    """Return a model, and an optimizer for each of its layers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    return model, [torch.optim.SGD(its.parameters(), 0.1, momentum=0.9) for its in model]


def test_steps_of_optimizers_that_take_turns_are_repeated():
    (theirs, donors), (mine, own) = two_optimizers(0), two_optimizers(1)
    copied = bytearray(make_copy(theirs, donors))
    log = SimpleNamespace(copy=(5, copied), log={})
    taken = {}
    for exchange, turns in {5: [1], 6: [0], 7: [], 8: [1, 0], 9: [0, 0]}.items():
        gradients = [torch.randn_like(parameter) for parameter in theirs.parameters()]
        for model in (theirs, mine):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
        for number in turns:
            donors[number].param_groups[0]["lr"] *= 0.9  # as a scheduler of this optimizer alone
            ((rates,),) = rates_of([donors[number]])
            taken.setdefault(exchange, []).append((number, [rates]))
            donors[number].step()
            keep_gradients(log, exchange, number, own[number])
    repeat(log, 10, taken, mine, own)
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
    with pytest.raises(PeerError, match="after exchange 10 optimizer 1 of those given to attach"):
        repeat(log, 11, {10: [(1, [rates])]}, mine, own)


@cases("random", "random:", "random:0", "random:-3", "often", "random:x")
def test_kills_are_written_in_one_way(text):
    with pytest.raises(ConfigurationError, match=r"give none, or random:SECONDS"):
        check_kill(text)
    assert (check_kill("none"), check_kill("random:0.5")) == (0.0, 0.5)


def test_the_picture_shows_loss_and_ranks(tmp_path):
    figures = {name: 1 for name in ElasticResult.__dataclass_fields__}
    result = ElasticResult(**{**figures, "loss": [2.0, 1.0], "present": [4, 3]})
    write_elastic_plot(result, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 5000
