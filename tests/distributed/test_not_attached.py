"""With ``SPARSYNC_DISABLE=1``, DDP trains as if it were not attached, and the handle's methods work."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.on_ranks import on_ranks, refused

from .small_model import flat, model

pytestmark = pytest.mark.gloo


def trained(*, attached: bool, optimizer_given: bool) -> tuple[torch.Tensor, object]:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    sync = None
    if attached:
        sync = sparsync.attach(ddp, optimizer if optimizer_given else None)
    alone = ddp.no_sync if sync is None else sync.no_sync
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        for last in (False, True):  # accumulation: two batches per step
            with nullcontext() if last else alone():
                ddp(torch.randn(3, next(ddp.parameters()).shape[1])).square().sum().backward()
        optimizer.step()
    return flat(ddp), (ddp, optimizer, sync)


@on_ranks(2)
def test_ddp_is_left_as_it_is_and_every_method_works(folder):
    plain, _ = trained(attached=False, optimizer_given=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPARSYNC_DISABLE", "1")
        for given in (True, False):
            weights, (ddp, optimizer, sync) = trained(attached=True, optimizer_given=given)
            assert torch.equal(weights, plain)
            assert not ddp._comm_hooks and sync.steps == 4 and sync.stats()["local_steps"] == 4
            assert (
                sync.stats()["exchange"] == "none" and sync.stats()["bytes_sent_last_exchange"] == 0
            )
            with sync.shared():
                assert torch.equal(flat(ddp), plain)
            with sync.no_sync():
                assert not ddp.require_backward_grad_sync
            sync.contribute(samples=3)
            sync.step()
            sync.finish()
            own = folder / str(given)
            saved = sparsync.save(sync, own, model=ddp, optimizer=optimizer, epoch=2)
            assert saved.name.endswith("step-00000004")
            sync.load_state_dict(sync.state_dict())
            assert sparsync.load(sync, own, model=ddp, optimizer=optimizer) == {"epoch": 2}
            assert sync.steps == 4
            sync.close()
            assert sync.closed and torch.equal(flat(ddp), plain)
        with refused("SPARSYNC_DISABLE=1: attaches nothing, but Linear is not a Distributed"):
            sparsync.attach(torch.nn.Linear(2, 1), exchange="updates")
        with refused("replicate= has no dense exchange of its own"):
            sparsync.attach(torch.nn.Linear(2, 1), replicate=dist.group.WORLD)
        patched.setenv("SPARSYNC_DISABLE", "yes")
        with refused("SPARSYNC_DISABLE is 'yes'; give 1 for plain DDP, or 0 to attach"):
            sparsync.attach(DistributedDataParallel(model()))
