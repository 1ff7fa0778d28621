"""Save and load checkpoints while ranks have their own weights and moments."""

import contextlib
import copy
import io
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize, prune

import sparsync
from sparsync import ConfigurationError
from sparsync.errors import CheckpointError, DeadlineError, PeerError
from sparsync.updates import AdaptivePeriod, OuterStep
from tests.attaching import ONE_BIT
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .muons import Muon
from .small_model import backward, ddp_model, flat, fully_shard, model

SETTINGS = {
    # measured noise, in exchanges that are applied late, but for those of the first steps
    "slow links": {**ONE_BIT, "period": 4, "fragments": 2, "delay": 1, "warmup_steps": 2},
    "default": {},
    "weights": {"residual": "weights", "fragments": 3, "delay": 2, "density": 0.1, "period": 4},
    "adaptive": {"residual": "weights", "density": 0.1, "period": AdaptivePeriod(1.0, most=4)},
    "apart": {"fragments": 2, "delay": 1, "density": 0.1, "period": 3, "momentum": 0.9},
    "dct": {"dct": 16, "density": 0.1, "period": 2, "residual_decay": 0.9},
}
RESHARDED = [name for name in SETTINGS if name != "dct"]
WHOLE, DIVIDED, RESIZED = ("ddp", "plain"), ("fsdp", "nodes"), ((2, 4), (1, 4))


def net_of(kind, seed=0):
    if kind in ("ddp", "plain"):
        return (ddp_model if kind == "ddp" else model)(seed), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "nodes":
        return ddp_model(seed), {"transport": sparsync.Transport(hierarchy=mesh)}
    return fully_shard(model(seed), mesh=mesh["shard"]), {"replicate": mesh["replicate"]}


def attached(kind, settings, seed=0):
    net, where = net_of(kind, seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    outer = OuterStep(**settings) if settings else None
    return net, optimizer, sparsync.attach(net, optimizer, outer, exchange="updates", **where)


def steps(net, optimizer, which):
    for step in which:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    return flat(net)


@on_ranks(4)
@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    # every setting with a whole and a divided model; every kind of model in the tests that are not slow
    [
        pytest.param(
            kinds[n % 2],
            name,
            marks=[] if (kinds is WHOLE) == (n % 4 < 2) and n < 4 else pytest.mark.slow,
        )
        for n, name in enumerate(SETTINGS)
        for kinds in (WHOLE, DIVIDED)
    ],
)
def test_resuming_is_exact(kind, name, folder):
    """The state is saved while an exchange is under way, and loaded into other weights."""
    ends = []
    for fresh in (False, True):
        net, optimizer, sync = attached(kind, SETTINGS[name], seed=7 * fresh)
        with sync:
            saved = {"model": getattr(net, "module", net), "optimizer": optimizer}
            if fresh:
                assert sparsync.load(sync, folder, **saved) == {"epoch": 2}
            else:
                steps(net, optimizer, range(6))
                while "delay" in SETTINGS[name] and not sync.state_dict()["content"]["under_way"]:
                    steps(net, optimizer, range(1))
                sparsync.save(sync, folder, epoch=2, **saved)
            ends.append(steps(net, optimizer, range(6, 13)))
            sync.finish()
            ends.append(flat(net))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


@on_ranks(4)
def test_a_new_optimizer_whose_constructor_makes_part_of_its_state_resumes(folder):
    """The moments that are missing before its first step are not taken for a mistake in the file."""
    ends = []
    for fresh in (False, True):
        net = model(seed=0)
        optimizer = Muon(net.parameters())
        with sparsync.attach(net, optimizer) as sync:
            if fresh:
                sparsync.load(sync, folder, model=net, optimizer=optimizer)
            else:
                steps(net, optimizer, range(3))
                sparsync.save(sync, folder, model=net, optimizer=optimizer)
            ends.append(steps(net, optimizer, range(3, 6)))
            sync.finish()
    assert torch.equal(*ends)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "plain"])
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_call_on_rank_0_alone_is_refused_before_the_timeout(kind, call, folder):
    """Scripts do this that have saved the whole checkpoint on rank 0 so far."""
    net = net_of(kind)[0]
    optimizer = (torch.optim.SGD if kind == "ddp" else torch.optim.AdamW)(net.parameters(), 0.01)
    sync = sparsync.attach(net, optimizer, transport=sparsync.Transport(timeout=60.0))
    steps(net, optimizer, range(2))
    sparsync.save(sync, folder)
    began = time.monotonic()
    with pytest.raises(PeerError, match="only one of the two saves or loads a checkpoint"):
        if dist.get_rank() == 0:
            getattr(sparsync, call)(sync, folder)
        else:
            steps(net, optimizer, range(2, 5))
    assert time.monotonic() - began < 30
    sync.close()


@on_ranks(2)
def test_the_state_of_another_optimizer_names_its_groups(folder):
    """Its vectors have another length, too, which says nothing about the cause."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        net = model()
        optimizer = kind(net.parameters(), lr=0.01)
        with sparsync.attach(net, optimizer, exchange="updates") as sync:
            if kind is torch.optim.AdamW:
                steps(net, optimizer, range(2))
                sparsync.save(sync, folder)
                sync.finish()
                continue
            with refused("the saved state has no state['groups'][0][0]['momentum']"):
                sparsync.load(sync, folder)


@on_ranks(4)
@pytest.mark.parametrize("nodes", [False, True])
def test_ranks_with_other_exchanges_save_nothing(nodes, folder):
    """An exchange that broke off on some ranks only would leave states that fit no load."""
    net = ddp_model()
    optimizer = torch.optim.AdamW(net.parameters())
    hierarchy = init_device_mesh("cpu", (2, 2)) if nodes else None
    # over gloo, whose messages do not say to which exchange they belong
    transport = sparsync.Transport(name="torch", hierarchy=hierarchy)
    sync = sparsync.attach(net, optimizer, transport=transport)

    def failing(*_, **__):
        raise PeerError("the last message is missing")

    with sync, pytest.MonkeyPatch.context() as patch:
        steps(net, optimizer, range(1))
        kept = sparsync.save(sync, folder, keep=1)
        patch.setattr(
            sync.reducer, "commit", failing if dist.get_rank() > 1 else sync.reducer.commit
        )
        with (
            refused("the last message", error=PeerError)
            if dist.get_rank() > 1
            else contextlib.nullcontext()
        ):
            steps(net, optimizer, range(1, 2))
        if dist.get_rank() > 1:
            with refused("an earlier exchange broke off (the last message is missing)"):
                sparsync.save(sync, folder, keep=1)  # asks no other rank, which would wait
            sync.reducer.comm.broken.clear()
        said = f"have committed 1 to 2 exchanges, this one {2 - dist.get_rank() // 2}, because"
        with refused(said, error=CheckpointError):
            sparsync.save(sync, folder, keep=1)
        assert list(kept.parent.iterdir()) == [kept]


@on_ranks(4)
def test_a_save_that_breaks_off_refuses_later_calls_but_one_that_fails_does_not(folder):
    net = ddp_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    transport = sparsync.Transport(timeout=0.5)
    with sparsync.attach(net, optimizer, density=0.1, transport=transport) as sync:
        steps(net, optimizer, range(1))
        said = CheckpointError if dist.get_rank() else ConfigurationError
        with refused("no state can hold it" if dist.get_rank() == 0 else "rank 0", error=said):
            sparsync.save(sync, folder, bad=Bad() if dist.get_rank() == 0 else 1)
        steps(net, optimizer, range(1, 2))
        sparsync.save(sync, folder)
        if dist.get_rank() == 0:
            with refused("phase 'checkpoint'", error=DeadlineError):
                sparsync.save(sync, folder)
            for call in (lambda: sparsync.save(sync, folder), lambda: sync.load_state_dict({})):
                with refused("an earlier exchange broke off (rank 0, step 2: "):
                    call()
        dist.barrier()


class Bad:
    """An object without a state."""

    def state_dict(self):
        raise ConfigurationError("no state can hold it")


@on_ranks(4)
@pytest.mark.parametrize("call", ["save", "load", "load_state_dict"])
def test_checkpoints_wait_for_what_is_under_way(call, folder):
    """Only one thread at a time may use a communicator, so saving must wait for the engine's thread."""
    net, optimizer, sync = attached("plain", {"delay": 1, "period": 2, "density": 0.1})
    with sync, pytest.MonkeyPatch.context() as patch:
        steps(net, optimizer, range(1))
        sparsync.save(sync, folder)
        given, ended, kind = sync.state_dict(), set(), type(sync.reducer.comm)
        sync._engine.submit(partial(time.sleep, 0.3))  # the exchange begins after that
        steps(net, optimizer, range(1, 2))
        (exchange,), native = sync.outer._under_way, kind.irecv

        def irecv(comm, *args):
            if threading.current_thread() is threading.main_thread():
                ended.add(exchange.done)
            return native(comm, *args)

        patch.setattr(kind, "irecv", irecv)
        calls = {"save": sparsync.save, "load": sparsync.load}
        calls[call](sync, folder) if call in calls else sync.load_state_dict(given)
        assert ended == {True}


@on_ranks(4)
def test_what_is_loaded_after_the_handle_must_be_the_ranks_own():
    """One rank that loads others' weights or moments stops all ranks; the same values are accepted."""
    net, optimizer, sync = attached("plain", SETTINGS["apart"])
    with sync:
        steps(net, optimizer, range(4))
        state = sync.state_dict()
        weights, moments = (copy.deepcopy(one.state_dict()) for one in (net, optimizer))
        end = steps(net, optimizer, range(4, 6))
        one = dist.get_rank() == 1
        sync.load_state_dict(state)
        for at, kept in enumerate(moments["state"].values()):
            kept["exp_avg"][..., :1] += one * (at == 3)
        optimizer.load_state_dict(moments)
        words = ["AdamW was replaced after the handle had loaded"]
        words += [] if one else ["rank 1 could not begin after a load"]
        with refused(*words, error=ConfigurationError if one else CheckpointError):
            steps(net, optimizer, range(4, 5))
        sync.load_state_dict(state)
        net.load_state_dict(gathered(weights)[2])
        with refused("loaded after the handle's state", "rank 2 has none", error=PeerError):
            steps(net, optimizer, range(4, 5))
        sync.load_state_dict(state)
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(end, steps(net, optimizer, range(4, 6)))


def broken_step(net, optimizer, step):
    """Do a local step that gives NaN on one rank; the next exchange restores the weights of all ranks."""
    optimizer.zero_grad()
    backward(net, step)
    if dist.get_rank() == 1:
        for parameter in net.parameters():
            parameter.grad.mul_(torch.nan)
    optimizer.step()


@on_ranks(4)
@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "slow links"),
        pytest.param("plain", "dct", marks=pytest.mark.slow),
        ("fsdp", "weights"),
    ],
)
def test_a_rank_that_broke_before_the_exchange_is_saved_as_it_is(kind, name, folder):
    """A state with NaN is refused unless it is marked as broken, because then a file was damaged."""
    ends = []
    for fresh in (False, True):
        net, optimizer, sync = attached(kind, SETTINGS[name], seed=7 * fresh)
        with sync:
            if fresh:
                sparsync.load(sync, folder)
            else:
                steps(net, optimizer, range(6))
                broken_step(net, optimizer, 6)
                sparsync.save(sync, folder)
                state = sync.state_dict()
                content = state["content"]
                own = content["parameters"].values()  # shards: of another rank's NaN there is none
                assert content["broken"] == (not all(one.isfinite().all() for one in own))
                if content["broken"]:
                    with refused("with NaN or Inf"):
                        sync.validate({**state, "content": {**content, "broken": False}})
            ends.append(steps(net, optimizer, range(7, 14)))
            assert sync.stats()["refused_exchanges"] >= 1
            sync.finish()
            ends.append(flat(net))
            assert ends[-1].isfinite().all()
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


@on_ranks(4)
@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["slow links", "weights"])
def test_other_numbers_of_ranks_begin_without_what_broke(name, folder):
    net, optimizer, sync = attached_to(4, SETTINGS[name], 0)
    with sync:
        steps(net, optimizer, range(6))
        broken_step(net, optimizer, 6)
        sparsync.save(sync, folder)
    net, optimizer, sync = attached_to(2, SETTINGS[name], 3)
    with sync:
        sparsync.load(sync, folder)
        mine = sync.state_dict()["content"]
        assert not mine["broken"]
        assert bool(mine["moments"]["0.weight"]) == (dist.get_rank() % 2 != 1)
        steps(net, optimizer, range(7, 10))
        sync.finish()
        assert flat(net).isfinite().all()


@on_ranks(4)
@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "first", "ranks"),
    [
        ("default", torch.inf, 4),
        ("weights", 1.0, 4),
        *(
            pytest.param(*few, 2, marks=pytest.mark.slow)
            for few in (("default", 1.0), ("weights", torch.inf))
        ),
    ],
)
def test_a_buffer_may_be_finite_in_one_run_and_not_in_the_other(name, first, ranks, folder):
    """An observer's extreme, for instance, begins as Inf; the first run decides if it is averaged."""
    rank, ends, lines = dist.get_rank(), [], io.StringIO()

    def begin(ranks, seed, value):
        inner = model(seed)
        inner.register_buffer("lowest", torch.full((3,), value))
        return attached_to(ranks, SETTINGS[name], inner)

    net, optimizer, sync = begin(4, 0, first)
    with sync:
        steps(net, optimizer, range(2))
        net.module.lowest.fill_(2.0 + rank)
        steps(net, optimizer, range(2, 7))
        sparsync.save(sync, folder, model=net, optimizer=optimizer)
        saved = net.module.lowest.clone()
        # if excluded, it stays local to each rank
        assert same_everywhere(saved) == (first == 1.0 and name == "default")
        ends.append((steps(net, optimizer, range(7, 12)), net.module.lowest.clone()))
    net, optimizer, sync = begin(ranks, 3, 1.0 if first == torch.inf else -torch.inf)
    with sync, contextlib.redirect_stderr(lines):
        sparsync.load(sync, folder, model=net, optimizer=optimizer)
        loaded = net.module.lowest.clone()
        ends.append((steps(net, optimizer, range(7, 12)), net.module.lowest.clone()))
        sync.finish()
        assert ranks < 4 or same_everywhere(flat(net))
    if ranks == 4:
        assert torch.equal(loaded, saved) and all(map(torch.equal, *ends))
        assert ("'lowest' held NaN or Inf" in lines.getvalue()) == (first == torch.inf)
    elif first == 1.0:  # with fewer ranks, all begin with the shared state
        assert loaded.isfinite().all()
    assert ends[-1][1].isfinite().all()


DAMAGES = {
    "sent": (
        lambda state: state["content"].update(sent=[0.5]),
        r"['sent'][0] is 0.5, expected a whole number",
    ),
    "shared": (
        lambda state: state["content"]["memory"]["shared"].mul_(1.5),
        "ranks disagree on the saved memory",
    ),
    "weights": (
        lambda state: state["content"]["parameters"]["0.bias"].fill_(torch.nan),
        "['0.bias'] is a tensor",
    ),
    "moments": (
        lambda state: state["content"]["moments"]["0.bias"].pop("exp_avg"),
        "has no state['moments']",
    ),
    "optimizer": (
        lambda state: state["content"]["groups"][0][0].update(lr=torch.nan),
        "['lr'] is nan",
    ),
    "steps": (
        lambda state: state["content"]["reducer"].update(step=1),
        "ranks disagree on the exchange",
    ),
    "kind": (
        lambda state: state.update(kind="averager"),
        "['kind'] is 'averager', expected 'updates'; it belongs in an averager; give a state of",
    ),
    "version": (lambda state: state.update(version=99), "['version'] is 99, expected"),
    "others": (lambda state: state["beside"].update(own=3), "['beside']['own'] is 3, expected"),
}


@on_ranks(4)
def test_one_ranks_damaged_file_is_refused_on_all(folder):
    """Nothing changes, an older checkpoint loads; ``unit/test_damaged_states`` tries every damage."""
    net, optimizer, sync = attached("plain", {})
    rank = dist.get_rank()
    with sync:
        steps(net, optimizer, range(3))
        sparsync.save(sync, folder, keep=None)
        through = steps(net, optimizer, range(3, 5))
        file = sparsync.save(sync, folder, keep=None) / f"sparsync-rank-{rank}-of-4.pt"
        whole = torch.load(file, weights_only=True)
        before = steps(net, optimizer, range(5, 6))
        for damage, words in DAMAGES.values():
            if rank == 1:
                damaged = copy.deepcopy(whole)
                damage(damaged)
                torch.save(damaged, file)
            dist.barrier()
            alike = "ranks disagree" in words
            error = PeerError if alike else CheckpointError if rank != 1 else ConfigurationError
            others = () if alike or rank == 1 else ("rank 1 could not",)
            with refused(words, *others, error=error):
                sparsync.load(sync, folder)
            assert torch.equal(flat(net), before) and sync.outer.steps == 6
        sparsync.load(sync, folder, step=3)
        assert torch.equal(steps(net, optimizer, range(3, 5)), through)


@on_ranks(4)
def test_an_optimizer_that_does_not_take_its_state_takes_all_back():
    net, optimizer, sync = attached("plain", {})
    with sync:
        steps(net, optimizer, range(2))
        saved = sync.state_dict()
        before = steps(net, optimizer, range(2, 4))
        moments = {n: m["exp_avg"] for n, m in sync.state_dict()["content"]["moments"].items()}
        if dist.get_rank() == 2:

            def refuse(_optimizer, _state):
                raise KeyError("too late")

            hook = optimizer.register_load_state_dict_pre_hook(refuse)
            with refused("the saved state of AdamW: 'too late'"):
                sync.load_state_dict(saved)
            hook.remove()
        else:
            with refused("rank 2 could not load the saved", "'too late'", error=CheckpointError):
                sync.load_state_dict(saved)
        assert torch.equal(flat(net), before) and sync.outer.steps == 4
        now = sync.state_dict()["content"]["moments"]
        assert all(torch.equal(now[name]["exp_avg"], kept) for name, kept in moments.items())
        sync.load_state_dict(saved)
        assert torch.equal(steps(net, optimizer, range(2, 4)), before)


def undelivered(states, name):
    """Return the undelivered changes of all ranks for a parameter that each of them holds whole."""
    total = torch.zeros(1, dtype=torch.float64)
    for state in states:
        end = sum(
            state["layout"][n] for n in list(state["layout"])[: [*state["layout"]].index(name)]
        )
        span = slice(end, end + state["layout"][name])
        total = total + (
            state["memory"]["shared"][span].double() - state["parameters"][name].flatten()
        )
        if state["residual"] != "weights" and name in state["reducer"]["residual"]:
            total = total + state["reducer"]["residual"][name]
    return total


def attached_to(ranks, settings, inner):
    """Attach to DDP over the first ranks, and in the same way over each further group of this size."""
    inner = model(inner) if isinstance(inner, int) else inner
    runs = [dist.new_group(range(at, at + ranks)) for at in range(0, dist.get_world_size(), ranks)]
    group = runs[dist.get_rank() // ranks]
    net = torch.nn.parallel.DistributedDataParallel(inner, process_group=group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    outer = OuterStep(**settings) if settings else None
    return net, optimizer, sparsync.attach(net, optimizer, outer, exchange="updates")


@on_ranks(4)
@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param(
            name, *ranks, marks=[] if (ranks == (4, 2)) == (n % 2 == 0) else pytest.mark.slow
        )
        for n, name in enumerate(RESHARDED)
        for ranks in ((4, 2), RESIZED[n % 2])
    ],
)
def test_other_numbers_of_ranks_begin_from_the_shared_weights(name, before, after, folder):
    """Undelivered entries are dealt to ranks; the average after ``finish`` shows that none is lost."""
    net, optimizer, sync = attached_to(before, SETTINGS[name], 0)
    with sync:
        steps(net, optimizer, range(7))
        sparsync.save(sync, folder / str(dist.get_rank() // before))
        states = gathered(sync.state_dict()["content"])[:before]
        sync.finish()
        with sync.shared():
            after_all = gathered(flat(net))[0]
    net, optimizer, sync = attached_to(after, SETTINGS[name], 3)
    with sync:
        sparsync.load(sync, folder / "0")
        assert sync.outer.period == states[0].get("present_period", sync.outer.period)
        assert sync.outer.steps == 7
        mine = sync.state_dict()["content"]
        moments = states[dist.get_rank() % after % before]["moments"]["0.weight"]["exp_avg"]
        assert torch.equal(mine["moments"]["0.weight"]["exp_avg"], moments)
        with sync.shared():
            shared = flat(net)
            assert same_everywhere(shared)
        new = gathered(mine)[:after]
        whole = torch.cat([undelivered(new, n) for n in mine["parameters"]])
        # with half as many ranks, an average moves the weights twice as far
        torch.testing.assert_close(shared - whole.float() / before, after_all, atol=1e-5, rtol=1e-4)
        steps(net, optimizer, range(7, 9))
        sync.finish()


@on_ranks(4)
@pytest.mark.parametrize("saved", ["nodes", "ddp"])
def test_runs_of_a_node_stay_with_their_ranks(saved, folder):
    net, optimizer, sync = attached(saved, {"density": 0.1})
    with sync:
        steps(net, optimizer, range(1))
        sparsync.save(sync, folder)
    net, _, sync = attached("ddp" if saved == "nodes" else "nodes", {"density": 0.1}, seed=3)
    with sync:
        who = "the saved run" if saved == "nodes" else "this run"
        with refused(f"the nodes of {who} (hierarchy=) divide each", "in as many nodes of as many"):
            sparsync.load(sync, folder)
        assert sync.outer.steps == 0 and torch.equal(flat(net), flat(model(3)))


@on_ranks(4)
def test_cosine_coefficients_stay_with_their_ranks(folder):
    """Every rank reports the refusal in one line, and continues training unchanged."""
    net, optimizer, sync = attached_to(4, SETTINGS["dct"], 0)
    with sync:
        steps(net, optimizer, range(3))
        sparsync.save(sync, folder)
    net, optimizer, sync = attached_to(2, SETTINGS["dct"], 3)
    with sync:
        with refused(
            "are cosine coefficients of units, and cannot be divided; continue with as many"
        ):
            sparsync.load(sync, folder)
        assert sync.outer.steps == 0 and torch.equal(flat(net), flat(model(3)))
        steps(net, optimizer, range(2))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_what_a_user_saves_loads_and_evaluates(kind):
    """Users save this rank's weights or the shared ones; evaluating between steps changes nothing."""
    net, optimizer, sync = attached(kind, SETTINGS["weights"])
    other, other_optimizer, other_sync = attached(kind, SETTINGS["weights"])
    with sync, other_sync:
        steps(net, optimizer, range(7))
        own = flat(net)
        with sync.shared(), torch.no_grad():
            net(torch.ones(1, 20))
            shared = flat(net)
        if kind == "plain":
            waiting = undelivered([sync.state_dict()["content"]], "0.weight").float()
            torch.testing.assert_close(own[:600], shared[:600] - waiting, atol=1e-6, rtol=0)
            for weights in (own, shared):
                loaded = model(5)
                torch.nn.utils.vector_to_parameters(weights, loaded.parameters())
                assert loaded(torch.ones(1, 20)).isfinite().all()
        assert torch.equal(flat(net), own) and not torch.equal(own, shared)
        through = steps(net, optimizer, range(7, 9))
        assert torch.equal(through, steps(other, other_optimizer, range(9)))


@on_ranks(2)
@pytest.mark.parametrize("end", ["finish", "load"])
def test_a_parameter_that_pruning_renames_keeps_its_name_in_states(end):
    """Pruning and parametrizations keep the parameter, and register it under another name."""
    ends = []
    for prunes in (True, False):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with sparsync.attach(net, optimizer) as sync:
            steps(net, optimizer, range(3))
            sync.finish()
            if prunes:  # with a mask of ones
                prune.identity(net[0], "weight")
                parametrize.register_parametrization(net[2], "weight", torch.nn.Identity())
            steps(net, optimizer, range(3, 5))
            if end == "load":
                state = copy.deepcopy(sync.state_dict())
                steps(net, optimizer, range(5, 7))
                sync.load_state_dict(state)
            steps(net, optimizer, range(5, 7))
            sync.finish()
        ends.append(torch.cat([p.detach().flatten() for p in sync.trained.values()]))
    assert torch.equal(*ends)
    assert {"0.weight", "2.weight"} <= sync.state_dict()["content"]["parameters"].keys()
