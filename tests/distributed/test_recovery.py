"""Four real ranks recover from overflows and diverging replicas, and resume from checkpoints."""

import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import ConfigurationError, Correction, Sentinel
from sparsync.checkpoint import save_load
from sparsync.checkpoint.reshard import state_like
from sparsync.checkpoint.save_load import seat_of
from sparsync.errors import CheckpointError, PeerError
from sparsync.fields import sealed
from sparsync.updates import OuterAverager
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .small_model import (
    attach,
    attached,
    backward,
    batch,
    ddp_model,
    flat,
    fully_shard,
    model,
    train,
)
from .test_update_checkpoints import net_of

# ---- overflows ------------------------------------------------------------------------------------

OVERFLOWS = {3: 1, 4: 0, 9: 2}  # step: rank


def weights_of_every_step(ddp, optimizer, scaler=None):
    """Train 12 steps, some of which overflow on one rank."""
    weights = []
    for step in range(12):
        x, y = batch(step)
        if OVERFLOWS.get(step) == dist.get_rank():
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = (ddp(x) - y).pow(2).mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append(flat(ddp))
    return weights


@on_ranks(4)
def test_a_grad_scaler_skips_and_recovers_on_all_ranks():
    """The scale backs off and grows; training is bit for bit the same as without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    runs = []
    for options in ({"nonfinite": "skip"}, {"scaler": scaler}):
        ddp = ddp_model(bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        with attached(ddp, "budgeted", **options) as sync:
            runs.append(weights_of_every_step(ddp, optimizer, options.get("scaler")))
            assert sync.stats()["refused_exchanges"] == len(OVERFLOWS)
            scale = sync.state_dict()["content"]["reducer"]["scale"]
    assert scaler.get_scale() == 2.0**11 and scale > 1
    assert all(map(torch.equal, *runs))
    assert all(torch.equal(runs[1][step], runs[1][step - 1]) for step in OVERFLOWS)
    assert same_everywhere(runs[1][-1]) and runs[1][-1].isfinite().all()


# ---- replicas that differ -------------------------------------------------------------------------


def flip(ddp, rank):
    if dist.get_rank() == rank:
        with torch.no_grad():
            ddp.module[2].bias[3] += 1e-6


@on_ranks(4)
@pytest.mark.parametrize("policy", ["raise", "heal"])
def test_the_sentinel_names_a_replica_that_differs_or_heals_it(policy):
    ddp = ddp_model()
    with attached(ddp, sentinel=Sentinel(period=2, policy=policy)):
        train(ddp, range(2))
        flip(ddp, 1)
        train(ddp, range(2, 3))  # the period closes with the next backward pass
        assert not same_everywhere(flat(ddp))
        if policy == "raise":
            said = "step 3: '2.bias' differs on rank 1: replicas are no longer equal"
            with refused(said, error=PeerError):
                train(ddp, range(3, 4))
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(ddp, range(3, 4))
        (told,) = [str(w.message) for w in said if "sentinel" in str(w.message)]
        assert "'2.bias' differs on rank 1: healed" in told
        for step in (4, 5):
            assert same_everywhere(flat(ddp))
            train(ddp, range(step, step + 1))


@on_ranks(4)
def test_statistics_of_batch_norm_raise_no_alarm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    ddp = DistributedDataParallel(net, broadcast_buffers=False)
    with attached(ddp, sentinel=Sentinel(period=1, policy="raise")):
        train(ddp, range(4))
        assert not same_everywhere(net[1].running_mean), "the test would say nothing"


@on_ranks(4)
def test_what_differs_is_named_before_any_step():
    rank, ddp, scaler = dist.get_rank(), ddp_model(), torch.amp.GradScaler("cpu")
    flip(ddp, 1)
    with refused("parameter 2.bias", "has float32[30]", error=PeerError):
        attach(ddp)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(torch, "__version__", "1.0.0")
        with refused("the version of torch", "rank 2 has 1.0.0", error=PeerError):
            attach(ddp_model())
    with refused(f"(period={5 + rank}", "(period=5", error=PeerError):
        attach(ddp_model(), sentinel=Sentinel(period=5 + rank))
    with refused("nonfinite='skip'", "give 'propagate'"):
        attach(ddp_model(), scaler=scaler, nonfinite="skip")
    with refused("scaler is float", "GradScaler"):
        attach(ddp_model(), scaler=2.0)


# ---- checkpoints ----------------------------------------------------------------------------------


@on_ranks(4)
def test_a_checkpoint_is_continued_bit_for_bit(folder):
    """Training is saved and continued, then loaded into a fresh job with other buckets and continued."""
    ends = []
    for fresh in (False, True):
        ddp = ddp_model(seed=fresh, bucket_cap_mb=0.001 if fresh else 25)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        saved = {"model": ddp.module, "optimizer": optimizer}
        with attached(ddp, threshold_period=4) as sync:
            if fresh:
                assert sparsync.load(sync, folder, **saved)["epoch"] == 1
            else:
                train(ddp, range(3), optimizer)
                sparsync.save(sync, folder, epoch=1, **saved)
            train(ddp, range(3, 8), optimizer)
        ends.append(flat(ddp))
    assert torch.equal(*ends)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("plain", marks=pytest.mark.slow)])
def test_every_rank_gets_its_own_buffers_back(kind, folder):
    """Nothing makes the statistics of normalisation equal; rank r of fewer takes those of old rank r."""
    rank, halves = dist.get_rank(), [dist.new_group(pair) for pair in ([0, 1], [2, 3])]

    def make(group):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
        if kind == "plain":
            return net, {"replicate": group}
        return DistributedDataParallel(net, process_group=group, broadcast_buffers=False), {}

    ends, saved = [], None
    for fresh in (False, True):
        net, where = make(dist.group.WORLD)
        with attached(net, **where) as sync:
            if fresh:
                sparsync.load(sync, folder, model=net)
            else:
                train(net, range(3))
                sparsync.save(sync, folder, model=net)
                saved = [buffer.clone() for buffer in net.buffers()]
            train(net, range(3, 5))
        ends.append([*net.parameters(), *net.buffers()])
    assert all(map(torch.equal, *ends))
    assert not same_everywhere(saved[0]), "the test would say nothing"
    net, where = make(halves[rank // 2])
    with attached(net, **where) as sync:
        sparsync.load(sync, folder, model=net)
        assert all(map(torch.equal, net.buffers(), gathered(saved)[rank % 2]))


@on_ranks(4)
def test_every_rank_gets_its_own_weights_back(folder):
    """Local updates: the next exchanges have the same bits."""

    def make():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        local = OuterAverager(net, residual="weights", density=0.1, optimizer=optimizer)
        return local, {"model": net, "optimizer": optimizer}

    def steps(local, model, optimizer, which):
        for step in which:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            local.step()
        return flat(model)

    (local, parts), (again, fresh) = make(), make()
    steps(local, **parts, which=range(3))
    sparsync.save(local, folder, epoch=2, **parts)
    through = steps(local, **parts, which=range(3, 6))
    assert sparsync.load(again, folder, **fresh)["epoch"] == 2
    assert torch.equal(through, steps(again, **fresh, which=range(3, 6)))


ENVELOPES = {  # damages of the envelope in rank 1's file, and the error on that rank
    "kind": (lambda state: state.update(kind="updates"), "['kind'] is 'updates', expected 'grad"),
    "no kind": (lambda state: state.pop("kind"), "has no state['kind']; load a state of a handle"),
    "version": (lambda state: state.update(version=99), "['version'] is 99, expected"),
    "a field": (lambda state: state["content"].update(surprise=1), "unknown state['surprise']"),
}
DAMAGES = {  # damages of the reducer's state in rank 1's file, and the error on that rank or on all
    "residual": (
        lambda state: state["residual"]["0.weight"][3:4].fill_(torch.nan),
        "the saved residual of '0.weight' holds NaN or Inf",
    ),
    "the end of a residual": (
        lambda state: state["residual"]["2.bias"][-1:].fill_(-torch.inf),
        "the saved residual of '2.bias' holds NaN or Inf",
    ),
    "velocity": (
        lambda state: state["velocity"]["0.bias"][:1].fill_(torch.nan),
        "the saved velocity of '0.bias' holds NaN or Inf",
    ),
    "a part of a residual": (
        lambda state: state["residual"].pop("2.bias"),
        "the saved residual of '2.bias' is None, expected a tensor",
    ),
    "shape": (
        lambda state: state["residual"].update({"0.weight": torch.zeros(7)}),
        "the saved residual of '0.weight' is (7,) torch.float32, expected a tensor of",
    ),
    "scale": (
        lambda state: state.update(scale=torch.nan),
        "['scale'] is nan, expected a finite number",
    ),
    "threshold": (
        lambda state: state["selectors"][0].update(threshold_key=torch.nan),
        "threshold_key",
    ),
    "step": (lambda state: state.update(step=1), "ranks disagree on the step of the saved state"),
    "no residual": (
        lambda state: state["residual"].clear(),
        "ranks disagree on which residuals and velocities it has",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_one_rank_cannot_load_all_refuse(kind, folder):
    """All ranks raise at once, nothing changes, and training continues as if nothing had been loaded."""
    runs, rank = [], dist.get_rank()
    for refuses in (True, False):
        net, where = net_of(kind)
        correction = Correction(momentum=0.5)
        with attached(net, correction=correction, **where) as sync:
            train(net, range(2))
            if refuses:
                file = sparsync.save(sync, folder) / seat_of(sync).name
            train(net, range(2, 4))
            for damage, words in ENVELOPES.values() if refuses else ():
                refuse_all(sync, net, file, damage, words)
            for damage, words in DAMAGES.values() if refuses else ():
                refuse_all(sync, net, file, lambda s, d=damage: d(s["content"]["reducer"]), words)
            train(net, range(4, 6))
            runs.append((flat(net), sync.state_dict()))
    (weights, state), (undisturbed, expected) = runs
    saved, expected = (one["content"]["reducer"] for one in (state, expected))
    assert torch.equal(weights, undisturbed) and saved["step"] == 6
    for what in ("residual", "velocity"):
        assert all(torch.equal(saved[what][n], value) for n, value in expected[what].items())
    assert rank != 1 or saved["residual"]["0.weight"].any(), "the test would say nothing"


def refuse_all(sync, net, file, damage, words):
    """Damage the file of rank 1, let all ranks load from files and from memory, and repair the file."""
    first, saved = dist.get_rank() == 1, torch.load(file, weights_only=True)
    damaged, weights = copy.deepcopy(saved), flat(net)
    if first:
        damage(damaged)
        torch.save(damaged, file)
    dist.barrier()
    alike = "ranks disagree" in words
    error = PeerError if alike else ConfigurationError if first else CheckpointError
    others = () if alike or first else ("rank 1 could not",)
    for load in (
        lambda: sparsync.load(sync, file.parent.parent),
        lambda: sync.load_state_dict(damaged),
    ):
        begin = time.monotonic()
        with refused(words, *others, error=error):
            load()
        assert time.monotonic() - begin < 15, "waited for the timeout of 30 s"
        assert torch.equal(weights, flat(net)) and sync.reducer.step == 4
    dist.barrier()
    if first:
        torch.save(saved, file)


@on_ranks(4)
def test_what_is_divided_over_ranks_is_refused(folder):
    """A checkpoint would give rank 0's shards to all ranks; the state of the handle is saved by each."""
    net, where = net_of("fsdp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with attached(net, **where) as sync:
        train(net, range(2), optimizer)
        weights = flat(net)
        parts = {"model": net, "optimizer": optimizer, "weight": next(net.parameters())}
        for name, part in parts.items():
            with refused(f"'{name}' is divided over ranks", "torch.distributed.checkpoint"):
                sparsync.save(sync, folder, epoch=1, **{name: part})
        assert not list(folder.rglob("*"))
        sparsync.save(
            sync, folder, epoch=1, model=model(), optimizer=torch.optim.SGD(model().parameters())
        )
        for name in ("model", "optimizer"):
            with refused(f"'{name}' is divided over ranks"):
                sparsync.load(sync, folder, **{name: parts[name]})
        assert torch.equal(weights, flat(net))
        assert sparsync.load(sync, folder)["epoch"] == 1


@on_ranks(4)
def test_what_one_rank_cannot_see_all_refuse(folder):
    ddp, rank = ddp_model(), dist.get_rank()
    with attached(ddp) as sync, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "_LATE", 0.2)
        train(ddp, range(2))
        sparsync.save(sync, folder / "shared", model=ddp.module)
        mine = folder / f"disk-of-{rank}"
        with refused("this rank sees only ['s", error=CheckpointError):
            sparsync.save(sync, mine, model=ddp.module)
        assert not list(mine.rglob("*"))
        sees = "[2]" if rank else "none"
        words = ["there is no complete checkpoint in ", f"(this rank sees {sees})"]
        with refused(*words, error=CheckpointError):
            sparsync.load(sync, folder / "shared" if rank else folder / "nowhere")


# ---- between DDP and FSDP2 ------------------------------------------------------------------------


def over_shards(replicas, shards, weights):
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(model(), mesh=mesh["shard"])
    sync = attach(net, replicate=mesh["replicate"])
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            mine = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
            parameter.copy_(mine)
    return net, sync


def owed(states, name):
    return sum(state["content"]["reducer"]["residual"][name].double() for state in states)


@on_ranks(4)
def test_ddp_and_fsdp_exchange_their_residuals(folder):
    """Residuals move both ways, are equal for each parameter, and training continues identically."""
    ddp, rank = ddp_model(), dist.get_rank()
    sync = attach(ddp)
    train(ddp, range(3))
    states = gathered(sync.state_dict())
    sparsync.save(sync, folder)
    weights = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, range(3, 6))

    net, resumed = over_shards(4, 1, weights)
    sparsync.load(resumed, folder)
    both = (resumed.state_dict(), states[rank])
    mine, before = (state["content"]["reducer"]["residual"] for state in both)
    assert all(torch.equal(mine[name], before[name]) for name in before)
    train(net, range(3, 6))
    assert torch.allclose(flat(net), flat(ddp), atol=1e-6)
    resumed.close()

    net, divided = over_shards(2, 2, weights)
    sparsync.load(divided, folder)
    sparsync.save(divided, folder / "divided")
    parts = sparsync.reshard(gathered(divided.state_dict()), 4)
    content = states[0]["content"]
    here = [{**content, "reducer": {**content["reducer"], "rank": rank}} for rank in range(4)]
    back = [state_like(sealed("gradients", one), parts) for one in here]
    sparsync.load(sync, folder / "divided")
    for whole in (back, gathered(sync.state_dict())):
        for name in before:
            assert torch.allclose(owed(states, name), owed(whole, name), atol=1e-6)
    train(net, range(3, 5))
    assert divided.stats()["exchanges"] == 5
    divided.close()
    sync.close()
