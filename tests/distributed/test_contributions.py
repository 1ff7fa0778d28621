"""Three real ranks have unequal amounts of data, and optimizers that are not whole on each rank."""

import contextlib
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.errors import PeerError
from sparsync.updates import OUTER_SETTINGS, OuterStep, advice
from sparsync.updates.gradient_noise import GradientNoise
from tests.attaching import ONE_BIT
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .small_model import ddp_model, flat, model

ROWS = ((1, 8, 4), (0, 3, 9), (2, 0, 0))  # by step, of each rank
STEPS = 12


def rows_of(step, rank):
    """Return a rank's inputs and targets: none, if it has none."""
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    x = x[: ROWS[step % len(ROWS)][rank]]
    return x, x[:, :5].sin()


def loss_of(net, step, rank):
    x, y = rows_of(step, rank)
    return (net(x) - y).pow(2).sum() / max(len(x), 1)


def alone():
    """Return the weights of one process that sees all rows."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        pairs = [rows_of(step, rank) for rank in range(3)]
        x, y = (torch.cat(column) for column in zip(*pairs, strict=True))
        optimizer.zero_grad()
        ((net(x) - y).pow(2).sum() / len(x)).backward()
        optimizer.step()
    return flat(net)


@on_ranks(3)
def test_a_finish_before_the_first_step_decides_nothing():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with sparsync.attach(net, optimizer) as sync:
        sync.finish()  # e.g. to evaluate the start
        loss_of(net, 0, dist.get_rank()).backward()
        sync.contribute(samples=ROWS[0][dist.get_rank()])
        optimizer.step()
        sync.finish()
        assert sync.outer.contributions.weighs


@on_ranks(3)
@pytest.mark.parametrize("wrap", [model, ddp_model])
def test_ranks_weigh_what_they_have_seen(wrap):
    """Weighted training equals one process that sees all data; without ``contribute``, it is far off."""
    rank, expected = dist.get_rank(), alone()
    for counts in (True, False):
        net = wrap()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = OuterStep(algorithm="dense", density=1.0, period=1)
        with sparsync.attach(net, optimizer, outer) as sync:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(net, step, rank).backward()
                if counts:
                    sync.contribute(samples=len(rows_of(step, rank)[0]))
                optimizer.step()
            assert same_everywhere(flat(net))
            assert torch.allclose(flat(net), expected, atol=1e-5) == counts


@on_ranks(3)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax])
def test_the_one_line_weighs_and_resumes(kind):
    """The default exchange resumes bit for bit, even with steps counted but not yet exchanged."""
    rank, ends = dist.get_rank(), []
    for breaks in (False, True):
        net = model()
        optimizer = kind(net.parameters(), lr=0.01)
        settings = {**ONE_BIT, "warmup_steps": 0, "period": 4}
        sync = sparsync.attach(net, optimizer, OuterStep(**settings))
        for step in range(STEPS):
            if breaks and step == 6:
                saved = sync.state_dict()
                sync.close()
                net = model()
                optimizer = kind(net.parameters(), lr=0.5)
                sync = sparsync.attach(net, optimizer, OuterStep(**settings))
                sync.load_state_dict(saved)
            optimizer.zero_grad()
            loss_of(net, step, rank).backward()
            sync.contribute(tokens=len(rows_of(step, rank)[0]))
            optimizer.step()
        with sync.shared():
            ends.append(flat(net))
            assert same_everywhere(ends[-1])
        # steps are corrected for fewer ranks than there are, because the amounts of data are
        # unequal
        assert 1 < sync._weights.ranks < 3
        sync.finish()
        assert same_everywhere(flat(net))
        sync.close()
    assert torch.equal(*ends)


@on_ranks(3)
def test_contributing_is_for_updates_and_begins_with_the_first_step():
    net = ddp_model()
    with (
        sparsync.attach(net, transport=sparsync.Transport(timeout=30)) as sync,
        refused("contribute() weighs updates", "multiply the loss by"),
    ):
        sync.contribute(tokens=3)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer) as sync:
        loss_of(net, 0, dist.get_rank()).backward()
        optimizer.step()
        with refused("after an exchange without it", "from the first one on"):
            sync.contribute(tokens=3)


@on_ranks(3)
def test_gradients_are_weighed_by_the_script():
    """As in ``docs/optimizers.md``, the script multiplies the loss by n ranks / (sum of n)."""
    net, rank, expected = ddp_model(), dist.get_rank(), alone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sparsync.attach(net, optimizer, "dense", 1.0):
        for step in range(STEPS):
            optimizer.zero_grad()
            seen = torch.tensor(float(len(rows_of(step, rank)[0])))
            everyone = seen.clone()
            dist.all_reduce(everyone)
            (loss_of(net, step, rank) * seen * dist.get_world_size() / everyone).backward()
            optimizer.step()
        assert torch.allclose(flat(net), expected, atol=1e-5)


@on_ranks(3)
def test_optimizers_that_hold_a_part_are_refused_and_those_that_differ_are_found():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own: its torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(model())
    sharded = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    with refused("ZeroRedundancyOptimizer steps", "of 6 parameters", "exchange='gradients'"):
        sparsync.attach(net, sharded)
    assert len(set(map(str, gathered(None)))) == 1  # no rank waits for another
    net = model()
    held = list(net.parameters())[dist.get_rank() // 2 :]
    with refused("stepped_parameters", "5 of 6 parameters", error=PeerError):
        sparsync.attach(net, torch.optim.AdamW(held))


@on_ranks(3)
@pytest.mark.parametrize(("agreement", "says"), [(None, 0), (0.9, 0), (0.1, 1)])
def test_data_that_differ_are_said_once(agreement, says):
    net, said = model(), io.StringIO()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        sparsync.attach(net, optimizer) as sync,
    ):
        patch.setattr(GradientNoise, "agreement", property(lambda _: agreement))
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, step, dist.get_rank()).backward()
            optimizer.step()
        assert sync.stats()["agreement"] == agreement
    lines = [line for line in said.getvalue().splitlines() if "hardly agree: 10 %" in line]
    assert len(lines) == (says if dist.get_rank() == 0 else 0)


@on_ranks(3)
@pytest.mark.parametrize(("factor", "period", "says"), [(5.0, 2, 1), (2.0, 2, 0), (5.0, 1, 0)])
def test_noise_that_calls_for_an_exchange_on_every_step_is_said_once(factor, period, says):
    net, said = model(), io.StringIO()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step_rule = OuterStep(**OUTER_SETTINGS["updates"] | {"period": period})
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        sparsync.attach(net, optimizer, step_rule),
    ):
        patch.setattr(GradientNoise, "lengthening", lambda noise, ranks: factor * ranks / 3)
        patch.setattr(advice, "_MEASURED", 3)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, step, dist.get_rank()).backward()
            optimizer.step()
    lines = [line for line in said.getvalue().splitlines() if "5.0 times as long" in line]
    assert len(lines) == (says if dist.get_rank() == 0 else 0)
