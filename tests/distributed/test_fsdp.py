"""Test FSDP2 in replicas and sparse exchange between them, over gloo: 2 replicas x 2 shards, 4 x 1."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import sparsync
from sparsync import Correction
from sparsync.algorithm import default_density
from sparsync.errors import ConfigurationError, PeerError
from sparsync.gradients import shards
from sparsync.units import local_of
from sparsync.updates import AdaptivePeriod
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from . import small_model
from .small_model import all_refuse_what_is_not_finite, flat, flat_gradient, fully_shard, whole


class Net(torch.nn.Module):
    """A model with an embedding whose input needs no gradient, uneven rows, and a row on one rank."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(11, 7)
        self.hidden = torch.nn.Linear(7, 9)
        self.out = torch.nn.Linear(9, 3)
        self.rare = torch.nn.Linear(9, 3)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, *, rare=True):
        hidden = torch.tanh(self.hidden(self.table(x))) * self.gain
        return self.out(hidden) + (self.rare(hidden) if rare else 0.0)


def grid(replicas=2, shards=2):
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh, net=None, **options):
    net = Net() if net is None else net
    for module in (net.table, net.hidden, net.out, net.rare):
        fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def attach(net, mesh, **options):
    return small_model.attach(net, replicate=mesh["replicate"], **options)


def loss_of(net, step, **how):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return (net(torch.randint(11, (6,), generator=generator), **how) - 1).pow(2).mean()


def backward(net, step):
    loss = loss_of(net, step)
    loss.backward()
    return loss


def train(net, steps, optimizer=None):
    small_model.train(net, steps, optimizer, backward)


@on_ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "budgeted", "unit_bytes": 100},
        pytest.param(
            {"algorithm": "allgather", "density": 1.0, "unit_bytes": 100, "overlap": False},
            marks=pytest.mark.slow,
        ),
        pytest.param({"transport": "torch", "unit_bytes": 100}, marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_equal_and_at_density_1_are_those_of_ddp(options):
    reference, net, mesh = DistributedDataParallel(Net()), sharded(grid()), grid()
    sync = attach(net, mesh, **options)
    for model in (reference, net):
        train(model, range(6))
    assert same_everywhere(flat(net))
    assert torch.allclose(flat(net), flat(reference), atol=1e-6) == ("density" in options)
    sizes = sum(unit.size for unit in sync.reducer.units)
    assert sizes == sum(p.to_local().numel() for p in net.parameters()), "padding is exchanged"
    sync.close()


@on_ranks(4)
def test_the_default_density_is_that_of_the_whole_model_on_every_shard():
    """Checkpoints and parts of a replica compare densities; uneven shards would choose others."""
    mesh, wide = grid(), torch.nn.Linear(300, 201)  # 101 and 100 rows
    for module, density in ((wide, default_density(301 * 201)), (Net(), 1.0)):
        net = fully_shard(module, mesh=mesh["shard"])
        with small_model.attach(net, "budgeted", replicate=mesh["replicate"], density=None) as sync:
            assert gathered(sync.reducer.plan.density) == [density] * 4
            assert all(unit.dense == (density == 1) for unit in sync.reducer.units)


@pytest.mark.slow
@on_ranks(4)
def test_one_shard_is_plain_data_parallelism():
    """With the same units, bit for bit."""
    mesh = grid(4, 1)
    ddp, net = DistributedDataParallel(Net()), sharded(mesh)
    syncs = [small_model.attach(ddp), attach(net, mesh)]
    for model in (ddp, net):
        train(model, range(6), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert torch.equal(flat(ddp), flat(net))
    for sync in syncs:
        sync.close()


@on_ranks(4)
def test_the_law_holds_over_shards_and_replicas():
    mesh, dense = grid(), DistributedDataParallel(Net())
    net = sharded(mesh)
    sync = attach(net, mesh, density=0.05, unit_bytes=100, algorithm="budgeted")
    small_model.the_law_holds(net, sync, dense, backward)


@on_ranks(4)
@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("set_requires_gradient_sync", 2),
        *(
            pytest.param(how, 2, marks=pytest.mark.slow)
            for how in ("set_requires_all_reduce", "no_sync")
        ),
        ("two exchanges", 4),
    ],
)
def test_gradients_accumulate(how, steps):
    """Several backward passes make one exchange, by FSDP2's own switches or by ``no_sync``."""
    mesh = grid()
    reference, net = DistributedDataParallel(Net()), sharded(mesh)
    sync = attach(net, mesh, algorithm="allgather", density=1.0)
    switch = getattr(net, how, lambda on: None)
    for _ in range(2):  # the second time: everything is as before
        reference.zero_grad()
        (loss_of(reference, 0) + loss_of(reference, 1)).backward()
        net.zero_grad()
        switch(False)
        net.set_is_last_backward(False)
        if how == "no_sync":
            with sync.no_sync():
                backward(net, 0)
        else:
            backward(net, 0)
        switch(True)
        net.set_is_last_backward(True)
        backward(net, 1)
    assert sync.stats()["exchanges"] == steps
    assert torch.allclose(flat_gradient(net), flat_gradient(reference), atol=1e-6)
    sync.close()


@on_ranks(4)
def test_gradients_on_their_way_to_host_memory_are_waited_for():
    """With ``CPUOffloadPolicy``, a hook may run before the copy of its gradient has ended."""
    mesh = grid()
    net = sharded(mesh)
    sync, arrived, taken = attach(net, mesh), set(), []
    source, launch = sync._source, sync._steps.launch

    class Event:
        def __init__(self, parameter):
            self.parameter = parameter

        def synchronize(self):
            arrived.add(self.parameter)

    def take(this, unit):
        taken.append(unit)
        assert arrived >= {p for p, (its, _) in source._place.items() if its == unit}
        launch(this, unit)

    for parameter, kept in source._fsdp._kept.items():
        kept.grad_offload_event = Event(parameter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync._steps, "launch", take)
        train(net, range(1))
    assert taken and source._place.keys() == source._fsdp._kept.keys()
    sync.close()


@on_ranks(4)
def test_resume_is_exact_and_refuses_another_shards_state():
    mesh = grid()

    def make(seed):
        net = sharded(mesh, Net(seed))
        return net, attach(net, mesh, threshold_period=4)

    state = small_model.resumes_exactly(make, train)
    rows = state["content"]["pieces"]["table.weight"]
    first_row = 0 if mesh["shard"].get_local_rank() == 0 else 6
    assert rows["shape"] == [11, 7] and rows["offset"] == [first_row, 0]
    kept = state["content"]["reducer"]["residual"]
    assert kept["table.weight"].shape == (rows["size"][0] * 7,)
    rows["offset"] = [1, 0]
    _, sync = make(0)
    with refused("'table.weight'"):
        sync.load_state_dict(state)
    sync.close()


class Poison:
    """A hook that spoils one element of one rank's shard of a gradient, as an overflow would."""

    def __init__(self, parameter):
        self.on = False
        parameter.register_post_accumulate_grad_hook(self.spoil)

    def spoil(self, parameter):
        if self.on:
            local_of(parameter.grad).view(-1)[0] = float("nan")

    def remove(self):
        self.on = False


@on_ranks(4)
def test_nonfinite_gradients_are_refused_on_all_shards():
    mesh = grid()

    def make(**options):
        net = sharded(mesh)
        net.poison = Poison(net.table.weight)  # its hook comes before sparsync's
        return net, attach(net, mesh, unit_bytes=100, **options)

    def poison(net):
        net.poison.on = dist.get_rank() == 1  # the other shards' gradients are finite
        return net.poison

    all_refuse_what_is_not_finite(make, "table.weight", poison, backward)


@on_ranks(4)
@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        (torch.bfloat16, torch.float32),
        # divided in two steps
        pytest.param(torch.float16, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_mixed_precision(compute, reduce):
    """Gradients are computed in 16 bits, and reduced over the shards in 32 or 16 bits."""
    mesh, ddp = grid(), DistributedDataParallel(Net())
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    net = sharded(mesh, mp_policy=policy)
    sync = attach(net, mesh, density=1.0, algorithm="allgather")
    for step in range(3):
        net.zero_grad()
        backward(net, step)
    backward(ddp, 2)
    assert torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=0.02, rtol=0.05)
    assert same_everywhere(flat_gradient(net))
    sync.close()


@on_ranks(4)
def test_a_replica_may_leave_modules_out():
    """``rare`` runs only on the first replica; on the other, its gradient is zero, and no rank hangs."""
    mesh = grid()
    first = mesh["replicate"].get_local_rank() == 0
    net, ddp = sharded(mesh), DistributedDataParallel(Net(), find_unused_parameters=True)
    sync = attach(net, mesh, algorithm="allgather", density=1.0, unit_bytes=100)
    for model in (net, ddp):
        loss_of(model, 0, rare=first).backward()
    assert torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=1e-6)
    net.zero_grad()
    loss_of(net, 1, rare=False).backward()
    assert net.rare.weight.grad is None
    sync.close()


class Twice(Net):
    """A model that runs ``out`` twice, each time with a separate reduce-scatter."""

    def forward(self, x, *, rare=True):
        hidden = torch.tanh(self.hidden(self.table(x))) * self.gain
        return self.out(hidden) + self.out(2 * hidden) + self.rare(hidden)


@on_ranks(4)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_module_that_runs_twice_is_exchanged_once(overlap):
    mesh, ddp = grid(), DistributedDataParallel(Twice())
    net = sharded(mesh, Twice())
    sync = attach(net, mesh, algorithm="allgather", density=1.0, overlap=overlap)
    for model in (ddp, net):
        backward(model, 0)
    assert torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=1e-6)
    sync.close()


@on_ranks(4)
def test_a_broken_backward_pass_leaves_no_trace():
    """Exceptions in the user's code affect neither residuals nor the next step."""
    mesh, ends = grid(), []
    for breaks in (False, True):
        net = sharded(mesh)
        sync = attach(net, mesh, unit_bytes=100)
        train(net, range(2))
        if breaks:
            net.zero_grad()
            hook = net.out.register_full_backward_pre_hook(_give_up)
            with pytest.raises(KeyError):
                backward(net, 2)
            net.reset_iter_state()
            hook.remove()
        kept = sync.state_dict()["content"]["reducer"]["residual"]
        train(net, range(2, 5))
        ends.append([flat(net), *kept.values()])
        sync.close()
    assert all(map(torch.equal, *ends))


def _give_up(module, gradients):
    raise KeyError("a user's error")


@on_ranks(4)
def test_what_cannot_work_is_refused():
    mesh = grid()
    for make, changes, words, error in (
        (lambda: fully_shard(Net(), mesh=mesh), {}, ["holds the replicas", "mesh['shard']"], None),
        (
            lambda: sharded(mesh),
            {"correction": Correction(clip=1.0)},
            ["Correction(clip=...)", "clip_grad_norm_"],
            None,
        ),
        (
            lambda: DistributedDataParallel(Net()),
            {},
            ["replicate= is for models without DDP"],
            None,
        ),
        (
            lambda: sharded(mesh),
            {"density": 0.1 * (1 + dist.get_rank() % 2)},
            ["density"],
            PeerError,
        ),
        (lambda: sharded(grid()), {"replicate": mesh}, ["2 dimensions", "mesh['replicate']"], None),
    ):
        with refused(*words, error=error or ConfigurationError):
            small_model.attach(make(), **{"replicate": mesh["replicate"], **changes})


@on_ranks(4)
def test_what_cannot_work_later_is_refused():
    mesh = grid()
    net = sharded(mesh)
    sync = attach(net, mesh)
    with refused("exchanged already", "close()"):
        attach(net, mesh)
    with refused("schedule="):
        sync.step()
    fresh = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.load_state_dict(fresh, assign=True)
    with refused("replaced after attach", "assign=True"):
        for step in range(2):
            backward(net, step)
    sync.close()
    other = sharded(mesh, Net(seed=dist.get_rank() // 2))
    sync = attach(other, mesh)
    with refused("ranks disagree on parameter", error=PeerError):
        backward(other, 0)
    sync.close()


# ---- what models do behind the hooks' back: plain, as four replicas, and sharded -------------------

EVERYTHING = {"algorithm": "allgather", "density": 1.0}


class Branches(torch.nn.Module):
    """A model whose layer ``never`` does not run, and of whose layer ``rare`` at most some rows do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.often, self.rare = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, x, factor=1.0):
        y = self.often(x)
        rows = torch.arange(20) < 10
        return y + factor * self.rare(x) * rows if factor else y


def of_kind(kind, module):
    """Return the module and its mesh."""
    if kind == "plain":
        return module, grid(4, 1)
    mesh = grid()
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh["shard"])
    return fully_shard(module, mesh=mesh["shard"]), mesh


def step_of(net, step, *arguments):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(4, next(net.parameters()).shape[-1], generator=generator)
    net(x, *arguments).pow(2).mean().backward()


KINDS = pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "FSDP2"])


@on_ranks(4)
@KINDS
def test_gradients_are_everywhere_or_nowhere(kind):
    """If one rank or shard has a gradient, the others get zeros rather than None, so decay agrees."""
    net, mesh = of_kind(kind, Branches())
    sync = attach(net, mesh, density=0.02, algorithm="allgather")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    first = mesh["replicate"].get_local_rank() == 0
    for step, factor in enumerate([1e-6 * first, 1e4, 0.0]):
        optimizer.zero_grad()
        step_of(net, step, factor)
        there = [name for name, p in net.named_parameters() if p.grad is not None]
        assert gathered(there) == [there] * 4
        assert "rare.weight" in there and "never.weight" not in there
        norm = whole(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()
    assert len(set(gathered(float(norm)))) == 1
    assert same_everywhere(flat(net))
    sync.close()


@on_ranks(4)
@KINDS
def test_gradients_that_nobody_has_stay_none(kind):
    """The next pass of the parts that have gradients is complete."""
    net, mesh = of_kind(kind, Branches())
    sync = attach(net, mesh, **EVERYTHING)
    first = float(mesh["replicate"].get_local_rank() == 0)
    step_of(net, 0, 0.0)
    assert all(p.grad is None for p in net.rare.parameters())
    net.zero_grad()
    step_of(net, 1, 1.0)  # and a second pass, in which the other replicas leave the module out
    before = flat_gradient(net)
    step_of(net, 2, first)
    added = flat_gradient(net)
    net.zero_grad()
    step_of(net, 2, first)
    assert torch.allclose(added, before + flat_gradient(net), atol=1e-5)
    assert same_everywhere(added)
    sync.close()


class Checkpointed(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.parts = parts
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in "abc"})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = x.tanh() if x.requires_grad else x.clone().requires_grad_()
            x = checkpoint(layer, x, use_reentrant=True) if name in self.parts else layer(x)
        return x


@on_ranks(4)
@pytest.mark.parametrize(
    "parts", ["b", *(pytest.param(parts, marks=pytest.mark.slow) for parts in ("c", "abc"))]
)
def test_reentrant_checkpoints_are_refused(parts):
    """Modules are checkpointed in the middle, at the end (which then opens the step), and everywhere."""
    net = Checkpointed(parts)
    sync = small_model.attach(net, replicate=dist.group.WORLD, **EVERYTHING)
    with refused("inside another", "use_reentrant=False"):
        step_of(net, 0)
    assert sync.stats()["exchanges"] == 0
    net.parts = ""
    net.zero_grad()
    step_of(net, 1)
    assert sync.stats()["exchanges"] == 1
    assert same_everywhere(flat_gradient(net))
    sync.close()


@on_ranks(4)
@KINDS
def test_averages_that_are_left_are_refused(kind):
    """With momentum in the correction, old averages must not count as gradients; zeros and sums may."""
    net, mesh = of_kind(kind, torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)))
    sync = attach(net, mesh, correction=Correction(momentum=0.9), **EVERYTHING)
    for step in range(3):
        net.zero_grad(set_to_none=step != 1)
        with sync.no_sync():
            step_of(net, step)
        step_of(net, step)
    with refused("still in the gradients", "no_sync()"):
        step_of(net, 3)
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize(
    "when", ["at once", *(pytest.param(w, marks=pytest.mark.slow) for w in ("later", "plain"))]
)
def test_thawed_parameters_are_refused(when):
    """Parameters are thawed before the first forward pass, later, and next to FSDP2's own ones."""
    mesh = grid(4, 1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    torch.nn.init.constant_(net[2].weight, 0.1)
    net[0].weight.requires_grad_(False)
    for module in [net[2]] if when == "plain" else [net[0], net]:
        fully_shard(module, mesh=mesh["shard"])
    sync = attach(net, mesh, **EVERYTHING)
    if when != "at once":
        with sync.no_sync():  # which compares no weights
            step_of(net, 0)
    net[0].weight.requires_grad_(True)
    with refused("frozen", "'0.weight'"):
        step_of(net, 1)
    sync.close()


@on_ranks(4)
def test_copies_of_a_plain_model_are_not_attached():
    torch.manual_seed(0)
    net, file = torch.nn.Linear(8, 8), io.BytesIO()
    sync = small_model.attach(net, replicate=dist.group.WORLD, **EVERYTHING)
    average = AveragedModel(net)
    torch.save(net, file)
    file.seek(0)
    for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        step_of(twin, 0)
        assert not same_everywhere(flat_gradient(twin))
    step_of(net, 0)
    average.update_parameters(net)
    assert same_everywhere(flat_gradient(net))
    assert sync.stats()["exchanges"] == 1
    sync.close()


@on_ranks(4)
def test_a_partly_sharded_model_is_refused():
    mesh, net = grid(), Branches()
    fully_shard(net.often, mesh=mesh["shard"])
    with refused("'rare.weight' is not sharded by FSDP2", "fully_shard on the whole"):
        attach(net, mesh)


# ---- updates --------------------------------------------------------------------------------------

OUTER = {
    "dense": {"algorithm": "dense"},
    "delayed": {"algorithm": "dense", "period": 4, "fragments": 3, "delay": 1, "momentum": 0.5},
}


@on_ranks(4)
@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "delayed"])
def test_updates_of_shards_are_those_of_whole_models(name):
    """The data are the same; without FSDP2, the test averages gradients over the ranks of a replica."""
    mesh, ends = grid(), []

    def averaged(net, step):
        loss = backward(net, step)
        for parameter in net.parameters():
            parameter.grad = small_model.mean_over(parameter.grad, mesh["shard"].get_group())
        return loss

    for net, back in ((Net(), averaged), (sharded(mesh), backward)):
        optimizer, sync = small_model.updating(net, mesh["replicate"], **OUTER[name])
        small_model.train(net, range(9), optimizer, back)
        with sync.shared():
            shared = flat(net)
        own = flat(net)
        sync.finish()
        assert same_everywhere(flat(net))
        ends.append(torch.stack([own, shared, flat(net)]))
        sync.close()
    torch.testing.assert_close(*ends, atol=2e-5, rtol=0)


@on_ranks(4)
def test_rows_of_tokens_have_one_share_on_all_replicas_of_a_shard():
    mesh = grid()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(11, 7), torch.nn.Linear(7, 11))
    for module in (*net, net):
        fully_shard(module, mesh=mesh["shard"])
    optimizer, sync = small_model.updating(
        net, mesh["replicate"], algorithm="quantised", noise_correction=True
    )
    replica = mesh["replicate"].get_local_rank()
    for _ in range(6):
        optimizer.zero_grad()
        # token 0 is in the batches of both replicas, and token 1 + replica in those of one of them
        loss = torch.nn.functional.cross_entropy(
            net(torch.tensor([0, 1 + replica])), torch.tensor([3, 4 + replica])
        )
        loss.backward()
        optimizer.step()
    noise, group = sync._weights.noise, mesh["replicate"].get_group()
    rows = [noise.shares[net[at].weight] for at in (0, 1)]
    assert [one.shape for one in rows] == [(len(local_of(net[at].weight)), 1) for at in (0, 1)]
    for one in rows:
        assert torch.equal(one, small_model.mean_over(one, group))
    if mesh["shard"].get_local_rank() == 0:  # the first six rows
        common, seen, other = rows[0].flatten().tolist()[:3]
        assert common > 0.9 and seen == pytest.approx(0.5, rel=0.02) == other
        common, seen = rows[1].flatten().tolist()[3:5]
        assert seen < 0.9 < common
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"dct": 8}, marks=pytest.mark.slow)], ids=str
)
def test_the_law_holds_for_updates_of_shards(settings):
    mesh = grid()
    net = sharded(mesh)
    optimizer, sync = small_model.updating(
        net, mesh["replicate"], algorithm="quantised", **settings
    )
    group = mesh["replicate"].get_group()
    small_model.the_law_of_updates_holds(net, optimizer, sync, backward, group)
    sync.close()


@on_ranks(4)
def test_shards_step_by_signs_of_cosine_coefficients():
    mesh = grid()
    net, rate = sharded(mesh), 0.01
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with sparsync.attach(net, optimizer, "demo", replicate=mesh["replicate"]):
        for step in range(3):
            before = small_model.local_flat(net).clone()
            small_model.train(net, range(step, step + 1), optimizer, backward)
            moved = (small_model.local_flat(net) - before).abs()
            torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], rate))
            assert moved.any()
            assert same_everywhere(small_model.local_flat(net), mesh["replicate"].get_group())


@pytest.mark.slow
@on_ranks(4)
def test_shards_choose_one_period():
    """Each part holds another layer, so the part that has moved furthest decides for all."""
    mesh = grid()
    net = sharded(mesh)
    rule, divided = AdaptivePeriod(0.04, most=8), False
    optimizer, sync = small_model.updating(net, mesh["replicate"], algorithm="dense", period=rule)
    for step in range(12):
        small_model.train(net, range(step, step + 1), optimizer, backward)
        drifts, periods = zip(*gathered((sync.outer.drift, sync.outer.period)), strict=True)
        assert len(set(periods)) == 1
        divided |= min(drifts) < rule.drift / 2 <= max(drifts)
    assert divided, "no part would have decided otherwise alone"
    sync.close()


@on_ranks(4)
def test_nan_in_updates_of_one_shard_brings_all_back():
    mesh = grid()
    net = sharded(mesh)
    optimizer, sync = small_model.updating(net, mesh["replicate"], algorithm="quantised")
    small_model.nan_on_one_rank_brings_all_back(
        net, optimizer, sync, backward, net.table.weight, rank=1
    )
    sync.close()


@on_ranks(4)
def test_a_torch_that_adds_up_instead_of_averaging_is_refused():
    mesh = grid()
    with pytest.MonkeyPatch.context() as later:
        later.setattr(shards, "AVERAGES_ON_CPU", "99")  # any torch is then as old as 2.8
        with refused("adds up the gradients of CPU tensors", "torch 99 or newer"):
            attach(sharded(mesh), mesh)
        attach(sharded(grid(replicas=4, shards=1)), grid(replicas=4, shards=1)).close()


@on_ranks(2)
def test_finish_makes_the_buffers_of_replicas_equal():
    """Without DDP, nothing broadcasts the statistics of BatchNorm."""
    net = torch.nn.Sequential(small_model.model(), torch.nn.BatchNorm1d(5))
    with sparsync.attach(
        net, torch.optim.SGD(net.parameters(), lr=0.1), replicate=dist.group.WORLD
    ) as sync:
        small_model.train(net, range(3))
        first = gathered(net[1].running_var.tolist())
        assert first[0] != first[1]
        sync.finish()
        assert net[1].running_var.tolist() == first[0]
        small_model.train(net, range(3, 5))  # training goes on
        assert same_everywhere(flat(net))


@on_ranks(2)
def test_weights_are_compared_as_they_were_before_a_forward_pass_writes_to_them():
    """``Embedding(max_norm=...)`` shortens the rows of a rank's own batch."""
    rank = dist.get_rank()
    for wrong in (False, True):
        torch.manual_seed(rank if wrong else 0)
        net = torch.nn.Sequential(torch.nn.Embedding(9, 4, max_norm=0.1), torch.nn.Linear(4, 1))
        with sparsync.attach(net, density=0.1, replicate=dist.group.WORLD) as sync:
            loss = net(torch.tensor([rank, 5])).sum()
            assert not same_everywhere(net[0].weight.detach())
            if wrong:
                with refused("ranks disagree on parameter 0.weight", error=PeerError):
                    loss.backward()
            else:
                loss.backward()
                assert sync.steps == 1


@on_ranks(2)
def test_parameters_without_values_are_named():
    for net in (torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device="meta")):
        with refused("'weight' has no values yet"):
            sparsync.attach(net, density=0.1, replicate=dist.group.WORLD)


@on_ranks(2)
def test_compiled_autograd_is_refused_without_ddp():
    """It would never run the callback that closes the step, so nothing would be exchanged."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1, bias=False)
    with sparsync.attach(net, density=0.1, replicate=dist.group.WORLD) as sync:
        loss = net(torch.ones(1, 2)).sum()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            refused("compiled autograd", "exchange='updates'"),
        ):
            loss.backward()
        net(torch.ones(1, 2)).sum().backward()
        assert sync.steps == 1
