"""Test SGD's default density, its loss compared with dense, and the notices."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import simulate
from sparsync.algorithm import LARGE, default_density
from sparsync.console import say
from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.residual import Growth
from sparsync.options import Compression, Monitoring, Options, Transport
from sparsync.presets import resolve
from tests.tables import cases


def settings(density=None, algorithm="budgeted", **compression):
    groups = Compression(**compression), Transport(), Monitoring()
    return Options(resolve(algorithm), density, None, *groups)


@cases(
    (520, 520, "exchanges all 520 gradient entries"),
    (46_415, 46_415, "exchanges all 46,415"),
    (100_000, 31_623, "exchanges 31.6 % of 100,000"),
    (280_000, 18_898, "exchanges 6.75 % of 280,000"),
    (LARGE, 10_000, "exchanges 1 % of 1,000,000"),
    (25_000_000, 250_000, "exchanges 1 % of 25,000,000"),
)
def test_small_models_are_exchanged_whole_and_large_ones_as_before(elements, entries, said, capsys):
    options = settings().for_size(elements, say)
    assert options.density == default_density(elements)
    (unit,) = options.units([("w", torch.empty(elements))], nn.Linear(1, 1))
    assert unit.dense == (entries == elements)
    assert unit.entries(options.density) == entries
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "(density= overrides this)" in line
    assert line.endswith("delay costs more than bytes") == (elements < LARGE)
    assert line.endswith("give density=0.1") == (elements >= LARGE)


def of_redsync(density):
    """Return options with the algorithm's own rule of what is compressed."""
    algorithm = resolve("redsync")
    own = settings(density, "redsync", compress=algorithm.compress)
    return replace(own, algorithm=algorithm)


def net_of(*sizes):
    return nn.ParameterDict({f"p{i}": nn.Parameter(torch.empty(n)) for i, n in enumerate(sizes)})


@cases(
    # dense takes 2 (P - 1) / P words for each element of the two small layers; the large one
    # sends P - 1 pairs for 0.1 %
    ((10_000, 10_000, 1_000_000), 4, 0.001, 30_000 / (30_000 + 6_000)),
    ((10_000, 10_000, 1_000_000), 4, 0.1, 30_000 / (30_000 + 600_000)),
    ((1_000_000,), 4, 0.001, 0.0),
    ((10_000, 10_000, 1_000_000), 1, 0.001, 0.0),  # alone, a rank sends nothing
)
def test_the_user_is_told_where_small_layers_send_most_bytes(sizes, ranks, density, share):
    rule = resolve("redsync").compress
    options, net, said = of_redsync(density), net_of(*sizes), []
    units = options.units(net.named_parameters(), net)
    assert options.algorithm.dense_share(units, density, ranks) == pytest.approx(share, rel=0.01)
    options.tell_of_bytes(units, ranks, said.append)
    assert bool(said) == (share > 0.5)
    if said:
        start = "redsync: layers that are too small to compress are 1.96 % of the"
        assert said[0].startswith(start) and "83 % of the bytes" in said[0]
        assert "resolve('redsync', compress_thd=0), or " in said[0]
    # another function: the user's own
    own = replace(options, compression=Compression(compress=rule))
    own.tell_of_bytes(units, ranks, said.append)
    assert len(said) == (share > 0.5)


def test_layers_that_are_all_dense_are_100_percent():
    options, net, said = of_redsync(0.001), net_of(10_000, 10_000), []
    options.tell_of_bytes(options.units(net.named_parameters(), net), 4, said.append)
    assert "are 100 % of the gradient and 100 % of the bytes" in said[0]


@cases(
    # dense moves 8 n (P - 1) / P bytes, and an allgather of pairs 8 k (P - 1): more from k > n / P
    ("allgather", 4, 0.24, False),
    ("allgather", 4, 0.26, True),
    ("allgather", 128, 0.01, True),
    ("redsync", 4, 0.3, True),  # a search finds up to 2 k, and 1.5 k on average
    ("oktopk", 128, 0.01, False),
    ("budgeted", 4, 0.316, False),
    ("allgather", 1, 0.5, False),  # alone, a rank sends nothing
    ("allgather", 4, 1.0, False),  # asks for all
    ("quantised", 4, 0.5, False),  # selects nothing
)
def test_the_user_is_told_where_sparse_sends_more_than_dense(algorithm, ranks, density, told):
    options, said, net = settings(density, algorithm), [], net_of(2_000_000)
    options.tell_of_bytes(options.units(net.named_parameters(), net), ranks, said.append)
    assert len(said) == told
    if (algorithm, ranks) == ("allgather", 128):
        start = "allgather: at density 0.01 and 128 ranks, a rank sends or receives"
        assert said[0].startswith(start)
        assert "20.3 MB per step, but 15.9 MB with dense; give a lower density" in said[0]


def test_a_preset_that_a_small_model_does_not_use_is_named():
    said = []
    settings(algorithm="sparcml").for_size(5_000, said.append)
    assert "densely; sparcml is not used (density= overrides this)" in said[0]


def test_density_falls_with_size_to_the_usual_one():
    found = [default_density(10 * 2**power) for power in range(24)]
    assert found == sorted(found, reverse=True) and found[0] == 1.0
    assert {default_density(size) for size in (LARGE, LARGE + 1, 10**11)} == {0.01}
    assert default_density(LARGE - 1) == pytest.approx(0.01, rel=1e-5)  # no jump


def test_a_density_that_was_given_is_taken_as_given(capsys):
    given = settings(0.01)
    assert given.for_size(520, say) is given
    assert settings(algorithm="dense").for_size(10**8, say).density == 1.0  # nothing to say
    own = settings(compress=lambda name, _: name == "w").for_size(520, str)
    assert not own.units([("w", torch.empty(520))], nn.Linear(1, 1))[0].dense
    assert capsys.readouterr().err == ""


def train(make_model, lr, momentum, density=None, steps=120, ranks=2):
    """Train with SGD to imitate another network of the same kind; return held-out loss and notices."""
    torch.manual_seed(0)
    taught, begin = make_model(), make_model().state_dict()
    size = sum(p.numel() for p in taught.parameters())

    def loss_of(model, seed, count=32):
        inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
        return nn.functional.mse_loss(model(inputs), taught(inputs).detach())

    async def program(comm):
        model = make_model()
        model.load_state_dict(begin)
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
        options = settings(density).for_size(size, str)
        (unit,) = options.units(model.named_parameters(), model)
        reducer, notices = Reducer(comm, [unit], options.algorithm, options.density), []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, 1_000 * step + comm.rank).backward()
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            try:
                await reducer.reduce([flat])
            except NonFiniteGradientError:
                break
            for slot, p in zip(unit.slots, model.parameters(), strict=True):
                p.grad.copy_(flat[slot.start : slot.start + slot.size].view_as(p))
            optimizer.step()
            if reducer.notice:
                notices.append(reducer.notice)
                reducer.notice = ""
        return loss_of(model, 10**9, 2048).item(), notices

    return simulate(program, ranks).results[0]


def linear():
    return nn.Linear(64, 8)


def small():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


@pytest.mark.fast(2)
@cases((linear, 0.5, 0.0), (linear, 0.05, 0.9), (small, 0.1, 0.0), (small, 0.1, 0.9))
def test_small_networks_train_as_with_dense_sgd(make_model, lr, momentum):
    """At 1 %, losses were 1e16 and 47 times as large: entries 100 steps late act like momentum."""
    dense, _ = train(make_model, lr, momentum, density=1.0)
    loss, notices = train(make_model, lr, momentum)
    assert loss <= 1.15 * dense + 1e-12 and not notices


def test_a_network_that_is_not_exchanged_whole_keeps_up_with_dense_sgd():
    def network():
        return nn.Sequential(nn.Linear(64, 1_400), nn.ReLU(), nn.Linear(1_400, 8))

    assert default_density(sum(p.numel() for p in network().parameters())) < 1 / 3
    dense, _ = train(network, 0.01, 0.9, density=1.0)
    loss, notices = train(network, 0.01, 0.9)
    assert loss <= 1.15 * dense and not notices


# ---- a residual that grows ---------------------------------------------------------------------------


def test_a_residual_that_grows_without_bound_is_noticed_once_with_its_cure():
    loss, notices = train(linear, 0.5, 0.0, density=0.01, steps=900, ranks=1)
    assert loss > 10
    (notice,) = notices
    assert "has grown fourfold within 800 steps" in notice and "density=0.1" in notice


@cases((linear, 0.05, 0.0, 0.01), (linear, 0.05, 0.9, 0.1), (small, 0.1, 0.9, 0.02))
def test_a_residual_that_trains_well_is_not_reported(make_model, lr, momentum, density):
    _, notices = train(make_model, lr, momentum, density, steps=500, ranks=1)
    assert not notices


def test_growth_is_told_of_steady_growth_but_not_of_filling_falling_or_slow_change():
    def told(curve, steps=2_000):
        growth = Growth(window=100)
        return [step for step in range(steps) if growth.observe(curve(step))]

    assert told(lambda step: step / 200)  # exponential
    assert told(lambda step: math.log2(1 + step))[0] < 1_000  # linear
    assert not told(lambda step: min(step, 100) / 10)  # the residual fills, then stays
    assert not told(lambda step: -step / 100)
    # a doubling in ten windows: gradients of decaying weights
    assert not told(lambda step: step / 1_000)
    assert not told(lambda step: 3.0 * (step % 7 == 0))  # noise


def test_attach_says_the_density_once(alone, capsys):
    with sparsync.attach(DistributedDataParallel(linear()), transport=sparsync.Transport("torch")):
        (line,) = capsys.readouterr().err.splitlines()
        assert "exchanges all 520" in line
