"""Checkpoints that one rank cannot use, or that are each rank's own; importable for spawned processes."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import checkpoint
from tests.attaching import attach

from .small_model import batch, flat, model, train


def _refused(action: Any) -> str:
    try:
        action()
    except sparsync.SparsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_bad_file(folder: Path) -> dict[str, Any]:
    """A file that one rank refuses by itself: all raise at once, and nothing is changed."""
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "oktopk", density=0.1, timeout=30)
    train(ddp, range(2))
    saved = sparsync.save(sync, folder / "bad", model=ddp.module)
    if dist.get_rank() == 1:
        file = saved / "sparsync-rank-1-of-4.pt"
        state = torch.load(file, weights_only=True)
        state["residual"]["0.weight"][3] = torch.nan
        torch.save(state, file)
    dist.barrier()
    train(ddp, range(2, 4))
    weights, waiting, begin = flat(ddp), sync.state_dict()["residual"], time.monotonic()
    said = _refused(lambda: sparsync.load(sync, folder / "bad", model=ddp.module))
    quick = time.monotonic() - begin < 10
    same = torch.equal(weights, flat(ddp)) and sync.reducer.step == 4
    same &= all(torch.equal(waiting[n], v) for n, v in sync.state_dict()["residual"].items())
    train(ddp, range(4, 5))
    goes_on = sync.reducer.step == 5
    checkpoint._LATE = 0.2
    mine = folder / f"disk-of-{dist.get_rank()}"
    unshared = _refused(lambda: sparsync.save(sync, mine, model=ddp.module))
    left = list(mine.rglob("*"))
    shown = folder / "bad" if dist.get_rank() else folder / "nowhere"
    unseen = _refused(lambda: sparsync.load(sync, shown))
    sync.close()
    return {
        "said": said,
        "unshared": unshared,
        "unseen": unseen,
        "fine": quick and same and goes_on and not left,
    }


def local_updates(folder: Path) -> bool:
    """Every rank gets its own weights and moments back: the next exchanges have the same bits."""

    def make() -> Any:
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        local = sparsync.LocalUpdates(net, "allgather", density=0.1, optimizer=optimizer)
        return local, {"model": net, "optimizer": optimizer}

    def steps(local: Any, parts: Any, which: range) -> torch.Tensor:
        net, optimizer = parts.values()
        for step in which:
            x, y = batch(step)
            optimizer.zero_grad()
            (net(x) - y).pow(2).mean().backward()
            optimizer.step()
            local.step()
        return flat(net)

    local, parts = make()
    steps(local, parts, range(3))
    sparsync.save(local, folder / "local", epoch=2, **parts)
    through = steps(local, parts, range(3, 6))
    again, fresh = make()
    epoch = sparsync.load(again, folder / "local", **fresh)["epoch"]
    return torch.equal(through, steps(again, fresh, range(3, 6))) and epoch == 2


def everything(folder: str) -> dict[str, Any]:
    return {"local updates": local_updates(Path(folder)), **one_bad_file(Path(folder))}
