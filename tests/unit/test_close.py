"""``close()`` leaves a model that trains as if nothing had been attached."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync import ConfigurationError
from tests.attaching import attach


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward_twice(model):
    loss = model(torch.ones(3, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_closed_model_trains_as_plain_ddp(alone):
    plain = torch.nn.Linear(4, 1)
    net = DistributedDataParallel(plain)
    with attach(net, density=0.1, transport="torch") as sync:
        net(torch.ones(3, 4)).sum().backward()
        with pytest.raises(ConfigurationError, match="a second backward pass"):
            backward_twice(net)
    plain.zero_grad()
    again = DistributedDataParallel(plain)  # while the old one lives
    backward_twice(again)
    assert plain.weight.grad.tolist() == [[6.0] * 4]
    plain.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    assert plain.weight.grad.tolist() == [[3.0] * 4]
    with attach(net, density=0.5, transport="torch"):
        net(torch.ones(3, 4)).sum().backward()
    assert sync.stats()["steps"] >= 1


def test_handles_that_are_dropped_leave_no_open_files(alone):
    counts = []
    for _ in range(4):
        net = DistributedDataParallel(torch.nn.Linear(4, 1))
        attach(net, density=0.1, transport="torch")
        net(torch.ones(3, 4)).sum().backward()
        del net
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[-1] == counts[0]


class TwoLosses(torch.nn.Module):
    """Runs two backward passes within its forward pass, as Lightning's manual optimization does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(600, 600) for _ in range(2))  # a bucket each

    def forward(self, net, x):
        for child in (self.second, self.first):  # the first bucket is unused by the last pass
            loss = child(x).sum()
            net().reducer.prepare_for_backward([loss])
            loss.backward()
        net().require_backward_grad_sync = False


def test_two_backward_passes_within_a_forward_pass_are_two_steps(alone):
    both = TwoLosses()
    net = DistributedDataParallel(both, find_unused_parameters=True)
    with attach(net, density=1.0, transport="torch") as sync:
        for _ in range(2):
            net(lambda: net, torch.ones(1, 600))
            net.require_backward_grad_sync = True
        assert sync.stats()["steps"] == 4
    assert both.first.bias.grad.tolist() == [2.0] * 600
