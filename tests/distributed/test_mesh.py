"""Test pipeline stages (dp 2 x pp 2) and tensor parallelism (dp 2 x tp 2) over gloo."""

import gc
import io
import threading
import weakref
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.algorithm import default_density
from sparsync.errors import NonFiniteGradientError, PeerError
from sparsync.units import local_of
from sparsync.updates import OuterStep
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .small_model import (
    attach,
    attached,
    batch,
    flat,
    fully_shard,
    local_flat,
    local_shared,
    nan_on_one_rank_brings_all_back,
    residuals,
    resumes_exactly,
    the_law_of_updates_holds,
    train,
    updating,
)
from .small_model import model as network

EVERYTHING = {"algorithm": "allgather", "density": 1.0}


def mesh_of(**dims):
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


class Hook(torch.autograd.Function):
    """Calls a function on the way back."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


class Back(torch.nn.Module):
    """Passes everything on; calls a function on the way back."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return Hook.apply(x, self.function)


# ---- pipelines ------------------------------------------------------------------------------------

MICROBATCHES = 4


def mean_square(output, target):
    return (output - target).pow(2).mean()


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "v": ScheduleInterleavedZeroBubble}


class Pipe:
    """One rank of a pipeline that has two stages in all, or two stages on each rank ("v")."""

    def __init__(
        self, kind, seed=0, *, mesh=None, fsdp=False, back=None, scale_grads=True, **options
    ):
        self.mesh = mesh or mesh_of(dp=2, pp=2)
        net = network(seed)
        halves = [net[:1], net[1:2], net[2:3], net[3:]] if kind == "v" else [net[:2], net[2:]]
        if back:
            halves[0].append(Back(back))
        self.place = self.mesh["pp"].get_local_rank()
        mine = range(self.place, len(halves), 2)
        self.module = torch.nn.ModuleList([halves[i] for i in mine])
        if fsdp:
            for half in self.module:
                fully_shard(half, mesh=self.mesh["shard"])
        group = self.mesh["pp"].get_group()
        stages = [
            PipelineStage(half, i, len(halves), torch.device("cpu"), group=group)
            for i, half in zip(mine, self.module, strict=True)
        ]
        self.several = kind == "v"
        self.schedule = SCHEDULES[kind](
            stages if self.several else stages[0],
            MICROBATCHES,
            loss_fn=mean_square,
            scale_grads=scale_grads,
        )
        self.sync = attach(
            self.module if self.several else self.module[0],
            replicate=self.mesh["dp"],
            schedule=self.schedule,
            **options,
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def backward(self, step):
        self.optimizer.zero_grad()
        x, y = batch(step, self.mesh["dp"].get_local_rank())
        if self.place:
            self.schedule.step(target=y)
        elif self.several:
            self.schedule.step(x, target=y)
        else:
            self.schedule.step(x)

    def train(self, steps):
        for step in steps:
            self.backward(step)
            self.sync.step()
            self.optimizer.step()

    def replicas_are_equal(self):
        return same_everywhere(flat(self.module), self.mesh["dp"].get_group())


def one_process(steps, scale):
    """Train the whole network in this process on the data of both replicas."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        for replica in range(2):
            x, y = batch(step, replica)
            (scale * mean_square(net(x), y) / 2).backward()
        optimizer.step()
    return net


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpipe", {**EVERYTHING, "scale_grads": False}),
        ("1f1b", {**EVERYTHING, "unit_bytes": 100}),
        pytest.param("1f1b", {"algorithm": "budgeted"}, marks=pytest.mark.slow),
        # two stages on a rank, zero bubble
        pytest.param("v", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("1f1b", {**EVERYTHING, "fsdp": True}, marks=pytest.mark.slow),
    ],
)
def test_pipelines_train_as_one_process_at_density_1(kind, options):
    mesh = mesh_of(dp=2, shard=1, pp=2) if "fsdp" in options else None
    pipe = Pipe(kind, mesh=mesh, **options)
    pipe.train(range(5))
    assert pipe.replicas_are_equal()
    net = one_process(range(5), 1.0 if options.get("scale_grads", True) else MICROBATCHES)
    place = pipe.place
    mine = [net[place], net[place + 2]] if kind == "v" else [net[2 * place : 2 * place + 2]]
    wanted = torch.cat([p.detach().flatten() for part in mine for p in part.parameters()])
    assert torch.allclose(flat(pipe.module), wanted, atol=1e-6) == ("density" in options)
    pipe.sync.close()


@on_ranks(4)
def test_exchanges_run_in_bubbles():
    """The second stage's exchange ends while the first stage still runs its last backward pass."""
    store, calls = dist.distributed_c10d._get_default_store(), []

    def wait_for_the_second_stage():
        calls.append(None)
        if len(calls) == MICROBATCHES:
            store.wait(["exchanged by 1", "exchanged by 3"], timedelta(seconds=20))

    pipe = Pipe("gpipe", back=wait_for_the_second_stage)
    exchange = pipe.sync.reducer.exchange

    async def noted(unit):
        await exchange(unit)
        store.set(f"exchanged by {dist.get_rank()}", "")

    pipe.sync.reducer.exchange = noted
    pipe.train(range(1))
    pipe.sync.close()


@pytest.mark.slow
@on_ranks(4)
def test_a_pipeline_resumes():
    pipes = {}

    def make(seed):
        pipe = Pipe("1f1b", seed, threshold_period=4)
        pipes[pipe.module] = pipe
        return pipe.module, pipe.sync

    resumes_exactly(make, lambda module, steps: pipes[module].train(steps))


@on_ranks(4)
def test_a_checkpoint_refuses_stages_but_not_their_handle(folder):
    """It would have only rank 0's stage."""
    pipe = Pipe("gpipe")
    pipe.train(range(2))
    with refused("have different modules", "torch.distributed.checkpoint"):
        sparsync.save(pipe.sync, folder, model=pipe.module)
    assert not list(folder.rglob("*"))
    sparsync.save(pipe.sync, folder, epoch=1)
    assert sparsync.load(pipe.sync, folder) == {"epoch": 1}
    pipe.sync.close()


@on_ranks(4)
@pytest.mark.parametrize("policy", ["raise", pytest.param("skip", marks=pytest.mark.slow)])
def test_a_stage_refuses_for_all(policy):
    """If a gradient of one rank has NaN, no stage of any replica applies the step; residuals stay."""
    pipe = Pipe("gpipe", nonfinite=policy, unit_bytes=100)
    pipe.train(range(2))
    before, weights = residuals(pipe.sync), flat(pipe.module)
    if pipe.place == 0 and pipe.mesh["dp"].get_local_rank() == 1:
        hook = pipe.module[0][0].bias.register_hook(lambda gradient: gradient * float("nan"))
        pipe.backward(2)
        hook.remove()
    else:
        pipe.backward(2)
    if policy == "raise":
        with refused("'0.bias'", error=NonFiniteGradientError):
            pipe.sync.step()
    else:
        pipe.sync.step()
    pipe.optimizer.step()
    assert all(map(torch.equal, before, residuals(pipe.sync)))
    assert torch.equal(flat(pipe.module), weights)
    pipe.train(range(3, 5))
    assert pipe.replicas_are_equal()
    pipe.sync.close()


@on_ranks(4)
def test_a_forgotten_step_is_named():
    schedule = SimpleNamespace(_n_microbatches=2, scale_grads=True)  # torch wraps what hooks raise
    net, replicate = network(), mesh_of(dp=2, pp=2)["dp"]
    sync = attach(net, schedule=schedule, replicate=replicate)
    with refused("call step() after every step of the schedule"):
        for step in range(3):
            x, y = batch(step, 0)
            mean_square(net(x), y).backward()
    sync.close()
    with refused("schedule is int"):
        attach(network(), schedule=4, replicate=replicate)


# ---- tensor parallelism ---------------------------------------------------------------------------

WORDS, WIDTH = 4, 6


class Block(torch.nn.Module):
    """A block with a plain norm, a sharded pair of matrices, and a norm on pieces of the sequence."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.before = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 10)
        self.down = torch.nn.Linear(10, WIDTH)
        self.after = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.after(self.down(torch.tanh(self.up(self.before(x))))))


def parallel(mesh, seed=0):
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "after": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1)),
    }
    return parallelize_module(Block(seed), mesh["tp"], plan)


def loss_of(net, step, replica, columns=slice(None)):
    """Return the mean square; each tensor-parallel rank has its own columns of the output."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(3, WORDS, WIDTH, generator=generator)
    return (net(x) - x[..., :2].sin()[..., columns]).pow(2).sum() / (3 * WORDS * 2)


def train_over(mesh):
    """Return a trainer for a net at this rank's place in a mesh."""
    place, replica = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()

    def train(net, steps):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, step, replica, slice(place, place + 1)).backward()
            optimizer.step()

    return train


def local(net, *, sharded):
    """Return the parameters that are divided over tensor-parallel ranks, or those that are not."""
    pairs = [(p, p.to_local() if isinstance(p, DTensor) else p) for p in net.parameters()]
    found = [mine.detach().flatten() for p, mine in pairs if (mine.shape != p.shape) == sharded]
    return torch.cat(found)


def whole_norms(name, parameter):
    return parameter.ndim > 1


@on_ranks(4)
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        {"algorithm": "budgeted", "density": 0.2},
        {"algorithm": "allgather", "unit_bytes": 40, "compress": whole_norms},
    ],
)
def test_tensor_parallel_trains(options):
    """Weights are equal on all replicas, and replicated ones also on all tensor-parallel ranks."""
    mesh = mesh_of(dp=2, tp=2)
    net, reference = parallel(mesh), Block()
    sync = attach(net, replicate=mesh["dp"], **options)
    train_over(mesh)(net, range(4))
    shards, copies = local(net, sharded=True), local(net, sharded=False)
    assert same_everywhere(torch.cat([shards, copies]), mesh["dp"].get_group())
    assert same_everywhere(copies, mesh["tp"].get_group())
    assert not same_everywhere(shards, mesh["tp"].get_group())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(reference, step, replica) / 2).backward()
        optimizer.step()
    assert torch.allclose(flat(net), flat(reference), atol=1e-5) == (options == EVERYTHING)
    sync.close()


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_resumes():
    mesh = mesh_of(dp=2, tp=2)

    def make(seed):
        net = parallel(mesh, seed)
        return net, attach(net, replicate=mesh["dp"], threshold_period=4)

    state = resumes_exactly(make, train_over(mesh))
    place = mesh["tp"].get_local_rank()
    columns = {"shape": [6, 10], "offset": [0, 5 * place], "size": [6, 5]}
    kept, pieces = state["content"]["reducer"]["residual"], state["content"]["pieces"]
    assert pieces["down.weight"] == columns
    assert "before.weight" in kept and "before.weight" not in pieces


@on_ranks(4)
def test_tensor_parallel_refuses():
    """All ranks report NaN in one shard, and algorithms that decide per rank are refused."""
    mesh = mesh_of(dp=2, tp=2)
    net = parallel(mesh)
    net.up.bias.register_hook(lambda g: g * float("nan") if dist.get_rank() == 3 else g)
    sync = attach(net, replicate=mesh["dp"])
    with refused("'up.bias'", error=NonFiniteGradientError):
        train_over(mesh)(net, range(1))
    sync.close()
    with refused("the algorithm 'auto' decides by what a rank holds"):
        attach(parallel(mesh), replicate=mesh["dp"], algorithm="auto")


@on_ranks(4)
def test_the_default_density_counts_what_tensor_parallel_ranks_replicate_once():
    """Both ranks hold a table and a DTensor of 30,000 each; another 60,000 are split in halves."""
    mesh = mesh_of(dp=2, tp=2)
    sizes = {"table": 100, "copied": 100, "up": 200}
    net = torch.nn.ModuleDict({n: torch.nn.Linear(300, k, bias=False) for n, k in sizes.items()})
    parallelize_module(net["up"], mesh["tp"], ColwiseParallel())
    copied = distribute_tensor(net["copied"].weight, mesh["tp"], [Replicate()])
    net["copied"].weight = torch.nn.Parameter(copied)
    with attached(net, "budgeted", replicate=mesh["dp"], density=None) as sync:
        assert gathered(sync.reducer.plan.density) == [default_density(120_000)] * 4


# ---- updates --------------------------------------------------------------------------------------


def parallel_backward(mesh):
    place, replica = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()

    def backward(net, step):
        loss = loss_of(net, step, replica, slice(place, place + 1))
        loss.backward()
        return loss

    return backward


@on_ranks(4)
@pytest.mark.parametrize("corrected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_updates_of_tensor_parallel_models(corrected):
    """Parameters that are replicated over tensor-parallel ranks stay equal there."""
    mesh = mesh_of(dp=2, tp=2)
    net = parallel(mesh)
    settings = {"algorithm": "quantised", "fragments": 2, "period": 2}
    optimizer, sync = updating(net, mesh["dp"], noise_correction=corrected, **settings)
    for step in range(6):
        train(net, range(step, step + 1), optimizer, parallel_backward(mesh))
        copies, shards = local(net, sharded=False), local(net, sharded=True)
        assert same_everywhere(copies, mesh["tp"].get_group())
        assert not same_everywhere(shards, mesh["tp"].get_group())
        assert same_everywhere(local_shared(net, sync), mesh["dp"].get_group())
    sync.finish()
    assert same_everywhere(local(net, sharded=False))
    assert same_everywhere(local_flat(net), mesh["dp"].get_group())
    sync.close()


@on_ranks(4)
def test_updates_of_tensor_parallel_models_keep_the_law_and_return_from_nan():
    mesh = mesh_of(dp=2, tp=2)
    for check, more in (
        (the_law_of_updates_holds, [mesh["dp"].get_group()]),
        (nan_on_one_rank_brings_all_back, None),
    ):
        net = parallel(mesh)
        optimizer, sync = updating(net, mesh["dp"], algorithm="quantised")
        check(net, optimizer, sync, parallel_backward(mesh), *(more or [net.up.bias, 3]))
        assert same_everywhere(local(net, sharded=False), mesh["tp"].get_group())
        sync.close()


@on_ranks(4)
def test_updates_of_stages():
    pipe = Pipe("gpipe", **EVERYTHING)
    pipe.sync.close()
    stage, group = pipe.module[0], pipe.mesh["dp"].get_group()
    optimizer, sync = updating(stage, pipe.mesh["dp"], algorithm="quantised")
    the_law_of_updates_holds(stage, optimizer, sync, lambda _, step: pipe.backward(step), group)
    sync.close()
    if pipe.place:  # of one parameter there is one fragment
        for parameter in list(stage.parameters())[1:]:
            parameter.requires_grad_(False)
    with refused("fragments of each part", error=PeerError):
        updating(stage, pipe.mesh["dp"], algorithm="quantised", period=2, fragments=2)


# ---- groups ---------------------------------------------------------------------------------------


@on_ranks(4)
def test_half_of_the_world_trains_by_itself():
    """Also attaches again after ``close()``."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    for _ in range(2):
        net = Block(seed=dist.get_rank() // 2)
        sync = attach(net, "budgeted", replicate=mine, world=mine)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, step, dist.get_rank()).backward()
            optimizer.step()
        assert same_everywhere(flat(net), mine)
        sync.close()


@on_ranks(4)
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_units_start_while_others_go_backward(overlap):
    """The last layers' exchange begins before the first layers' gradients have arrived."""
    layers, began, seen = network(), threading.Event(), []
    middle = Back(lambda: seen.append(began.wait(20 if overlap else 0)))
    net = torch.nn.Sequential(layers[0], layers[1], middle, layers[2], layers[3])
    sync = attach(net, replicate=mesh_of(dp=2, tp=2)["dp"], unit_bytes=1, overlap=overlap)
    exchange = sync.reducer.exchange

    async def noted(unit):
        began.set()
        await exchange(unit)

    sync.reducer.exchange = noted
    net(torch.ones(8, 20) * dist.get_rank()).pow(2).mean().backward()
    assert seen == [overlap]
    sync.close()


@on_ranks(1)
@pytest.mark.parametrize("kind", ["plain", "FSDP2"])
def test_one_rank_and_a_forgotten_handle(kind):
    net, mesh = torch.nn.Linear(WIDTH, 2), mesh_of(dp=1, tp=1)
    if kind == "FSDP2":
        fully_shard(net, mesh=mesh["tp"])
    sync = attach(net, replicate=mesh["dp"])
    net(torch.ones(3, WIDTH)).sum().backward()
    assert (local_of(net.weight.grad) == 3).all()
    thread, alive = sync._engine._thread, weakref.ref(sync)
    del net, sync
    gc.collect()
    thread.join(timeout=10)
    assert alive() is None and not thread.is_alive()


@on_ranks(1)
@pytest.mark.parametrize("exchange", ["gradients", "updates"])
@pytest.mark.parametrize("algorithm", ["oktopk", "sparcml", "quantised"])
def test_one_rank_keeps_nothing_back(exchange, algorithm):
    """Nobody would receive what it selects or rounds."""
    models = DistributedDataParallel(network()), network()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in models]
    how, given = {"exchange": exchange}, algorithm
    if exchange == "updates":
        given = OuterStep(algorithm=algorithm, density=0.01, period=1)
    else:
        how["density"] = 0.01
    with (
        redirect_stderr(io.StringIO()) as said,
        sparsync.attach(models[0], optimizers[0], given, **how) as sync,
    ):
        for step in range(3):
            for net, optimizer in zip(models, optimizers, strict=True):
                net.zero_grad()
                x, y = batch(step)
                (net(x) - y).pow(2).mean().backward()
                optimizer.step()
        with sync.shared() if exchange == "updates" else nullcontext():
            torch.testing.assert_close(flat(models[0]), flat(models[1]))
        assert max(sync.stats()["residual_norm"]) == 0
    assert said.getvalue().count("there is only one replica") == 1


@on_ranks(1)
def test_a_closed_model_is_plain():
    net = torch.nn.Linear(WIDTH, 2)
    attach(net, replicate=mesh_of(dp=1, tp=1)["dp"]).close()
    net(torch.ones(3, WIDTH)).sum().backward()
    assert (net.weight.grad == 3).all()


@on_ranks(4)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_group_of_ranks_reads_once_what_attach_chose(kind):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(network(), process_group=pairs[dist.get_rank() // 2])
    with redirect_stderr(io.StringIO()) as said, sparsync.attach(ddp, kind(ddp.parameters())):
        pass
    assert gathered(said.getvalue().count("sparsync: exchanges ")) == [1, 0, 1, 0]


@on_ranks(4)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_world_is_refused_where_ddp_has_its_own(kind):
    """Averages would otherwise cross the borders of DDP's group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(network(), process_group=pairs[dist.get_rank() // 2])
    world = sparsync.Transport(world=dist.group.WORLD)
    with refused("Transport(world=...) is for models without DDP"):
        sparsync.attach(ddp, kind(ddp.parameters()), transport=world)
