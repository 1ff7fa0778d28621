"""Measure the device memory per parameter of exchanged updates, on the stand-in for a GPU."""

import pytest
import torch
from torch import nn

import sparsync
from sparsync import sparse
from sparsync.collectives import quantised
from sparsync.updates import OuterStep, gradient_noise
from tests.attaching import ONE_BIT
from tests.on_ranks import on_ranks
from tests.unit.far_device import FAR, far, far_device, memory

WIDTH, LAYERS = 256, 4  # 263,000 parameters; temporaries are of a layer's size
RUN = 1 << 12  # elements: as short beside this model as a run is beside a large one


def model():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in net:
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(far(p)))
    return net


def peak(attached):
    """Return the largest number of floats per parameter that a training held, and its weights."""
    before = memory.now
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    sync = None if attached is None else sparsync.attach(net, optimizer, **attached)
    memory.reset()
    for step in range(4):
        optimizer.zero_grad()
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        net(rows.to(FAR)).square().mean().backward()
        optimizer.step()
    most = memory.most - before
    if sync is not None:
        with sync.shared():
            pass
        if attached["compression"].offload:
            assert memory.most - before <= most, "an evaluation takes more than a step"
        sync.finish()
        sync.close()
    size = sum(p.numel() for p in net.parameters())
    return most / 4 / size, torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


def floats_over_training(**given):
    """Return the floats that attach adds and the final weights, for each setting of ``offload``."""
    with pytest.MonkeyPatch.context() as patch, far_device():
        for module in sparse, quantised, gradient_noise:
            patch.setattr(module, "run_length", lambda like: RUN)
        alone, _ = peak(None)
        over, weights = {}, {}
        for asked in (False, None, True):
            compression = sparsync.Compression(offload=asked)
            most, weights[asked] = peak({**given, "compression": compression})
            over[asked] = most - alone
    print(f"floats per parameter over training alone, by offload=: {over}")
    assert torch.equal(weights[None], weights[False]) and torch.equal(weights[True], weights[False])
    return over


@pytest.mark.slow
@on_ranks(2)
def test_updates_take_a_float_per_parameter_of_the_device_and_none_if_offloaded():
    over = floats_over_training(algorithm=OuterStep(**ONE_BIT))
    assert over[None] <= 1.25 and over[True] <= 0.15, over
    assert over[False] <= 2.25, over


@pytest.mark.slow
@on_ranks(2)
def test_late_exchanges_and_their_momentum_may_be_offloaded():
    outer = OuterStep(algorithm="quantised", period=2, delay=1, momentum=0.5)
    over = floats_over_training(algorithm=outer)
    assert over[True] <= 0.15, over
