"""Save and load the state of a handle by torch.distributed.checkpoint."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves_with_path

import sparsync
from sparsync.checkpoint.distributed import DistributedState
from sparsync.errors import CheckpointError
from sparsync.updates import OuterStep
from tests.on_ranks import on_ranks, refused

from .small_model import flat, model
from .test_update_checkpoints import net_of, steps

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
LATE = {"fragments": 2, "delay": 1, "density": 0.1, "period": 3, "momentum": 0.9}


def attached(kind, exchange, ranks=4, seed=0, momentum=0.0):
    """Attach on all ranks, or on groups of fewer."""
    net, where = net_of(kind, seed)
    if ranks < 4:
        group = runs_of(ranks)
        net = torch.nn.parallel.DistributedDataParallel(model(seed), process_group=group)
    if exchange == "gradients":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
        return net, optimizer, sparsync.attach(net, optimizer, density=0.1, **where)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    outer = OuterStep(**LATE) if exchange == "late" else None
    return net, optimizer, sparsync.attach(net, optimizer, outer, exchange="updates", **where)


def runs_of(ranks):
    """Return this rank's group of this size."""
    runs = [dist.new_group(range(at, at + ranks)) for at in range(0, 4, ranks)]
    return runs[dist.get_rank() // ranks]


def assert_same(one, other):
    for (path, mine), (_, its) in zip(
        tree_leaves_with_path(one), tree_leaves_with_path(other), strict=True
    ):
        equal = torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        assert equal, path


@on_ranks(4)
@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("kind", "exchange", "how"),
    [
        ("ddp", "gradients", "load"),
        ("fsdp", "updates", "load"),
        ("plain", "updates", "load"),
        *(
            pytest.param(*row, "load", marks=pytest.mark.slow)
            for row in (
                ("ddp", "updates"),
                ("ddp", "late"),
                ("fsdp", "gradients"),
                ("fsdp", "late"),
            )
        ),
        # writing in the background and reading alone depend on the exchange, and not on both
        ("ddp", "gradients", "async"),
        pytest.param("ddp", "late", "async", marks=pytest.mark.slow),
        pytest.param("fsdp", "updates", "async", marks=pytest.mark.slow),
        pytest.param("fsdp", "gradients", "read", marks=pytest.mark.slow),
        ("fsdp", "late", "read"),
        pytest.param("plain", "updates", "read", marks=pytest.mark.slow),
    ],
)
def test_resuming_is_exact(kind, exchange, how, folder):
    """Resuming is also exact in a handle that has not stepped, and whose optimizer has no moments."""
    net, optimizer, sync = attached(kind, exchange)
    with sync:
        steps(net, optimizer, range(5))
        state = {"model": net.state_dict(), "sync": DistributedState(sync)}
        if how == "async":
            writing = dcp.async_save(state, checkpoint_id=folder)
            ends = [steps(net, optimizer, range(5, 9))]
            writing.result()
        else:
            dcp.save(state, checkpoint_id=folder)
            ends = [steps(net, optimizer, range(5, 9))]
        sync.finish()
        ends.append(flat(net))
    net, optimizer, sync = attached(kind, exchange, seed=7)
    with sync:
        weights = net.state_dict()
        if how == "read":
            dcp.load({"model": weights}, checkpoint_id=folder)
            net.load_state_dict(weights)
            DistributedState(sync).read(folder)
        else:
            dcp.load({"model": weights, "sync": DistributedState(sync)}, checkpoint_id=folder)
        assert torch.equal(ends[0], steps(net, optimizer, range(5, 9)))
        sync.finish()
        assert torch.equal(ends[1], flat(net))


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("ddp", "gradients"),
        pytest.param("fsdp", "gradients", marks=pytest.mark.slow),
        ("ddp", "late"),
        pytest.param("fsdp", "late", marks=pytest.mark.slow),
    ],
)
def test_the_code_on_the_page_resumes_exactly(kind, exchange, folder):
    """New optimizers, which have no moments, get those that were saved."""
    section = PAGE.partition("\n## torch.distributed.checkpoint")[2].partition("\n## ")[0]
    gradients, updates = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    imports = gradients.partition("\n\n")[0]
    *built, saves, loads = (gradients if exchange == "gradients" else updates).split("\n\n")
    ends = []
    for seed, code in ((0, saves), (7, loads)):
        net, optimizer, sync = attached(kind, exchange, seed=seed, momentum=0.9)
        with sync:
            if seed == 0:
                steps(net, optimizer, range(5))
            names = {"model": net, "optimizer": optimizer, "sync": sync, "path": folder}
            exec("\n".join([imports, *built, code]), names)
            ends.append(steps(net, optimizer, range(5, 9)))
    assert torch.equal(*ends)


@on_ranks(4)
def test_an_optimizer_that_dcp_loads_after_the_handle_is_refused(folder):
    """DCP loads in alphabetical order, so rank 0's moments replace those of each rank."""
    ends = []
    for seed in (0, 7):
        net, optimizer, sync = attached("ddp", "updates", seed=seed)
        own = {"handle": DistributedState(sync)}
        state = {"net": net, "optimizer": optimizer, **own}
        with sync:
            if seed == 0:
                steps(net, optimizer, range(5))
                dcp.save(state, checkpoint_id=folder)
            else:
                dcp.load(state, checkpoint_id=folder)
                for _ in range(2):
                    with refused("AdamW was replaced after the handle had loaded", "leave it out"):
                        steps(net, optimizer, range(5, 6))
                dcp.load(own, checkpoint_id=folder)
            ends.append(steps(net, optimizer, range(5, 9)))
    assert torch.equal(*ends)


@on_ranks(4)
@pytest.mark.parametrize("exchange", [pytest.param("gradients", marks=pytest.mark.slow), "late"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("ddp", 4), ("ddp", 2), marks=pytest.mark.slow),
        (("ddp", 2), ("ddp", 4)),
        (("ddp", 4), ("fsdp", 4)),
        pytest.param(("fsdp", 4), ("ddp", 4), marks=pytest.mark.slow),
    ],
)
def test_other_ranks_and_shards_get_what_load_gives_them(before, after, exchange, folder):
    kind, ranks = before
    if ranks < 4 and torch.__version__ < "2.9":
        pytest.skip("torch 2.9 is the first whose dcp.save takes a group without rank 0")
    net, optimizer, sync = attached(kind, exchange, ranks)
    own = str(dist.get_rank() // ranks)
    with sync:
        steps(net, optimizer, range(5))
        sparsync.save(sync, folder / "files" / own)
        group = runs_of(ranks)
        dcp.save({"sync": DistributedState(sync)}, checkpoint_id=folder / own, process_group=group)
    dist.barrier()
    kind, ranks = after
    net, optimizer, sync = attached(kind, exchange, ranks)
    with sync:
        sparsync.load(sync, folder / "files" / "0")
        expected = sync.state_dict()
    net, optimizer, sync = attached(kind, exchange, ranks)
    with sync:
        DistributedState(sync).read(folder / "0")
        assert_same(sync.state_dict(), expected)
        steps(net, optimizer, range(2))


@on_ranks(4)
def test_what_does_not_fit_is_refused_on_all_ranks(folder):
    net, optimizer, sync = attached("ddp", "gradients")
    with sync:
        steps(net, optimizer, range(2))
        dcp.save({"a": DistributedState(sync), "b": DistributedState(sync)}, checkpoint_id=folder)
        before = sync.state_dict()
        with refused("has states of several handles; save each on its own", error=CheckpointError):
            DistributedState(sync).read(folder)
        with refused("list", error=CheckpointError):
            DistributedState(sync).read(folder / "nothing")
        dcp.save({"sync": sync}, checkpoint_id=folder / "bare")
        with refused("has the states of 0 ranks", error=CheckpointError):
            DistributedState(sync).read(folder / "bare")
        assert_same(before, sync.state_dict())
    net, optimizer, sync = attached("ddp", "updates")
    with sync:
        dcp.save({"sync": DistributedState(sync)}, checkpoint_id=folder / "updates")
    net, optimizer, sync = attached("ddp", "gradients")
    with sync, refused("the saved state['kind'] is 'updates', expected 'gradients'; it belongs in"):
        DistributedState(sync).read(folder / "updates")
