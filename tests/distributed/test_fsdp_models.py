"""What models do behind the hooks' back: plain, as four replicas, and sharded, 2 replicas x 2 shards."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from sparsync import Correction
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from . import small_model
from .small_model import flat, flat_gradient, whole
from .test_fsdp import attach, grid

EVERYTHING = {"algorithm": "allgather", "density": 1.0}


class Branches(torch.nn.Module):
    """``rare`` need not run, ``never`` does not; of ``rare`` only the first rows have gradients."""

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


KINDS = pytest.mark.parametrize("kind", ["plain", "FSDP2"])


@on_ranks(4)
@KINDS
def test_gradients_are_everywhere_or_nowhere(kind):
    """Used on one rank, or delivered in one shard: the others have zeros, not None; decay agrees."""
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
    """And the next pass of those who have some is whole."""
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
@pytest.mark.parametrize("parts", ["b", "c", "abc"])
def test_reentrant_checkpoints_are_refused(parts):
    """In the middle, at the end (its backward pass opens the step), everywhere."""
    net = Checkpointed(parts)
    sync = small_model.attach(net, replicate=dist.group.WORLD, **EVERYTHING)
    with refused("inside another", "use_reentrant=False"):
        step_of(net, 0)
    assert sync.stats()["steps"] == 0
    net.parts = ""
    net.zero_grad()
    step_of(net, 1)
    assert sync.stats()["steps"] == 1
    assert same_everywhere(flat_gradient(net))
    sync.close()


@on_ranks(4)
@KINDS
def test_averages_that_are_left_are_refused(kind):
    """With momentum in the correction they must not come in as gradients; zeros and sums may."""
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
@pytest.mark.parametrize("when", ["at once", "later", "plain"])
def test_thawed_parameters_are_refused(when):
    """Before the first forward pass, later, and next to what FSDP2 has."""
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
    assert sync.stats()["steps"] == 1
    sync.close()


@on_ranks(4)
def test_a_partly_sharded_model_is_refused():
    mesh, net = grid(), Branches()
    fully_shard(net.often, mesh=mesh["shard"])
    with refused("'rare.weight' is not sharded by FSDP2", "fully_shard on the whole"):
        attach(net, mesh)
