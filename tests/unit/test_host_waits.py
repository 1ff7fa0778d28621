"""Compare the host's waits for a device, counted on a stand-in, with ``docs/kernels.md``."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsync.feedback.reducer import Reducer
from sparsync.presets import PRESETS, resolve
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit

from .far_device import FAR, far, far_device, waits

ROOT = Path(__file__).parents[2]
SIZE, RANKS, STEPS, FIRST = 4_096, 2, 8, 4
ROW = re.compile(r"^\| `([\w-]+)` \| (\d+\.\d) \|", re.MULTILINE)


def noise(rank, step):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def of_gradients(name):
    """Return the waits per rank, step and unit, after thresholds have settled."""
    counts = []

    async def program(comm):
        unit = Unit((Slot("all", 0, SIZE),), torch.float32, FAR)
        reducer = Reducer(comm, [unit], resolve(name), 0.05)
        for step in range(STEPS):
            gradient = noise(comm.rank, step).to(FAR)
            await reducer.reduce([gradient])
            if comm.rank == 0:
                counts.append(waits.total())

    waits.clear()
    with far_device():
        simulate(program, RANKS)
    return (counts[-1] - counts[FIRST - 1]) / (STEPS - FIRST) / RANKS


def of_updates(monkeypatch):
    """Return the waits per rank and step with AdamW's default, in all parts of a step."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from virtual_updates import ONE_BIT, train_updates

    def make_model():
        model = nn.Linear(SIZE // 4, 4, bias=False)
        model.weight = nn.Parameter(far(torch.ones_like(model.weight)))
        return model

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), foreach=False)

    def loss_of(model, step, rank):
        inputs = noise(rank, step)[: SIZE // 4].unsqueeze(0).to(FAR)
        return model(inputs).square().sum()

    counts = []
    settings = {**ONE_BIT, "warmup_steps": 0}
    clipped = torch.nn.utils.clip_grad_norm_
    # clipping belongs to the user's loop
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    with far_device():
        for steps in (FIRST, STEPS):
            waits.clear()
            given = make_model, make_optimizer, loss_of, lambda _: 1e-3, steps
            train_updates(*given, ranks=RANKS, settings=settings)
            counts.append(Counter(waits))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    more = counts[1] - counts[0]
    return more.total() / (STEPS - FIRST) / RANKS, more


@cache
def documented():
    text = (ROOT / "docs" / "kernels.md").read_text()
    return {name: float(number) for name, number in ROW.findall(text)}


def test_what_makes_the_host_wait_is_counted():
    with far_device():
        there = noise(0, 0).to(FAR)
        waits.clear()
        doubled = 2 * there + there
        doubled.to("cpu", non_blocking=True)
        there.copy_(noise(0, 1), non_blocking=True)
        there.copy_(doubled)
        assert waits.total() == 0
        doubled.sum().item()
        assert bool((doubled > 0).any())
        doubled.cpu()
        there.copy_(noise(0, 1))
        doubled[doubled > 0]
        torch.nonzero(doubled)
        doubled[:2].tolist()
    once = "copy to the host", "copy to the device", "index by a mask", "nonzero", "tolist"
    assert waits == {"_local_scalar_dense": 2, **dict.fromkeys(once, 1)}


@pytest.mark.fast(10)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_host_waits_as_often_as_is_documented(name):
    assert documented()[name] == pytest.approx(of_gradients(name), abs=0.051)


def test_the_host_waits_for_updates_as_often_as_is_documented(monkeypatch):
    found, kinds = of_updates(monkeypatch)
    assert documented()["updates"] == pytest.approx(found, abs=0.051), kinds
