"""Rare situations of the DDP hook; importable, because processes are spawned."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.attaching import attach

from .small_model import flat, model, same_everywhere, train


class Odd(torch.nn.Module):
    """Has a parameter without elements and a 16-bit one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(20, 5)
        self.nothing = torch.nn.Parameter(torch.zeros(0))
        self.narrow = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.wide = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.narrow * self.wide.float() + self.nothing.sum()


def odd_parameters() -> dict[str, bool]:
    """Mixed dtypes and a parameter without elements train like any other."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Odd())
    sync = attach(ddp, "oktopk", density=0.2, timeout=30)
    before = [p.detach().clone() for p in ddp.parameters()]
    train(ddp, range(4))
    result = {
        f"{name} moved": not torch.equal(p, old)
        for (name, p), old in zip(ddp.module.named_parameters(), before, strict=True)
        if p.numel()
    }
    result["equal"] = all(same_everywhere(p.detach().float()) for p in ddp.parameters())
    sync.close()
    return result


def thawed_too_late() -> str:
    """A parameter that starts to need a gradient after attach is named."""
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "oktopk", density=0.1, timeout=30)
    del sync._place[next(ddp.parameters())]
    try:
        train(ddp, range(1))
    except sparsync.ConfigurationError as error:
        return str(error)
    return ""


def forgotten_handle_ends_its_thread() -> bool:
    """A model and handle that are dropped leave neither thread nor memory behind."""
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "oktopk", density=0.1, timeout=30)
    train(ddp, range(2))
    thread, alive = sync._engine._thread, weakref.ref(sync)
    del ddp, sync
    gc.collect()
    thread.join(timeout=10)
    return alive() is None and not thread.is_alive()


def states_of_different_steps() -> str:
    """Ranks that load checkpoints of different steps are told."""
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "oktopk", density=0.1, timeout=30)
    train(ddp, range(1))
    early = sync.state_dict()
    train(ddp, range(1, 2))
    late = sync.state_dict()
    try:
        sync.load_state_dict(early if dist.get_rank() == 0 else late)
    except sparsync.PeerError as error:
        return str(error)
    finally:
        sync.close()
        sync.close()  # closing twice is closing
    return ""


def the_planner_chooses() -> dict[str, bool]:
    """``auto`` calibrates the group, plans per unit, checks, and goes on from a saved state."""
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "auto", density=0.1, timeout=60, unit_bytes=2000, check_period=2, patience=1)
    train(ddp, range(7))
    choices, state = sync.stats()["choices"], sync.state_dict()
    choices_everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(choices_everywhere, choices)
    result = {
        "replicas equal": same_everywhere(flat(ddp)),
        "chosen alike": all(theirs == choices for theirs in choices_everywhere),
        "says why": len(choices) > 1 and all("measured over predicted" in text for text in choices),
    }
    sync.load_state_dict(state)
    train(ddp, range(7, 9))
    result["goes on"] = same_everywhere(flat(ddp)) and sync.stats()["steps"] == 9
    sync.close()
    return result
