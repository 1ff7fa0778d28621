"""FSDP2 inside replicas, sparse between them: 2 replicas x 2 shards, and 4 x 1, on gloo."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparsync import Correction
from sparsync.errors import ConfigurationError, PeerError
from sparsync.units import local_of
from tests.on_ranks import on_ranks, refused, same_everywhere

from . import small_model
from .small_model import all_refuse_what_is_not_finite, flat, flat_gradient, residuals


class Net(torch.nn.Module):
    """An embedding (whose input needs no gradient), uneven rows, and one row that one rank has."""

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
        {"algorithm": "allgather", "density": 1.0, "unit_bytes": 100, "overlap": False},
        {"transport": "torch", "unit_bytes": 100},
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
    """With fixed weights: sum of averages + mean of what is left == sum of dense averages."""
    mesh, dense = grid(), DistributedDataParallel(Net())
    net = sharded(mesh)
    sync = attach(net, mesh, density=0.05, unit_bytes=100, algorithm="budgeted")
    wanted, got = (torch.zeros(flat(net).numel()) for _ in range(2))
    for step in range(5):
        for model in (dense, net):
            model.zero_grad()
            backward(model, step)
        wanted += flat_gradient(dense)
        got += flat_gradient(net)
    left = sync.state_dict()["residual"]
    for name, parameter in net.named_parameters():  # a shard's residual, as the gradient of it
        kept = left[name].clone()
        dist.all_reduce(kept, group=mesh["replicate"].get_group())
        parameter.grad = torch.zeros_like(parameter.detach())
        local = parameter.grad.to_local()
        local.copy_(kept.view(local.shape) / 2)
    assert not torch.allclose(got, wanted, atol=1e-5)
    assert torch.allclose(got + flat_gradient(net), wanted, atol=1e-5)
    sync.close()


@on_ranks(4)
@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("set_requires_gradient_sync", 2),
        ("set_requires_all_reduce", 2),
        ("no_sync", 2),
        ("two exchanges", 4),
    ],
)
def test_gradients_accumulate(how, steps):
    """Several backward passes, one exchange: by FSDP2's own switches, or by ``no_sync``."""
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
    assert sync.stats()["steps"] == steps
    assert torch.allclose(flat_gradient(net), flat_gradient(reference), atol=1e-6)
    sync.close()


@on_ranks(4)
def test_resume_is_exact_and_refuses_another_shards_state():
    mesh = grid()

    def make(seed):
        net = sharded(mesh, Net(seed))
        return net, attach(net, mesh, threshold_period=4)

    state = small_model.resumes_exactly(make, train)
    rows = state["pieces"]["table.weight"]
    first_row = 0 if mesh["shard"].get_local_rank() == 0 else 6
    assert rows["shape"] == [11, 7] and rows["offset"] == [first_row, 0]
    assert state["residual"]["table.weight"].shape == (rows["size"][0] * 7,)
    rows["offset"] = [1, 0]
    _, sync = make(0)
    with refused("'table.weight'"):
        sync.load_state_dict(state)
    sync.close()


class Poison:
    """Spoils one element of one rank's shard of a gradient, as an overflow would."""

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
        (torch.float16, torch.float16),  # divided in two steps
    ],
)
def test_mixed_precision(compute, reduce):
    """16-bit computation, reduced over the shards in 32 or 16 bits."""
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
    """``rare`` runs on the first replica only: it counts as zero on the other, and nothing hangs."""
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
    """Runs ``out`` twice, each a reduce-scatter of its own."""

    def forward(self, x, *, rare=True):
        hidden = torch.tanh(self.hidden(self.table(x))) * self.gain
        return self.out(hidden) + self.out(2 * hidden) + self.rare(hidden)


@on_ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
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
    """What the user's code raises leaves residuals, and the next step, as they would have been."""
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
        kept = sync.state_dict()["residual"]
        train(net, range(2, 5))
        ends.append([flat(net), *kept.values()])
        sync.close()
    assert all(map(torch.equal, *ends))


def _give_up(module, gradients):
    raise KeyError("a user's error")


@on_ranks(4)
def test_a_part_that_fails_is_heard_of_by_the_others():
    """When the exchange of one shard fails, the ranks of the others are told at once."""
    mesh = grid()
    net, part = sharded(mesh), mesh["shard"].get_local_rank()
    sync = attach(net, mesh, unit_bytes=100)
    train(net, range(2))
    before, exchange = residuals(sync), sync.reducer.exchange

    async def failing(unit):
        raise PeerError(f"unit {unit}: the other replica is gone")

    said = ["the other replica is gone", "exchange of part 0 of this replica failed"]
    if part == 0:
        sync.reducer.exchange = failing
    started = time.monotonic()
    with refused(said[part], error=PeerError):
        backward(net, 2)
    assert time.monotonic() - started < 15, "waited for the timeout of 30 s"
    sync.reducer.exchange = exchange
    assert all(map(torch.equal, before, residuals(sync)))
    train(net, range(2, 4))
    assert same_everywhere(flat(net))
    sync.close()


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
