"""Averagers on models: what travels and what stays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsync.averaging.base import mean
from sparsync.averaging.schemes import SCHEMES

from .averager_models import Smoothed, add_, linear, train_
from .zmq_group import together

allreduce = SCHEMES["allreduce"]


@settings(max_examples=8)
@given(
    dtypes=st.lists(
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
        min_size=1,
        max_size=4,
    ),
    last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parameters_are_averaged_in_place_whatever_their_dtypes_and_strides(dtypes, last, seed):
    def program(comm):
        generator = torch.Generator().manual_seed(seed)
        model = nn.ParameterList(
            torch.randint(-9, 9, (2, 3, 2, 2), generator=generator).to(dtype) for dtype in dtypes
        )
        if last:
            model.to(memory_format=torch.channels_last)
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model]
        start = [p.detach().clone() for p in model]
        averager = allreduce(model, comm=comm)
        add_(model, 2 * comm.rank)
        averager.step()
        for p, value, (own, *layout) in zip(model, start, kept, strict=True):
            assert p is own
            assert [p.data_ptr(), p.dtype, p.stride()] == layout
            assert torch.equal(p, value + 1)
        return averager._binding.read().dtype

    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    assert together(program, 2) == [wide, wide]


def test_complex_parameters_travel_and_tied_ones_once():
    def program(comm):
        model = nn.ModuleList([linear(), linear()])
        model[1].weight = model[0].weight
        model.spectrum = nn.Parameter(torch.tensor([1 + 2j]))
        averager = allreduce(model, comm=comm)
        size = averager._binding.read().numel()
        with torch.no_grad():
            model.spectrum += 2j * comm.rank
            model[0].weight += 2 * comm.rank
        averager.step()
        assert torch.equal(model[1].weight, linear().weight + 1)
        return size, model.spectrum.item()

    assert together(program, 2) == [(2 + 1 + 1 + 2, 1 + 3j)] * 2


def test_frozen_parameters_stay_and_are_settled_only_where_they_differ():
    rounds = 1.5 + 2**-22
    assert float(torch.tensor([rounds] * 3).mean()) != rounds  # so an average would be seen

    def program(comm):
        model = nn.ModuleList([linear(), linear(1), linear(2)])
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        nn.init.constant_(model[0].weight, rounds)
        averager = allreduce(model, comm=comm)
        add_(model, 1.0)
        averager.step()
        assert averager._binding.read().numel() == 3
        with torch.no_grad():  # as a teacher that follows
            model[1].weight.fill_(comm.rank)
        averager.finish()
        assert float(model[0].weight[0, 0]) == rounds
        return model[1].weight.tolist()

    assert together(program, 3) == [[[1.0, 1.0]]] * 3


@pytest.mark.parametrize("rule", ["average", "local"])
def test_buffers_follow_their_rule(rule):
    def program(comm):
        model = nn.BatchNorm1d(1, momentum=1.0)
        model.register_buffer("table", torch.tensor([-torch.inf]), persistent=False)
        averager = allreduce(model, comm=comm, buffers=rule)
        for _ in range(comm.rank + 1):
            model(torch.full((4, 1), 2.0 * comm.rank))
        model.table = torch.tensor([float(comm.rank)])
        averager.step()
        model.running_mean = model.running_mean.clone()  # modules may replace their buffers
        between = float(model.running_mean), int(model.num_batches_tracked)
        averager.finish()
        return between, (float(model.running_mean), int(model.num_batches_tracked)), model.table

    (low, end_low, _), (high, end_high, table) = together(program, 2)
    assert (low, high) == (((1.0, 1), (1.0, 2)) if rule == "average" else ((0.0, 1), (2.0, 2)))
    assert end_low == end_high == (1.0, 1)  # the mean; batches as rank 0 counts them
    assert table == 1  # what is not saved is never touched


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("local", [[0.1, 1, 0, 0], [0.2, 1, 0.1, 1]]),
        ("average", [[0.15, 1, 0, 0], [0.15, 1, 0.05, 1]]),
        ("reset", [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_moments_stay_or_travel_or_are_reset(rule, expected):
    def program(comm):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters())
        averager = allreduce(model, comm=comm, optimizer=optimizer, moments=rule)
        ((comm.rank + 1) * model.weight).sum().backward()
        if comm.rank:
            model.bias.sum().backward()  # rank 0 has no state for its bias: zero to others
        optimizer.step()
        averager.step()
        return [
            float(optimizer.state.get(p, {}).get(kind, torch.zeros(1)).flatten()[0])
            for p in model.parameters()
            for kind in ("exp_avg", "step")
        ]

    found = torch.tensor(together(program, 2))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_all_begin_from_the_same_vector_though_they_have_stepped():
    def program(comm):
        model = linear()
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averager = Smoothed(model, comm=comm, optimizer=optimizer, moments="average")
        seen = averager.memory
        averager.average = lambda comm, vector, step: mean(comm, vector)
        train_(model, optimizer, comm.rank, 1, averager)
        assert torch.equal(seen["last"], torch.cat([start, torch.zeros(3)]))

    together(program, 2)


def test_it_trains_as_one_process_with_all_batches():
    """Plain SGD from equal models: averaging models is averaging gradients."""

    def program(comm):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with allreduce(model, comm=comm) as averager:
            train_(model, optimizer, comm.rank, 5, averager)
        return model.weight.detach()

    found = together(program, 3)
    assert all(torch.equal(found[0], other) for other in found)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(3):
            generator = torch.Generator().manual_seed(100 * rank + step)
            (model(torch.randn(8, 2, generator=generator)).square().sum() / 3).backward()
        optimizer.step()
    torch.testing.assert_close(found[0], model.weight)
