"""What `attach` does where no common training tells it: each function is the proof of a cell."""

from __future__ import annotations

import copy
import io
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import sparsync

from .training import (
    SPARSE,
    STEPS,
    TIMEOUT,
    Case,
    added,
    assert_close,
    assert_equal_on_all_ranks,
    everywhere,
    gradients,
    local_gradients,
    mean_square,
    network,
    sgd,
    weights,
)


@contextmanager
def refused(*words: str, error: type[Exception] = sparsync.ConfigurationError) -> Any:
    """Assert that an error comes, in one line, with these words."""
    try:
        yield
    except error as caught:
        said = str(caught)
        assert all(word in said for word in words), said
        assert "\n" not in said, said
        return
    raise AssertionError("nothing was refused")


def attached(model: nn.Module, density: float = 1.0, **options: Any) -> tuple[Ddp, Any]:
    ddp = Ddp(model, **options.pop("ddp", {}))
    return ddp, sparsync.attach(ddp, "allgather", density=density, timeout=TIMEOUT, **options)


def here() -> int:
    return dist.get_rank()


# ---- mixed precision --------------------------------------------------------------------------------


def scaler_skips_on_all() -> None:
    """An overflow on one rank: no rank steps, every scale falls, residuals stay."""
    ddp, sync = attached(network(), SPARSE, nonfinite="propagate")
    optimizer, scaler = sgd(ddp.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        before, kept = weights(ddp), sync.state_dict()["residual"]
        optimizer.zero_grad()
        loss = mean_square(ddp, step, here())
        broken = step == 2
        scaler.scale(loss * float("inf") if broken and here() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        moved = any(not torch.equal(w, before[n]) for n, w in weights(ddp).items())
        assert moved == (not broken)
        if broken:
            after = sync.state_dict()["residual"]
            assert after.keys() == kept.keys() and kept
            assert all(torch.equal(after[n], kept[n]) for n in kept)
    assert_equal_on_all_ranks(weights(ddp))
    assert all(bool(w.isfinite().all()) for w in weights(ddp).values())
    sync.close()


def scaler_needs_propagate() -> None:
    """With the other policies an overflow raises, on all ranks: ours, or torch's when it would skip."""
    for policy, error, words in (
        ("raise", sparsync.NonFiniteGradientError, "(with a GradScaler: scaler=)"),
        ("skip", AssertionError, "No inf checks were recorded for this optimizer"),
    ):
        ddp, sync = attached(network(), nonfinite=policy)
        optimizer, scaler = sgd(ddp.parameters()), torch.amp.GradScaler("cpu")
        before = weights(ddp)
        with refused(words, error=error):
            factor = float("inf") if here() == 1 else 1.0
            scaler.scale(mean_square(ddp, 0, here()) * factor).backward()
            scaler.step(optimizer)
        assert_close(weights(ddp), before, 0.0, "after the refusal")
        sync.close()


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def float16_does_not_overflow() -> None:
    """A residual that has outgrown float16 is not delivered as infinity."""
    ddp, sync = attached(Many(), 0.1)
    x = torch.full((10,), 30_000.0, dtype=torch.float16)
    ddp(x).backward()
    with refused("NaN or Inf", "float16: > 65504", error=sparsync.NonFiniteGradientError):
        for _ in range(5):
            ddp.zero_grad()
            ddp(x).backward()
    sync.close()


# ---- models that change, or are copied --------------------------------------------------------------


def changed_models_are_refused() -> None:
    """Thawed, frozen, replaced or added: the forward pass names the parameter, before any gradient."""

    def thaw(net: Any) -> None:
        net[0].weight.requires_grad_(True)

    def freeze(net: Any) -> None:
        net[2].bias.requires_grad_(False)

    def replace(net: Any) -> None:
        net[3] = nn.Linear(30, 5)

    def add(net: Any) -> None:
        net.append(nn.Linear(5, 5))

    for change, name in ((thaw, "0.weight"), (freeze, "2.bias"), (replace, "3."), (add, "4.")):
        net: Any = network()
        net[0].weight.requires_grad_(False)
        ddp, sync = attached(net)
        mean_square(ddp, 0, here()).backward()
        change(net)
        with refused(f"'{name}"):
            mean_square(ddp, 1, here())
        sync.close()
    ddp, sync = attached(network())
    ddp.module = network()
    with refused("'0.weight' trains now"):
        mean_square(ddp, 0, here())
    sync.close()


def frozen_for_a_while() -> None:
    """All frozen (as GANs do in turns), or some under ``find_unused_parameters``: works."""
    ddp, sync = attached(network())
    ddp.requires_grad_(False)
    x = torch.ones(2, 20, requires_grad=True)
    ddp(x).sum().backward()
    ddp.requires_grad_(True)
    mean_square(ddp, 0, here()).backward()
    assert_equal_on_all_ranks(gradients(ddp))
    sync.close()
    net: Any = network()
    ddp, sync = attached(net, ddp={"find_unused_parameters": True})
    net[0].weight.requires_grad_(False)
    twin: Any = network()
    twin[0].weight.requires_grad_(False)
    mean_square(ddp, 0, here()).backward()
    mine = local_gradients(Case(), twin, 0, here())
    mean = added((1 / dist.get_world_size(), everywhere(mine)))
    assert_close(gradients(net), mean, 1e-6, "with a frozen layer")
    sync.close()


def copies_are_refused() -> None:
    """A copy would train without the exchange; of the plain module it is free."""
    ddp, sync = attached(network())
    mean_square(ddp, 0, here()).backward()
    for copying in (
        lambda: copy.deepcopy(ddp),
        lambda: torch.save(ddp, io.BytesIO()),
        lambda: torch.optim.swa_utils.AveragedModel(ddp),
    ):
        with refused("cannot be copied or pickled", "model.module"):
            copying()
    torch.save(ddp.module, io.BytesIO())
    mean_square(copy.deepcopy(ddp.module), 1, here()).backward()  # trains alone: no hook came along
    sync.close()


def average_of_weights() -> None:
    """EMA of the plain module: equal on all ranks, and that of one process."""
    ddp, sync = attached(network())
    optimizer = sgd(ddp.parameters())
    ema = torch.optim.swa_utils.AveragedModel(
        ddp.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    by_hand = None
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(ddp, step, here()).backward()
        optimizer.step()
        ema.update_parameters(ddp.module)
        now = weights(ddp.module)
        by_hand = now if by_hand is None else added((0.5, by_hand), (0.5, now))
    assert by_hand is not None
    assert_equal_on_all_ranks(weights(ema))
    assert_close(weights(ema.module), by_hand, 1e-6, "EMA")
    sync.close()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def buffers_are_those_of_rank_0() -> None:
    """DDP sends rank 0's BatchNorm statistics before every forward pass, as without the hook."""
    ends = []
    for hooked in (True, False):
        ddp, sync = attached(Normed()) if hooked else (Ddp(Normed()), None)
        optimizer = sgd(ddp.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            mean_square(ddp, step, here()).backward()
            optimizer.step()
        ddp.eval()
        ddp(torch.zeros(1, 20))  # brings the last statistics
        ends.append({n: b.double() for n, b in ddp.module.named_buffers()} | weights(ddp.module))
        if sync is not None:
            sync.close()
    assert_equal_on_all_ranks({n: v for n, v in ends[0].items() if "running" not in n})
    assert_close(*ends, 1e-6, "against plain DDP")
