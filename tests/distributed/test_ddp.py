"""``attach`` with DDP, on three ranks of gloo and ZeroMQ."""

import gc
import io
import json
import os
import time
import weakref
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import Correction
from sparsync.cli.launch import RankError, launch
from sparsync.errors import PeerError
from sparsync.gradients import runs, steps
from sparsync_papers.baseline_optimizers import UpdateSpaceSGD
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .small_model import (
    all_refuse_what_is_not_finite,
    attach,
    attached,
    backward,
    batch,
    ddp_model,
    flat,
    model,
    resumes_exactly,
    train,
)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "plain"])
def test_what_is_withheld_of_a_layer_does_not_move_it_once_it_is_frozen(kind):
    """Momentum and decay move every parameter that has a gradient."""
    net = model()
    wrapped = net if kind == "plain" else DistributedDataParallel(net, find_unused_parameters=True)
    where = {"replicate": dist.group.WORLD} if kind == "plain" else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with sparsync.attach(wrapped, optimizer, density=0.05, **where):
        for step in range(20):
            if step == 10:
                net[0].requires_grad_(False)
                before = net[0].weight.clone()
            optimizer.zero_grad()
            backward(wrapped, step)
            optimizer.step()
    assert torch.equal(net[0].weight, before)
    assert not torch.equal(net[2].weight, model()[2].weight)


class Gaps(torch.nn.Module):
    """A layer whose weight uses every third element of its memory, unlike DDP's gradients."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(9, 4).t()[:, ::3])

    def forward(self, x):
        return x @ self.weight


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_a_weight_with_gaps_has_its_own_gradient_residual_and_decay(options):
    torch.manual_seed(0)
    net, kept = Gaps(), torch.zeros(4, 3)
    ddp = DistributedDataParallel(net, **options)
    given = {"density": 0.25, "transport": "torch", "correction": Correction(weight_decay=0.1)}
    with attached(ddp, "allgather", **given) as sync:
        for _ in range(3):
            x = torch.randn(5, 4)
            net.zero_grad()
            ddp(x).square().sum().backward()
            accumulated = kept + 2 * x.t() @ x @ net.weight.detach() + 0.1 * net.weight.detach()
            kept = sync.state_dict()["content"]["reducer"]["residual"]["weight"].view(4, 3)
            assert net.weight.grad.count_nonzero() == 3
            torch.testing.assert_close(net.weight.grad + kept, accumulated)


class Square(torch.nn.Module):
    """A module with one weight that is too large to be joined with others."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 40_000))

    def forward(self, x):
        return x * self.weight.square().sum()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_strided_gradients_that_a_user_set_are_exchanged():
    net, kept = Square(), torch.zeros(40_000)
    with attached(
        net, "budgeted", density=0.5, transport="torch", replicate=dist.group.WORLD
    ) as sync:
        for step in range(3):
            net.weight.grad = own = torch.zeros(80_000)[::2]
            net(torch.tensor(step + 1.0)).backward()
            accumulated = kept + 2 * (step + 1) * net.weight.detach()
            kept = sync.state_dict()["content"]["reducer"]["residual"]["weight"].view(-1)
            assert not own.is_contiguous() and 0 < int(own.count_nonzero()) < len(own)
            torch.testing.assert_close(net.weight.grad + kept, accumulated)


@on_ranks(2)
def test_a_training_is_logged_and_goes_on_where_it_was_saved(folder):
    given = {"transport": "torch", "log": folder / "run.jsonl", "xi_period": 2}
    first = ddp_model()
    with attached(first, "budgeted", **given) as sync:
        for step in range(3):
            backward(first, step)
        saved = sync.state_dict()
    second = ddp_model()
    with attached(second, "budgeted", **given) as resumed:
        resumed.load_state_dict(saved)
        backward(second, 3)
    file = folder / f"run.rank{dist.get_rank()}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["xi" in line for line in lines] == [True, False, True, False]
    assert lines[-1]["density_local"] == pytest.approx(0.1, abs=0.01)
    assert lines[-1]["seconds_select"] > 0


@on_ranks(2)
def test_a_residual_that_grows_is_told_once():
    torch.manual_seed(0)
    taught, inputs = torch.nn.Linear(64, 8), torch.randn(90, 32, 64)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
    given = sparsync.Transport("torch")
    with (
        redirect_stderr(io.StringIO()) as said,
        sparsync.attach(ddp, optimizer, density=0.1, transport=given),
    ):
        for x in inputs:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), taught(x).detach()).backward()
            optimizer.step()
    assert said.getvalue().count("has grown fourfold") == (dist.get_rank() == 0)


@on_ranks(3)
def test_every_ddp_setting_gives_the_same_training():
    """With one unit, they agree bit for bit."""
    ends = []
    for options in (
        {},
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"static_graph": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
    ):
        ddp = ddp_model(**options)
        with attached(ddp):
            train(ddp, range(6))
        ends.append(flat(ddp))
        assert torch.equal(ends[-1], ends[0]), options
    assert same_everywhere(ends[0])


class Odd(torch.nn.Module):
    """A model with large and small parameters, an embedding with COO gradients, one in channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = (40, 50), (7,), (3, 2), (0,), (60, 40), (5,)
        self.parts = torch.nn.ParameterList(0.1 * torch.randn(shape) for shape in shapes)
        self.pixels = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.words = torch.nn.Embedding(30, 4, sparse=True)

    def forward(self, x):
        words = self.words(x[:, 0].abs().long())
        rest = sum((part * x[0, 0]).sin().sum() for part in self.parts)
        return self.pixels(x[:, :12].reshape(-1, 3, 2, 2)).sum() + words.sin().sum() + rest


@pytest.mark.parametrize("correction", [None, Correction(momentum=0.9, weight_decay=0.1)])
@on_ranks(2)
def test_joined_gradients_train_as_each_alone(correction):
    """Bit for bit, including a refused step."""
    ends, usual = [], runs._SMALL
    for small, view in ((0, False), (100, False), (100, True), (10_000, True)):
        runs._SMALL = small
        ddp = torch.nn.parallel.DistributedDataParallel(Odd(), gradient_as_bucket_view=view)
        settings = {"correction": correction, "nonfinite": "skip"}
        with attached(ddp, density=0.2, **settings) as sync:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                loss = ddp(batch(step)[0])
                (loss * (torch.nan if step == 3 and dist.get_rank() else 1)).backward()
                optimizer.step()
            assert sync.stats()["refused_exchanges"] == 1
        ends.append(flat(ddp))
        assert torch.equal(ends[-1], ends[0]), (small, view)
    runs._SMALL = usual
    assert same_everywhere(ends[0])


@on_ranks(3)
def test_resume_is_exact_with_other_buckets():
    def make(seed):
        ddp = ddp_model(seed, bucket_cap_mb=0.001 if seed else 25)
        return ddp, attach(ddp, threshold_period=4)

    resumes_exactly(make)


@on_ranks(3)
def test_nonfinite_gradients_are_refused_collectively():
    def make(**options):
        ddp = ddp_model(bucket_cap_mb=0.001)
        return ddp, attach(ddp, unit_bytes=1000, **options)

    def poison(ddp):
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        return ddp.register_forward_pre_hook(lambda module, inputs: inputs[0] * factor)

    all_refuse_what_is_not_finite(make, "0.weight", poison)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["dense", "oktopk"])
def test_training_is_refused_after_an_exchange_has_broken_off(algorithm):
    """DDP would otherwise fail in its own words, and ranks that train on would drift apart."""
    net = ddp_model()

    def failing(unit):
        raise PeerError("the other rank is gone")

    with attached(net, algorithm) as sync:
        train(net, range(2))
        before = flat(net)
        sync.reducer._select = failing
        with refused("the other rank is gone", error=PeerError):
            backward(net, 2)
        del sync.reducer._select
        words = f"rank {dist.get_rank()}: an earlier exchange broke off (the other rank is gone)"
        for _ in range(2):
            with refused(words):
                net(batch(3)[0])
        with torch.no_grad():
            net(batch(3)[0])
        assert torch.equal(flat(net), before)


@on_ranks(2)
def test_training_is_refused_after_a_comparison_has_broken_off():
    net, compare = ddp_model(), steps.check_replicas

    async def failing(*_):
        raise PeerError("the other rank is gone")

    with attached(net, sentinel=sparsync.Sentinel(period=1)) as sync:
        train(net, range(1))
        steps.check_replicas = failing
        try:
            with refused("the other rank is gone", error=PeerError):
                backward(net, 1)
        finally:
            steps.check_replicas = compare
        with refused("an earlier exchange broke off (the other rank is gone)"):
            net(batch(2)[0])
        assert sync.stats()["exchanges"] == 2


@on_ranks(2)
def test_training_may_go_on_after_replicas_differed():
    net = ddp_model()
    with attached(net, sentinel=sparsync.Sentinel(period=1)) as sync:
        bias = net.module[2].bias.clone()
        with torch.no_grad():
            net.module[2].bias += dist.get_rank()
        with refused("'2.bias' differs between rank 0 and rank 1", error=PeerError):
            backward(net, 0)
        with torch.no_grad():
            net.module[2].bias.copy_(bias)
        train(net, range(1, 3))
        assert sync.stats()["exchanges"] == 3


@on_ranks(3)
def test_a_forgotten_handle_ends_its_thread_and_its_sockets():
    files = []
    for _ in range(3):
        ddp = ddp_model()
        sync = attach(ddp)
        train(ddp, range(2))
        thread, alive = sync._engine._thread, weakref.ref(sync)
        del ddp, sync
        gc.collect()
        thread.join(timeout=10)
        assert alive() is None and not thread.is_alive()
        dist.barrier()
        files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert files[2] == files[0], "open files"


@pytest.mark.slow
@on_ranks(3)
def test_the_planner_chooses_alike_on_all_ranks():
    """``auto`` calibrates the group, plans per unit, checks, and continues from a saved state."""
    ddp = ddp_model()
    with attached(ddp, "auto", timeout=60, unit_bytes=2000, check_period=2, patience=1) as sync:
        train(ddp, range(7))
        choices, state = sync.stats()["choices"], sync.state_dict()
        assert gathered(choices) == [choices] * 3
        assert len(choices) > 1 and all("measured over predicted" in text for text in choices)
        sync.load_state_dict(state)
        train(ddp, range(7, 9))
        assert same_everywhere(flat(ddp)) and sync.stats()["exchanges"] == 9


@on_ranks(3)
def test_sparcml_trains_layer_by_layer():
    """Replicas stay equal with quantisation and a dense output layer."""
    ddp = ddp_model()
    options = {"block": 16, "compress": lambda name, parameter: not name.startswith("3.")}
    with attached(ddp, "sparcml", density=0.25, **options) as sync:
        train(ddp, range(6), torch.optim.SGD(ddp.parameters(), lr=0.02))
        stats = sync.stats()
    assert same_everywhere(flat(ddp))
    assert [unit["k"] == unit["size"] for unit in stats["units"]] == [False] * 4 + [True] * 2
    assert sum(stats["lost_norm"]) > 0


@on_ranks(3)
def test_momentum_correction_under_ddp():
    """At density 1, it equals torch's momentum."""
    settings = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    ddp, corrected = ddp_model(bucket_cap_mb=0.001), ddp_model(bucket_cap_mb=0.001)
    train(ddp, range(20), torch.optim.SGD(ddp.parameters(), lr=0.1, **settings))
    optimizer = torch.optim.SGD(corrected.parameters(), lr=0.1)
    correction = Correction(**settings, masking=False)
    options = {"density": 1.0, "compress_thd": 0, "fusion_bytes": 2000, "optimizer": optimizer}
    with attached(corrected, "redsync", correction=correction, **options):
        train(corrected, range(20), optimizer)
    assert torch.allclose(flat(ddp), flat(corrected), rtol=1e-4, atol=1e-5)


@on_ranks(3)
@pytest.mark.parametrize(
    ("algorithm", "clip_norm"), [("redsync", "this"), ("redsync-quantized", "previous")]
)
def test_corrections_resume_exactly(algorithm, clip_norm):
    syncs = []

    def make(seed):
        ddp = ddp_model(seed, bucket_cap_mb=25 if seed else 0.001)
        correction = Correction(0.9, weight_decay=0.01, clip=0.5, clip_norm=clip_norm)
        options = {"compress_thd": 200, "fusion_bytes": 2000}
        syncs.append(attach(ddp, algorithm, correction=correction, **options))
        return ddp, syncs[-1]

    resumes_exactly(make)
    stats = syncs[0].stats()
    assert {layer["method"] for layer in stats["layers"]} == {"dense", "trimmed"}
    stages = {"accumulate", "mask", "select", "pack", "communicate", "unpack"}
    assert {name for name, seconds in stats["stages"].items() if seconds > 0} == stages


@on_ranks(3)
def test_attach_refuses():
    other = dist.get_rank() % 2
    for words, changes in (
        (["'oktopq'", "allgather", "dense", "oktopk-paper"], {"algorithm": "oktopq"}),
        (["density is 0.0", "(0, 1]"], {"density": 0.0}),
        (["treshold_period", "threshold_period"], {"treshold_period": 3}),
        (["threshold_period is 0", "at least 1"], {"threshold_period": 0}),
        (["'ignore'", "raise, skip, propagate"], {"nonfinite": "ignore"}),
        (["timeout is inf", "10^6"], {"timeout": float("inf")}),
    ):
        with refused(*words):
            attach(ddp_model(), **changes)
    for words, changes in (
        (["options", "('cap', "], {"cap": 1.0 if other else None}),
        (["settings", "nonfinite="], {"nonfinite": "raise" if other else "skip"}),
        (["settings", "unit_bytes=100"], {"unit_bytes": 1000 + other}),
        (["density", "has 0.01, rank", "has 0.02"], {"density": 0.01 * (1 + other)}),
    ):
        with refused(*words, error=PeerError):
            attach(ddp_model(), **changes)
    ddp = ddp_model()
    with attached(ddp), refused("already", "freshly wrapped"):
        attach(ddp)


@on_ranks(3)
def test_update_space_is_algorithm_2():
    """The updates are those of Algorithm 2 to the letter, which a dense simulation here computes."""
    net = model()
    optimizer = UpdateSpaceSGD(net, lr=0.1, density=0.1, algorithm="allgather")
    reference, residual = model(), torch.zeros(flat(net).numel())
    k = optimizer.reducer.units[0].entries(0.1)
    for step in range(5):
        lr = 0.1 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = batch(step)
        for module in (net, reference):
            module.zero_grad()
            (module(x) - y).pow(2).mean().backward()
        optimizer.step()
        accumulated = residual + lr * torch.cat([p.grad.flatten() for p in reference.parameters()])
        chosen = accumulated.abs().topk(k).indices
        sent = torch.zeros_like(accumulated)
        sent[chosen] = accumulated[chosen]
        residual = accumulated - sent
        total = sum(gathered(sent))
        updated = flat(reference) - total / dist.get_world_size()
        torch.nn.utils.vector_to_parameters(updated, reference.parameters())
    assert torch.allclose(flat(net), flat(reference), atol=1e-7)
    assert same_everywhere(flat(net))


# ---- something is wrong with another rank ----------------------------------------------------------


def one_rank_is_missing(timeout):
    if dist.get_rank() == 1:
        time.sleep(2 * timeout)  # alive, and elsewhere
        return
    attach(torch.nn.Linear(4, 1), replicate=dist.group.WORLD, timeout=timeout)


def one_rank_dies_while_it_connects(timeout):
    ddp = ddp_model()
    if dist.get_rank() == 1:
        dist.new_group = lambda *given, **options: os._exit(7)
    attach(ddp, timeout=timeout)


def parameters_in_another_order(timeout):
    layers = [("a", torch.nn.Linear(4, 1)), ("b", torch.nn.Linear(2, 1))]
    net = torch.nn.ModuleDict(layers[:: 1 - 2 * dist.get_rank()])
    attach(net, replicate=dist.group.WORLD, timeout=timeout)


@pytest.mark.parametrize(
    ("program", "timeout", "words"),
    [
        (one_rank_is_missing, 1, "DeadlineError: rank 0, phase 'attach': no word from rank 1 within 1"),
        (one_rank_dies_while_it_connects, 2, "PeerError: rank 0, phase 'attach': gloo could not connect"),
        (parameters_in_another_order, 20, "DisagreementError: ranks disagree on the parameters"),
    ],
)  # fmt: skip
def test_attach_names_what_is_wrong_with_another_rank(program, timeout, words):
    with pytest.raises(RankError) as caught:
        launch(program, 2, timeout, timeout=60.0)
    assert words in str(caught.value).splitlines()[0]


@on_ranks(3)
def test_attaching_often_leaves_no_groups_and_no_files():
    """The handles belong to a subset of the world, whose groups the other ranks do not create."""
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    groups, files = set(), []
    for _ in range(12):
        net = torch.nn.Linear(4, 1)
        with attach(net, replicate=alone, world=alone, timeout=10, transport="torch"):
            net(torch.ones(3, 4)).sum().backward()
        groups.add(len(dist.distributed_c10d._world.pg_map))
        files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len(groups) == 1
    assert files[-1] <= files[1] + 4, "gloo may close its sockets a moment later"
