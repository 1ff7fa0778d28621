"""Three real ranks exchange the updates of their local optimizers."""

import contextlib
import copy
import importlib
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import dense_or_updates
from sparsync.averaging import LocalSgd
from sparsync.cost.calibrate import Calibration
from sparsync.cost.machine import Machine
from sparsync.errors import CheckpointError, PeerError
from sparsync.feedback.reducer import Reducer
from sparsync.frameworks.common import save_beside
from sparsync.updates import OUTER_SETTINGS, AdaptivePeriod, OuterAverager, OuterStep, advice
from sparsync.updates.fragments import Weights
from sparsync.updates.outer_engine import OuterEngine
from sparsync_papers.baseline_optimizers import UpdateSpaceAdamW
from tests.attaching import ONE_BIT
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .muons import DistributedMuon, Muon
from .small_model import backward, batch, ddp_model, flat, model


def step_of(net, optimizer, step):
    net.zero_grad()
    backward(net, step)
    optimizer.step()


@on_ranks(3)
def test_different_initial_weights_are_named():
    local = OuterAverager(model(seed=dist.get_rank() % 2), period=1)
    with refused("the initial values of", error=PeerError):
        local.step()


@on_ranks(3)
@pytest.mark.parametrize("wrap", [torch.nn.Sequential, DistributedDataParallel])
def test_buffers_that_differ_before_attach_become_those_of_rank_0(wrap, folder):
    """They are equal at the end, and in checkpoints."""
    net = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(5))
    net, draw = wrap(net), torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():  # DDP would have made them equal before its next forward pass
        net(torch.randn(8, 20, generator=draw))
    optimizer = adam(net)
    with sparsync.attach(net, optimizer) as sync:
        assert same_everywhere(sync.outer.memory["shared"])
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 20, generator=draw)).square().sum().backward()
            optimizer.step()
        sparsync.save(sync, folder)
        sparsync.load(sync, folder)
        sync.finish()
    for tensor in net.state_dict().values():
        assert same_everywhere(tensor)


class Changing(torch.nn.Module):
    """A model that writes to much that no optimizer trains."""

    def __init__(self):
        super().__init__()
        self.base = model()
        self.average = copy.deepcopy(self.base).requires_grad_(False)
        self.register_buffer("unsaved", torch.zeros(20), persistent=False)
        self.register_buffer("count", torch.zeros(20, dtype=torch.long))
        self.register_buffer("grows", torch.empty(0))

    def forward(self, x):
        if self.training:
            if not self.grows.numel():
                self.grows = torch.zeros(20)
                self.register_buffer("late", torch.zeros(20))
            for buffer in (self.unsaved, self.grows, self.late):
                buffer.lerp_(x.mean(0), 0.1)
            self.count += (x > 0).sum(0)
            with torch.no_grad():
                for mean, own in zip(
                    self.average.parameters(), self.base.parameters(), strict=True
                ):
                    mean.lerp_(own, 0.1)
        return self.base(x)


@on_ranks(3)
def test_what_models_change_themselves_is_that_of_rank_0_at_the_end():
    """As plain DDP makes it, before every forward pass."""
    net = DistributedDataParallel(Changing())
    with sparsync.attach(net, adam(net)) as sync:
        for step in range(4):
            step_of(net, sync.outer.optimizers[0], step)
        first = net.module.count.clone()
        assert not same_everywhere(first)
        sync.finish()
        mine = [*net.module.parameters(), *net.module.buffers()]
        assert all(same_everywhere(tensor.detach()) for tensor in mine)
        assert dist.get_rank() or torch.equal(net.module.count, first)


@on_ranks(3)
def test_buffers_that_ddp_ignores_stay_local():
    net = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(5))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(net, ["1.running_mean", "1.num_batches_tracked"])
    ddp = DistributedDataParallel(net)
    with sparsync.attach(ddp, adam(ddp)) as sync:
        step_of(ddp, sync.outer.optimizers[0], 0)
        sync.finish()
    assert same_everywhere(net[1].running_var) and not same_everywhere(net[1].running_mean)


@on_ranks(2)
@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_frozen_parameters_are_compared_too(exchange):
    """Nobody else compares those of a plain module: e.g. a LoRA's base without a seed."""
    net = model()
    net[0].requires_grad_(False).weight.data += dist.get_rank()
    optimizer = torch.optim.SGD(net[2:].parameters(), lr=0.1)
    where = {} if exchange == "updates" else {"replicate": dist.group.WORLD}
    with refused("ranks disagree on parameter 0.weight", error=PeerError):
        sync = sparsync.attach(net, optimizer, exchange=exchange, **where)
        with sync:
            step_of(net, optimizer, 0)


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_tensors_of_the_user_can_be_resized(kind):
    """By observers, e.g. on their first batch; NumPy would forbid it for good."""
    net = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(5), torch.nn.PReLU())
    net.register_buffer("seen", torch.zeros(3))
    net = DistributedDataParallel(net)
    net.module.seen.fill_(dist.get_rank())  # differs, so rank 0 sends its own
    optimizer = kind(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer) as sync:
        for step in range(2):
            step_of(net, optimizer, step)
        sync.finish()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    held = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters()), *state]
    assert all(tensor.untyped_storage().resizable() for tensor in held)


@on_ranks(2)
def test_a_buffer_that_is_removed_is_named():
    net = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(5))
    optimizer = adam(net)
    with sparsync.attach(net, optimizer):
        net[1].running_mean = None
        net[1].running_var = None
        with refused("buffer '1.running_mean'", "removed"):
            step_of(net, optimizer, 0)


@on_ranks(2)
def test_a_parameter_of_two_models_is_exchanged_once():
    shared = model()
    one, other = (DistributedDataParallel(torch.nn.Sequential(shared)) for _ in range(2))
    with (
        sparsync.attach(one, adam(one), exchange="updates"),
        refused("the update of '0.0.weight' is exchanged already"),
    ):
        sparsync.attach(other, adam(other), exchange="updates")


@on_ranks(2)
def test_weights_loaded_before_the_first_step_are_the_shared_ones(folder):
    """They are evaluated, saved and resumed; ranks that load others are refused at ``finish``."""
    loaded, ends = model(seed=5), []
    for resumes in (False, True):
        net = model()
        optimizer = adam(net)
        with sparsync.attach(net, optimizer) as sync:
            if resumes:
                sparsync.load(sync, folder)
            else:
                net.load_state_dict(loaded.state_dict())
                assert torch.equal(shared_of(sync, net), flat(loaded))
                sparsync.save(sync, folder)
            for step in range(3):
                step_of(net, optimizer, step)
            ends += [flat(net), shared_of(sync, net)]
            sync.finish()
    assert all(map(torch.equal, ends[:2], ends[2:]))
    with sparsync.attach(net, adam(net)) as sync:
        net.load_state_dict(model(seed=5 + dist.get_rank()).state_dict())
        with refused("the weights that were loaded after attach", error=PeerError):
            sync.finish()


@on_ranks(2)
@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_states_of_an_evaluation_in_inference_mode_train_on(exchange, folder):
    """Tensors of that mode could not be updated by the steps that follow."""
    ends = []
    for mode in (torch.inference_mode, contextlib.nullcontext):
        net = ddp_model()
        optimizer = (
            adam(net) if exchange == "updates" else torch.optim.SGD(net.parameters(), 0.1, 0.9)
        )
        with sparsync.attach(net, optimizer, exchange=exchange) as sync:
            saved = {"model": net.module, "optimizer": optimizer}
            for step in range(8):
                step_of(net, optimizer, step)
                with mode():
                    with sync.shared():
                        net(torch.zeros(1, 20))
                    if step == 1:
                        sync.load_state_dict(sync.state_dict())
                    elif step == 3:
                        sparsync.save(sync, folder / mode.__name__, **saved)
                        sparsync.load(sync, folder / mode.__name__, **saved)
                    elif step == 5:
                        sync.finish()
            sync.finish()
            ends.append(flat(net))
    assert torch.equal(*ends)


@on_ranks(2)
def test_replaced_weights_are_refused_after_an_evaluation_too():
    net = model()
    optimizer = adam(net)
    sync = sparsync.attach(net, optimizer)
    step_of(net, optimizer, 0)
    net.load_state_dict(model(seed=5).state_dict())
    with sync.shared():
        net(torch.zeros(1, 20))
    with refused("the weights were replaced since the last step"):
        step_of(net, optimizer, 1)
    sync.close()


class Accumulating(torch.optim.AdamW):
    """Steps on every second call, and drops the gradients then."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            super().step(closure)
            self.zero_grad()


@on_ranks(3)
def test_a_subclass_that_steps_on_some_calls_is_corrected_on_these():
    net = model()
    optimizer = Accumulating(net.parameters(), lr=0.01)
    outer = OuterStep(**{**ONE_BIT, "algorithm": "dense", "density": 1.0, "period": 1})
    with sparsync.attach(net, optimizer, outer) as sync:
        for step in range(12):
            backward(net, step)
            before = shared_of(sync, net)
            optimizer.step()
            assert torch.equal(shared_of(sync, net), before) == (step % 2 == 0)
        shares = sync._weights.noise.shares
        assert all(shares[parameter] < 1 for parameter in net.parameters())


@on_ranks(3)
def test_gradients_dropped_after_each_of_several_optimizers_are_sampled():
    net = model()
    several = [adam(net[0]), adam(net[2:])]
    with sparsync.attach(net, several) as sync:
        for step in range(12):
            backward(net, step)
            for optimizer in several:
                optimizer.step()
                optimizer.zero_grad()
        shares = sync._weights.noise.shares
        assert all(shares[parameter] < 1 for parameter in net.parameters())


class Momentless(torch.optim.AdamW):
    """Has nothing in common with AdamW but the class."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                parameter -= group["lr"] * parameter.grad.sign()


@on_ranks(2)
def test_a_subclass_without_adams_moments_trains():
    net = model()
    optimizer = Momentless(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer) as sync:
        for step in range(4):
            step_of(net, optimizer, step)
        sync.finish()
    assert same_everywhere(flat(net))


@on_ranks(2)
@pytest.mark.parametrize("residual", ["apart", "weights"])
def test_a_finish_that_delivers_nothing_loses_nothing(residual):
    """One rank's weights are broken; what the others have withheld arrives later."""
    net = torch.nn.Linear(64, 8, bias=False)
    torch.nn.init.ones_(net.weight)
    optimizer, draw = (
        torch.optim.SGD(net.parameters(), lr=1.0),
        torch.Generator().manual_seed(dist.get_rank()),
    )
    outer = OuterStep(algorithm="allgather", density=0.05, period=1, residual=residual)
    moved = torch.zeros(8, 64)
    with sparsync.attach(net, optimizer, outer) as sync:
        for _ in range(3):
            net.weight.grad = torch.randn(8, 64, generator=draw)
            moved -= net.weight.grad
            optimizer.step()
        if dist.get_rank() == 1:
            torch.nn.init.constant_(net.weight, torch.nan)
        sync.finish()
        assert same_everywhere(net.weight.detach())
        state = sync.state_dict()
        sync.load_state_dict(state)  # a factor of 0 on residuals is no damage
        net.weight.grad = torch.zeros(8, 64)
        optimizer.step()
        sync.finish()
    assert torch.allclose(net.weight, 1 + sum(gathered(moved)) / 2, atol=1e-5)


@on_ranks(3)
@pytest.mark.parametrize(
    ("algorithm", "period"), [("quantised", 3), ("budgeted", 1), ("oktopk", 2)]
)
def test_replicas_are_equal_where_they_should_be(algorithm, period):
    """In the remaining places replicas differ; ``test_recovery`` shows that resuming is exact."""
    net = model()
    optimizer = adam(net)
    local = OuterAverager(net, algorithm=algorithm, residual="weights", density=0.1, period=period)
    for step in range(14):
        step_of(net, optimizer, step)
        local.step()
    own = flat(net)
    assert not same_everywhere(own)
    with local.shared():
        shared = flat(net)
    assert same_everywhere(shared) and not torch.equal(own, shared)
    local.finish()
    assert same_everywhere(flat(net))
    assert torch.allclose(flat(net), torch.stack(gathered(own)).mean(0), atol=1e-6)


# ---- attached: a hook of the optimizer drives it ------------------------------------------------------


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def shared_of(sync, net):
    with sync.shared():
        return flat(net)


@on_ranks(3)
def test_a_hook_of_the_optimizer_does_what_the_loop_would():
    """DDP, a plain module and calls of ``step()`` give the same bits; DDP itself exchanges nothing."""
    ends = []
    for wrap, given in ((ddp_model, True), (model, True), (model, False)):
        net = wrap()
        optimizer = adam(net)
        outer = OuterStep(algorithm="quantised", period=2, residual="weights")
        with sparsync.attach(net, optimizer if given else None, outer, exchange="updates") as sync:
            for step in range(9):
                step_of(net, optimizer, step)
                if not given:
                    sync.step()
                assert same_everywhere(shared_of(sync, net))
            assert not same_everywhere(flat(net))
            stats = sync.stats()
            assert stats["exchange"] == "updates" and sync.steps == stats["local_steps"] == 9
            assert (stats["exchanges"], stats["refused_exchanges"]) == (4, 0)
            # the first exchange has one more round, which determines whether ranks are weighted
            first = stats["bytes_sent_per_exchange_max"]
            each = stats["bytes_sent_last_exchange"]
            sent = first + 3 * each
            assert each < first and stats["bytes_sent_per_local_step"] == pytest.approx(sent / 9)
            assert stats["bytes_sent_by_finish"] == 0
            own = flat(net)
            with sync.shared():
                for needs_own in (sync.state_dict, sync.finish, sync.step):
                    with refused("within shared()", "leave that block"):
                        needs_own()
            assert torch.equal(flat(net), own)
            sync.finish()
            assert same_everywhere(flat(net))
            after = sync.stats()
            assert after["bytes_sent_by_finish"] > each
            for name in ("last_exchange", "per_exchange_max", "per_local_step"):
                assert after[f"bytes_sent_{name}"] == stats[f"bytes_sent_{name}"]
        ends.append(flat(net))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[1], ends[2])


def own_step(optimizer, parameter, share=1.0):
    """Return the last step of Adam, as corrected for a share of squares."""
    state = optimizer.state[parameter]
    count = state["step"].item()
    root = (state["exp_avg_sq"] * share / (1 - 0.999**count)).sqrt() + 1e-8
    return -0.01 / (1 - 0.9**count) * state["exp_avg"] / root


@on_ranks(3)
def test_hooks_correct_steps_when_they_are_exchanged():
    """Until then, ranks take Adam's own steps, which stay closer together."""
    settings = {**ONE_BIT, "algorithm": "dense", "warmup_steps": 0, "period": 2}
    for wrap in (ddp_model, model):
        net = wrap()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with sparsync.attach(net, optimizer, OuterStep(**settings)) as sync:
            for step in range(8):
                shares = dict(sync._weights.noise.shares)
                before = [p.detach().clone() for p in net.parameters()]
                step_of(net, optimizer, step)
                for parameter, began in zip(net.parameters(), before, strict=True):
                    moved = own_step(optimizer, parameter)
                    if step % 2:
                        share = max(shares.get(parameter, 1.0), 1 / 3)
                        added = own_step(optimizer, parameter, share) - moved
                        told = torch.stack(gathered(began + moved + 2 * added))
                        torch.testing.assert_close(parameter.detach(), told.mean(0))
                    else:
                        torch.testing.assert_close(parameter.detach() - began, moved)
            assert same_everywhere(torch.tensor(list(shares.values())))
            assert 0 < min(shares.values()) < 0.9


@on_ranks(3)
def test_a_long_period_corrects_four_steps_together():
    """Correcting 100 steps by 100 times the last one would leap."""
    settings = {**ONE_BIT, "algorithm": "dense", "warmup_steps": 0, "period": 7}
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer, OuterStep(**settings)) as sync:
        for step in range(13):  # exchanged after steps 6 and 13
            before = [p.detach().clone() for p in net.parameters()]
            step_of(net, optimizer, step)
            for parameter, began in zip(net.parameters(), before, strict=True):
                if step > 6:
                    share = max(sync._weights.noise.shares[parameter], 1 / 3)
                    moved = own_step(optimizer, parameter)
                    more = 4 * (own_step(optimizer, parameter, share) - moved) * (step == 10)
                    torch.testing.assert_close(parameter.detach() - began, moved + more)
        assert min(sync._weights.noise.shares.values()) < 0.9


@on_ranks(3)
def test_hooks_lengthen_steps_of_a_length_of_their_own():
    settings = {**ONE_BIT, "warmup_steps": 0, "period": 4}
    for wrap in (ddp_model, model):
        net = wrap()
        optimizer = torch.optim.Adamax(net.parameters(), lr=0.01)
        with sparsync.attach(net, optimizer, OuterStep(**settings)) as sync:
            for step in range(5):
                before = [p.detach().clone() for p in net.parameters()]
                step_of(net, optimizer, step)
            shares = sync._weights.noise.shares
            assert min(shares.values()) < 0.9
            assert same_everywhere(torch.tensor(list(shares.values())))
            for parameter, began in zip(net.parameters(), before, strict=True):
                state, share = optimizer.state[parameter], max(shares[parameter], 1 / 3)
                expected = -0.01 / (1 - 0.9**5) * state["exp_avg"] / state["exp_inf"] / share**0.5
                torch.testing.assert_close(parameter.detach() - began, expected)


@on_ranks(2)
def test_rows_of_an_embedding_are_lengthened_by_their_own_shares():
    """Token 0 is seen by both ranks, token 1 or 2 by one of them, and tokens 3 to 5 by none."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(6, 40), torch.nn.Linear(40, 3))
    rows = net[0].weight
    began = rows.detach().clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    with sparsync.attach(net, optimizer) as sync:
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.tensor([0, 0, 1 + rank])).square().sum().backward()
            optimizer.step()
        shares = sync._weights.noise.shares[rows].flatten()
        assert shares[0] > 0.9 and shares[1:3].tolist() == pytest.approx([0.5, 0.5], rel=0.02)
        assert same_everywhere(shares)
        sync.finish()
        assert same_everywhere(rows.detach())
        assert torch.equal(rows.detach()[3:], began[3:])
        assert not torch.equal(rows.detach()[1:3], began[1:3])


@on_ranks(3)
@pytest.mark.parametrize(
    "settings",
    [{}, {"fragments": 3, "delay": 2}, {"period": AdaptivePeriod(0.2)}],
    ids=["at once", "delayed", "adaptive"],
)
def test_transports_agree_with_the_simulator(settings):
    options = {
        "algorithm": "budgeted",
        "density": 0.1,
        "period": 3,
        "residual": "weights",
        **settings,
    }
    records = {}
    for transport in ("torch", "zmq"):
        net, stepped, after = model(), [], []
        optimizer = adam(net)
        optimizer.register_step_post_hook(lambda *_, net=net, to=stepped: to.append(flat(net)))
        carried = sparsync.Transport(transport)
        began = flat(net)
        with sparsync.attach(net, optimizer, OuterStep(**options), transport=carried):
            for step in range(8):
                step_of(net, optimizer, step)
                after.append(flat(net))
        records[transport] = torch.stack(stepped), torch.stack(after)
    assert all(map(torch.equal, records["torch"], records["zmq"]))
    everyone = [torch.stack(gathered(each)) for each in records["zmq"]]
    names = {name: parameter.detach() for name, parameter in model().named_parameters()}

    async def program(comm):
        given, weights, results = OuterStep(**options), Weights(began), []
        layout = given.plan(began, names)
        reducer = Reducer(comm, layout.units, given.chosen, given.density)
        outer = OuterEngine(given, layout, reducer, weights)
        for step, vector in enumerate(everyone[0][comm.rank]):
            weights.hold(vector)
            await outer.advance(step)
            results.append(weights.vector)
        return torch.stack(results)

    assert torch.equal(torch.stack(sparsync.simulate(program, 3).results), everyone[1])


@on_ranks(2)
def test_a_step_that_only_one_rank_skips_still_counts():
    """A GradScaler that sparsync was not told about skips such steps, for example."""
    for told, wrap in itertools.product((True, False), (ddp_model, model)):
        net = wrap()
        optimizer, scaler = (
            torch.optim.AdamW(net.parameters(), lr=0.01),
            torch.amp.GradScaler("cpu"),
        )
        monitoring = sparsync.Monitoring(scaler=scaler) if told else None
        with sparsync.attach(net, optimizer, monitoring=monitoring) as sync:
            for step in range(7):
                optimizer.zero_grad()
                x, y = batch(step)
                loss = (net(x) - y).pow(2).mean()
                if step == 3 and dist.get_rank() == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                assert sync.stats()["local_steps"] == step + 1
            assert flat(net).isfinite().all()
            sync.finish()
            assert same_everywhere(flat(net))


@on_ranks(2)
def test_nan_on_one_rank_brings_all_back():
    net = ddp_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer) as sync:
        for step in range(12):
            optimizer.zero_grad()
            backward(net, step)
            if step == 5 and dist.get_rank() == 1:
                next(net.parameters()).grad.fill_(torch.nan)
            optimizer.step()
            assert shared_of(sync, net).isfinite().all()
        assert flat(net).isfinite().all() and sync.stats()["refused_exchanges"] >= 1
        assert all(
            value.isfinite().all() for state in optimizer.state.values() for value in state.values()
        )


@on_ranks(2)
@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_a_group_without_this_rank_is_refused(exchange):
    """``new_group`` returns a number on ranks that are not in the group."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    apart = groups[1 - dist.get_rank()]
    dist.destroy_process_group(gone := dist.new_group([0, 1]))
    for name, group, words in (
        ("Transport(world=...)", apart, "outside of the new group"),
        ("Transport(world=...)", [0, 1], "is [0, 1]; give a process group"),
        ("Transport(world=...)", gone, "not destroyed"),
        ("replicate", apart, "outside of the new group"),
        ("replicate", gone, "not destroyed"),
    ):
        net = model()
        given = (
            {"replicate": group}
            if name == "replicate"
            else {"transport": sparsync.Transport(world=group)}
        )
        with refused(name, words):
            sparsync.attach(net, adam(net), exchange=exchange, **given)


@on_ranks(2)
def test_marks_in_an_optimizers_state_outlive_broken_moments():
    net = model()
    optimizer = Muon(net.parameters())
    with sparsync.attach(net, optimizer) as sync:
        for step in range(6):
            net.zero_grad()
            backward(net, step)
            if step == 3 and dist.get_rank() == 1:
                for parameter in net.parameters():
                    parameter.grad.fill_(torch.nan)
            optimizer.step()
        assert sync.stats()["refused_exchanges"] == 1
        marks = [optimizer.state[parameter]["use_muon"] for parameter in net.parameters()]
        assert marks == [parameter.ndim == 2 for parameter in net.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("wrap", [ddp_model, model])
def test_an_optimizer_that_shares_out_the_parameters_is_refused_in_its_first_step(wrap):
    net = wrap()
    with (
        pytest.raises(sparsync.ConfigurationError) as caught,
        sparsync.attach(net, DistributedMuon(net.parameters())) as sync,
    ):
        step_of(net, sync.optimizers[0], 0)
    assert str(caught.value).startswith("DistributedMuon steps 3 of 6 parameters on this rank")
    if wrap is ddp_model:
        net = ddp_model()
        optimizer = DistributedMuon(net.parameters())
        with sparsync.attach(net, optimizer, exchange="gradients"):
            for step in range(3):
                step_of(net, optimizer, step)
            assert same_everywhere(flat(net))


@on_ranks(2)
def test_collectives_of_hooks_are_not_mistaken_for_the_steps_own():
    """Scripts log norms in hooks; torch's own optimizers, such as SGD here, need not keep any state."""
    net = model()
    several = [Muon([net[0].weight]), torch.optim.SGD([*net.parameters()][1:], 0.1)]
    for one in several:
        one.register_step_post_hook(lambda *_: dist.all_reduce(torch.ones(1)))
    with sparsync.attach(net, several, exchange="updates") as sync:
        backward(net, 0)
        for one in several:
            one.step()
        assert sync.steps == 1
        sync.finish()


@on_ranks(2)
def test_nan_a_second_time_is_named_where_it_is():
    """The error does not depend on the learning rate, and does not blame it."""
    for name, where in (("0.weight", "0.weight'"), ("seen", "seen' (persistent=False")):
        net = model()
        net.register_buffer("seen", torch.zeros(2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-38)
        with sparsync.attach(net, optimizer) as sync:
            with pytest.raises(sparsync.errors.NonFiniteGradientError) as caught:
                for step in range(9):
                    optimizer.zero_grad()
                    backward(net, step)
                    if step >= 2 and dist.get_rank() == 1:
                        net.state_dict()[name][0].fill_(torch.nan)
                    optimizer.step()
            assert sync.steps < 9
            assert "in a row holds NaN or Inf" in str(caught.value), caught.value
            assert (f"here in '{where}" in str(caught.value)) == (dist.get_rank() == 1), (
                caught.value
            )
            assert "rate" not in str(caught.value) and "optimizer=" not in str(caught.value)


@on_ranks(2)
def test_a_statistic_that_began_with_inf_is_named_once():
    """Such buffers stay local, because they were taken for masks; torch's observers have some."""
    net, said = model(), io.StringIO()
    net.register_buffer("lowest", torch.full((3,), torch.inf))
    net.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    optimizer = adam(net)
    with contextlib.redirect_stderr(said), sparsync.attach(net, optimizer):
        for step in range(6):
            step_of(net, optimizer, step)
            net.mask.mul_(1.0)
            if step == 3:
                net.lowest = torch.ones(3) * dist.get_rank()
    lines = [line for line in said.getvalue().splitlines() if "held NaN or Inf" in line]
    assert len(lines) == 1 and f"rank {dist.get_rank()}: buffer 'lowest'" in lines[0], lines


@on_ranks(2)
def test_a_handle_that_is_closed_without_finish_says_that_replicas_differ():
    def said_by(train, settings=None, within=contextlib.nullcontext):
        net, said = model(), io.StringIO()
        optimizer = adam(net)
        with contextlib.redirect_stderr(said), within():
            sync = sparsync.attach(net, optimizer, settings)
            with sync:
                train(net, optimizer, sync)
            sync.close()  # says nothing more
        lines = [line for line in said.getvalue().splitlines() if "finish()" in line]
        assert all("replicas differ" in line for line in lines)
        return len(lines)

    def steps(net, optimizer, sync):
        for step in range(4):
            step_of(net, optimizer, step)

    def finishing(net, optimizer, sync):
        steps(net, optimizer, sync)
        sync.finish()

    def going_on(net, optimizer, sync):
        finishing(net, optimizer, sync)
        step_of(net, optimizer, 4)

    def loading(net, optimizer, sync):
        steps(net, optimizer, sync)
        net.load_state_dict(model().state_dict())

    def resuming(net, optimizer, sync):
        steps(net, optimizer, sync)
        sync.load_state_dict(sync.state_dict())

    def failing(net, optimizer, sync):
        steps(net, optimizer, sync)
        raise KeyboardInterrupt

    def caught():
        return pytest.raises(KeyboardInterrupt)

    first = int(dist.get_rank() == 0)
    exact = OuterStep(period=1, algorithm="allgather", density=1.0, residual="weights")
    assert said_by(steps) == first
    assert said_by(going_on) == first
    assert said_by(lambda net, optimizer, sync: None) == 0
    assert [said_by(train) for train in (finishing, loading, resuming)] == [0, 0, 0]
    assert said_by(steps, exact) == 0  # replicas are equal after every step
    assert said_by(failing, within=caught) == 0


@on_ranks(2)
def test_several_optimizers_frozen_and_unused_parameters_and_buffers():
    torch.manual_seed(0)
    net = torch.nn.ModuleDict(
        {
            "first": torch.nn.Linear(20, 16),
            "norm": torch.nn.BatchNorm1d(16),
            "frozen": torch.nn.Linear(16, 16),
            "unused": torch.nn.Linear(3, 3),
            "last": torch.nn.Linear(16, 5),
        }
    )
    net["frozen"].requires_grad_(False)
    net.forward = lambda x: net["last"](net["frozen"](net["norm"](net["first"](x))).relu())
    ddp = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    kind = getattr(torch.optim, "Muon", torch.optim.NAdam)  # torch 2.9 has the first Muon
    optimizers = [
        kind([net["first"].weight], lr=0.02),
        torch.optim.AdamW([*net["norm"].parameters(), *net["last"].parameters()], lr=0.01),
    ]
    with sparsync.attach(ddp, optimizers) as sync:
        assert not ddp.broadcast_buffers
        before = net["unused"].weight.clone(), net["frozen"].weight.clone()
        for step in range(9):
            for optimizer in optimizers:  # in turn, like two networks that play against each other
                backward(ddp, step)
                optimizer.step()
                ddp.zero_grad()
        sync.finish()
        assert same_everywhere(flat(net))
        assert same_everywhere(net["norm"].running_mean)
        torch.testing.assert_close(before[0], net["unused"].weight)  # rounding was delivered
        assert torch.equal(before[1], net["frozen"].weight)
        assert sync.stats()["local_steps"] == 9
    assert ddp.broadcast_buffers


def replaced_by(net, other):
    """Load another model's weights without the handle, as a script might."""
    (net.module if hasattr(net, "module") else net).load_state_dict(other.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("wrap", [ddp_model, model])
@pytest.mark.parametrize("settings", [{}, {"delay": 1, "period": 2, "momentum": 0.9}])
def test_a_checkpoint_that_is_loaded_after_attach_is_the_start_of_all(wrap, settings):
    ends = []
    for late in (False, True):
        net, outer = wrap(seed=3 if late else 5), OuterStep(**settings) if settings else None
        optimizer = adam(net)
        with sparsync.attach(net, optimizer, outer, exchange="updates") as sync:
            if late:
                if dist.get_rank() == 0:  # a pass of one rank, as to find the batch size
                    with sync.no_sync():
                        backward(net, 0)
                replaced_by(net, model(seed=5))
            for step in range(5):
                step_of(net, optimizer, step)
            ends += [flat(net), shared_of(sync, net)]
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


@on_ranks(2)
def test_weights_that_only_one_rank_loads_are_refused_by_all():
    net = model()
    optimizer = adam(net)
    with sparsync.attach(net, optimizer, exchange="updates"):
        if dist.get_rank() == 1:
            replaced_by(net, model(seed=5))
        words = [
            "the weights that were loaded after attach",
            "none, but those of attach",
            "float32[1",
        ]
        with refused(*words, error=PeerError):
            step_of(net, optimizer, 0)


@on_ranks(2)
def test_weights_that_are_replaced_between_steps_are_refused_by_all():
    """In-place and loaded replacements are refused; small or temporary changes are accepted."""
    net = model()
    optimizer = adam(net)
    with sparsync.attach(net, optimizer, exchange="updates") as sync:
        for step in range(3):
            step_of(net, optimizer, step)
        before = copy.deepcopy(net)
        with torch.no_grad():  # sharpness-aware minimisation goes there and back
            for factor in (2.0, 0.5):
                torch._foreach_mul_([*net.parameters()], factor)
        step_of(net, optimizer, 3)
        with torch.no_grad():  # decay, or a clip
            torch._foreach_mul_([*net.parameters()], 0.99)
        step_of(net, optimizer, 4)
        replaced_by(net, model(seed=5))
        with refused("local step 5: the weights were replaced since the last step"):
            step_of(net, optimizer, 5)
        replaced_by(net, before)
        sync.load_state_dict(sync.state_dict())  # which shows that it is intended
        step_of(net, optimizer, 5)


@on_ranks(2)
def test_logs_and_the_sentinel_see_exchanges():
    net, seen = model(), []
    optimizer = torch.optim.AdamW(net.parameters())
    monitoring = sparsync.Monitoring(
        log=lambda step, values: seen.append((step, values["bytes_sent"])),
        sentinel=sparsync.Sentinel(period=3),
    )
    with sparsync.attach(net, optimizer, monitoring=monitoring) as sync:
        for step in range(6):
            step_of(net, optimizer, step)
        # at first on every step
        assert [step for step, _ in seen] == list(range(6)) and all(sent for _, sent in seen)
        sync.outer.memory["shared"][dist.get_rank()] += 1
        with refused("the shared weights", error=PeerError):
            for step in range(3):
                step_of(net, optimizer, step)
        step_of(net, optimizer, 9)  # a difference is no exchange that broke off


@on_ranks(2)
@pytest.mark.parametrize(("place", "call"), [("sync", "check_replicas"), ("ranks", "equalise_")])
def test_exchanges_end_after_a_comparison_has_broken_off(place, call):
    net, module = model(), importlib.import_module(f"sparsync.updates.{place}")
    optimizer, compare = adam(net), getattr(module, call)
    monitoring = sparsync.Monitoring(sentinel=sparsync.Sentinel(period=1))

    async def failing(*_):
        raise PeerError("the other rank is gone")

    with sparsync.attach(net, optimizer, monitoring=monitoring) as sync:
        step_of(net, optimizer, 0)
        setattr(module, call, failing)
        try:
            with refused("the other rank is gone", error=PeerError):
                step_of(net, optimizer, 1) if call == "check_replicas" else sync.finish()
        finally:
            setattr(module, call, compare)
        with refused("an earlier exchange broke off (the other rank is gone)"):
            step_of(net, optimizer, 2)


@on_ranks(2)
def test_a_failed_exchange_raises_from_the_optimizer_and_changes_nothing():
    net = model()
    optimizer = adam(net)

    async def failing(unit):
        raise PeerError("the other rank is gone")

    with sparsync.attach(net, optimizer) as sync:
        for step in range(3):
            step_of(net, optimizer, step)
        residual, shared = sync.reducer.residuals[0].value.clone(), shared_of(sync, net)
        exchange, sync.reducer.exchange = sync.reducer.exchange, failing
        with refused("the other rank is gone", error=PeerError):
            step_of(net, optimizer, 3)
        assert torch.equal(residual, sync.reducer.residuals[0].value)
        assert torch.equal(shared, shared_of(sync, net))
        sync.reducer.exchange = exchange
        broken = "an earlier exchange broke off (the other rank is gone)"
        with refused(broken):
            step_of(net, optimizer, 4)
        with refused(broken):
            sync.finish()
        assert torch.equal(residual, sync.reducer.residuals[0].value)


@on_ranks(2)
def test_attach_says_what_it_exchanges_and_why():
    said = io.StringIO()
    net = ddp_model()
    with contextlib.redirect_stderr(said):
        with sparsync.attach(net, torch.optim.SGD(net.parameters(), lr=0.1)) as sync:
            assert sync.stats()["exchange"] == "gradients"
        with sparsync.attach(net, torch.optim.AdamW(net.parameters())) as sync:
            assert sync.stats()["exchange"] == "updates"
    told = ["sparsync: exchanges all 1,715 grad", "sparsync: exchanges updates: AdamW"]
    told *= dist.get_rank() == 0
    assert [line[:34] for line in said.getvalue().splitlines()] == told


@on_ranks(2)
def test_auto_exchanges_what_takes_fewer_seconds_per_step():
    """Slow links get updates and fast ones dense gradients; without DDP, only updates can be chosen."""
    for beta, exchange, way in (
        (1e-3, "updates", "updates on every step take about "),
        (0.0, "gradients", "dense gradients take about "),
    ):

        async def known(_comm, beta=beta):
            return Calibration(Machine(alpha=0.0, beta=beta), {}, (), (), (0, 0))

        net = ddp_model()
        optimizer = adam(net)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense_or_updates, "calibrate", known)
            sync = sparsync.attach(net, optimizer, "auto")
        with sync:
            for step in range(4):
                step_of(net, optimizer, step)
            stats = sync.stats()
            assert stats["exchange"] == exchange
            assert [text.startswith(way) for text in stats["choices"]] == [True]
            assert "the number of steps to a given loss" in stats["choices"][0]
            assert gathered(stats["choices"]) == [stats["choices"]] * 2
            if exchange == "updates":
                sync.finish()
        assert same_everywhere(flat(net))
    plain = model()
    with sparsync.attach(plain, adam(plain), "auto") as sync:
        assert sync.stats()["exchange"] == "updates" and sync.stats()["period"] == 1


@on_ranks(2)
def test_auto_refuses_a_density_before_it_measures():
    """The density is refused whatever the links, because dense gradients would ignore it."""
    net = ddp_model()

    async def never(_comm):
        raise AssertionError("the links were measured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_or_updates, "calibrate", never)
        with refused("density is 0.1, but algorithm= determines"):
            sparsync.attach(net, adam(net), "auto", 0.1)


@on_ranks(2)
@pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.slow), "zmq"])
def test_auto_says_where_dense_wins(transport):
    """This is reported once, after 30 steps, unless updates were requested or dense takes longer."""
    measure, calls, per_step = advice.seconds_of_dense, [], set()
    for exchange, dense, says in (("auto", 0.0, 1), ("auto", 1e9, 0), ("updates", 0.0, 0)):

        def known(outer, dense=dense):
            calls.append(measure(outer))
            return dense

        said, net = io.StringIO(), ddp_model()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
            patch.setattr(advice, "seconds_of_dense", known)
            optimizer, carried = adam(net), sparsync.Transport(transport)
            with sparsync.attach(net, optimizer, exchange=exchange, transport=carried) as sync:
                for step in range(40):
                    step_of(net, optimizer, step)
                per_step.add(sync.stats()["bytes_sent_per_local_step"])
        lines = [line for line in said.getvalue().splitlines() if "dense wins" in line]
        assert len(lines) == (says if dist.get_rank() == 0 else 0)
        assert all("plain DDP loses nothing" in line for line in lines)
    assert len(per_step) == 1  # the bytes that measure the links count for no step
    assert len(calls) == 2 and all(0 < seconds < 10 for seconds in calls)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", ["demo", "updates"])
def test_other_rates_and_other_outer_settings_are_found_at_attach(algorithm):
    """With steps by sign, weights would diverge at once if ranks had different rates."""
    odd = dist.get_rank() == 2
    for rate, settings, words in (
        (0.02 if odd else 0.01, {}, "rates=[[0.02]]"),
        (0.01, {"outer_lr": 0.9 if odd else 1.0}, "'outer_lr': 0.9"),
        (0.01, {"period": AdaptivePeriod(0.2 if odd else 0.1)}, "AdaptivePeriod(drift=0.2"),
    ):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        outer = OuterStep(**{**OUTER_SETTINGS[algorithm], **settings})
        with refused("ranks disagree on settings", words, error=PeerError):
            sparsync.attach(net, optimizer, outer)
    text = torch.Tensor.__repr__
    for rate, equal in ((torch.tensor(0.01), True), (torch.tensor(0.01 + 1e-6 * odd), False)):
        # on a GPU, the text of a tensor names the rank's device
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        told = refused("ranks disagree on settings", "rates=[[0.0100", error=PeerError)
        with pytest.MonkeyPatch.context() as patch, contextlib.nullcontext() if equal else told:
            patch.setattr(
                torch.Tensor, "__repr__", lambda *x, **k: f"{text(*x, **k)} of {dist.get_rank()}"
            )
            sparsync.attach(net, optimizer, OuterStep(**OUTER_SETTINGS[algorithm])).close()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02 if odd else 0.01)
    local = OuterAverager(net, **OUTER_SETTINGS["demo"], optimizer=optimizer)
    with refused("the learning rate of a step by signs", "rank 2 has 0.02", error=PeerError):
        local.step()


@on_ranks(3)
@pytest.mark.parametrize("moment", ["local", "frozen", "refreshed"])
def test_update_space_adam_keeps_replicas_equal(moment):
    net = model()
    optimizer = UpdateSpaceAdamW(
        net, 0.01, density=0.1, second_moment=moment, refresh_period=3, warmup_steps=2
    )
    for step in range(8):
        step_of(net, optimizer, step)
    assert same_everywhere(flat(net))
    squares = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    # step 8 = 2 + 2 * 3: refreshed a moment ago
    assert same_everywhere(squares) == (moment != "local")


# ---- practices that write to the weights between steps -----------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as published, except that it perturbs every second input."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.AdamW(parameters, lr=0.01)
        super().__init__(self.base_optimizer.param_groups, {})
        self.param_groups = self.base_optimizer.param_groups
        (self.perturbed,) = (group["params"] for group in self.param_groups)

    @torch.no_grad()
    def first_step(self):
        self.old = [p.data.clone() for p in self.perturbed]
        for p in self.perturbed:
            if p.dim() == 2 and p.shape[1] == 30:
                p[:, 1::2].add_(p.grad[:, 1::2], alpha=0.05 / float(p.grad.norm()))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, its in zip(self.perturbed, self.old, strict=True):
            p.data = its
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()


@on_ranks(2)
@pytest.mark.parametrize("wrap", [ddp_model, model])
@pytest.mark.parametrize("closure", [False, True])
def test_sam_steps_once_per_iteration(wrap, closure):
    """SAM's second pass starts from weights that each rank has perturbed by its own gradients.

    A sample of the weights may not show the perturbation, e.g. if only norms are perturbed. With a
    period of 3, every exchange begins on unperturbed weights.
    """
    net = wrap()
    optimizer = Sam(net.parameters())
    outer = OuterStep(algorithm="dense", density=1.0, period=3, residual="weights")
    with sparsync.attach(net, optimizer, outer, exchange="updates") as sync:
        for step in range(7):
            if closure:
                optimizer.step(lambda step=step: backward(net, step))
            else:
                backward(net, step)
                optimizer.first_step()
                backward(net, step)
                optimizer.second_step()
            assert sync.stats()["local_steps"] == step + 1
            assert same_everywhere(flat(net)) == (step % 3 == 2)
        sync.finish()
        assert same_everywhere(flat(net))


@on_ranks(2)
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_other_numbers_of_steps_are_told_by_finish_and_save(transport, folder):
    """The error names both counts, even in an exchange in which other ranks do not take part."""
    net, rank = model(), dist.get_rank()
    optimizer, carried = adam(net), sparsync.Transport(transport, timeout=20.0)
    outer = OuterStep(algorithm="dense", density=1.0, period=4, residual="weights")
    sync = sparsync.attach(net, optimizer, outer, exchange="updates", transport=carried)
    for step in range(5):
        step_of(net, optimizer, step)
    both, more = (
        "ranks have done 5 to 6 local steps, this one",
        "call sync.step() as often as the other ranks' optimizers step",
    )
    if rank == 0:
        sync.step()
    before = flat(net)
    with refused(f"finish(): {both} {6 - rank}", more, error=PeerError):
        sync.finish()
    with refused(f"nothing was saved: {both} {6 - rank}", more, error=CheckpointError):
        sparsync.save(sync, folder / "run")
    with refused(f"nothing was saved: {both} {6 - rank}", more, error=CheckpointError):
        save_beside(sync, net, folder / "beside")
    assert torch.equal(flat(net), before) and not list(folder.rglob("*sparsync-rank*"))
    if rank == 1:
        sync.step()
    assert sparsync.save(sync, folder / "run").name == "000001-step-00000006"
    if transport == "torch":  # gloo's messages have no headers, so ranks wait for the deadline
        sync.close()
        return
    here, there = ("exchange 1, local step 7", "exchange 1, local step 6")[:: 1 - 2 * rank]
    apart = f"in finish(): ranks have done 6 to 8 local steps, this one {(8, 6)[rank]}; "
    named = f"rank {rank}, {here}: ", f"rank {1 - rank} sent one of {there}", apart, more
    with refused(*named, error=PeerError):
        if rank == 0:
            sync.step()
            sync.step()  # the period closes
        else:
            sync.finish()
    sync.close()


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_rank_that_leaves_an_iteration_out_measures_no_gradient(kind):
    """A former one, or a former step, would count as the gradient of this iteration."""
    net = model()
    optimizer = kind(net.parameters(), lr=0.01)
    with sparsync.attach(net, optimizer, OuterStep(**{**ONE_BIT, "period": 1})) as sync:
        seen = []
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                sync.step()
            else:
                step_of(net, optimizer, step)
            noise = sync._weights.noise
            seen.append(noise._last.clone())
        assert seen[1].any() and seen[3].any()
        assert bool(seen[2].any()) == (dist.get_rank() == 0)
        sync.finish()


@on_ranks(2)
def test_finish_is_named_where_another_rank_exchanges(folder):
    net, rank = model(), dist.get_rank()
    outer = OuterStep(algorithm="dense", density=1.0, period=2, fragments=2, residual="weights")
    sync = sparsync.attach(net, adam(net), outer, transport=sparsync.Transport(timeout=20.0))
    with refused("in phase 'finish'" if rank else "phase 'finish'", error=PeerError):
        sync.finish() if rank else sync.step()
    sync.close()


@on_ranks(2)
def test_a_buffer_that_grew_to_other_sizes_is_named_by_finish():
    net, rank = model(), dist.get_rank()
    net.register_buffer("seen", torch.zeros(1))
    with sparsync.attach(net, adam(net)) as sync:
        net.seen = torch.zeros(2 + rank)
        here, there = ("'seen (2,)'", "'seen (3,)'")[:: 1 - 2 * rank]
        with refused(
            f"rank {rank} compares {here} where rank {1 - rank} compares {there}",
            "equal sizes",
            error=PeerError,
        ):
            sync.finish()


@on_ranks(2)
def test_clipped_weights_are_no_other_model_and_a_load_inside_shared_is_refused():
    net = ddp_model()
    optimizer = adam(net)
    with sparsync.attach(net, optimizer) as sync:
        for step in range(4):
            step_of(net, optimizer, step)
            with torch.no_grad():
                for p in net.parameters():
                    p.clamp_(-0.02, 0.02)  # a critic's, as in WGAN
        saved = sync.state_dict()
        with sync.shared(), refused("load_state_dict() within shared()"):
            sync.load_state_dict(saved)


@on_ranks(2)
@pytest.mark.parametrize("copied", [True, False])
def test_a_program_that_writes_its_own_copies_over_what_ranks_exchange_is_refused(copied):
    """Ranks step against each other; where they step the model itself, they undo nothing."""
    net = model()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in net.parameters()]
    stepped = copies if copied else list(net.parameters())
    optimizer = torch.optim.SGD(stepped, lr=0.01, maximize=dist.get_rank() == 1)
    outer = OuterStep(algorithm="dense", period=1, density=1.0)
    sync = sparsync.attach(net, exchange="updates", algorithm=outer)

    def step():
        net(torch.ones(2, 20))
        for p in stepped:
            p.grad = torch.full_like(p, 1.0 if sync.steps else 1.5)
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(net.parameters(), copies if copied else stepped, strict=True):
                p.copy_(copy)
        sync.step()

    # after i steps a copy is i + 0.5 steps away from the model: from step 9 on more than 10 times a step
    for _ in range(18):
        step()
    if copied:
        with refused("local step 18", "ParameterList"):
            step()
        with refused("AdamW", "ParameterList(copies)"):
            sparsync.attach(model(), torch.optim.AdamW(copies))
    else:
        step()
        assert sync.stats()["exchanges"] == 19
    sync.close()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("gradients", ddp_model),
        ("gradients", model),
        ("updates", ddp_model),
        ("updates", model),
        ("averages", model),
        ("sums", model),
    ],
)
def test_a_default_device_of_the_program_changes_nothing(kind, wrap, folder):
    """As ``torch.set_default_device("cuda")`` would; no rank can compute on "meta"."""
    given = {step: batch(step) for step in range(4)}
    ends = []
    for place in (torch.device("cpu"), torch.device("meta")):
        net = wrap()
        with place:
            if kind == "sums":
                with sparsync.connect() as comm:
                    ends.append(
                        sparsync.allreduce(flat(net) * (1 + comm.rank), comm, k=9).total.to_dense()
                    )
                continue
            if kind == "averages":
                optimizer, sync = torch.optim.SGD(net.parameters(), lr=0.1), LocalSgd(net, period=2)
            elif kind == "updates":
                optimizer = torch.optim.AdamW(net.parameters())
                sync = sparsync.attach(net, optimizer)
            else:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                where = {"replicate": dist.group.WORLD} if wrap is model else {}
                sync = sparsync.attach(net, optimizer, density=0.1, **where)
            for x, y in given.values():
                optimizer.zero_grad()
                (net(x) - y).pow(2).mean().backward()
                optimizer.step()
                if kind == "averages":
                    sync.step()
            if kind != "averages":
                sparsync.save(sync, folder / place.type)
                sparsync.load(sync, folder / place.type)
            sync.finish()
            sync.close()
        ends.append(flat(net))
    assert torch.equal(*ends)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gradients", "updates", "averages"])
def test_buffers_that_cannot_be_averaged_are_no_obstacle(kind):
    net, rank = model(), dist.get_rank()
    for saved in (True, False):
        for name, buffer in {
            "coo": torch.eye(2).to_sparse(),
            "csr": torch.eye(2).to_sparse_csr(),
            "expanded": torch.full((1,), -1e9).expand(3, 3),
            "eight_bits": torch.full((3,), 1.0 + rank).to(torch.float8_e4m3fn),
        }.items():
            net.register_buffer(f"{name}_{saved}", buffer, persistent=saved)
    net.constant = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    if kind == "averages":
        optimizer, sync = torch.optim.SGD(net[0].parameters(), lr=0.1), LocalSgd(net, period=2)
    elif kind == "updates":
        optimizer = torch.optim.AdamW(net[0].parameters())
        sync = sparsync.attach(net, optimizer)
    else:
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
        sync = sparsync.attach(net, optimizer, replicate=dist.group.WORLD)
    for step in range(3):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
        if kind == "averages":
            sync.step()
    sync.load_state_dict(copy.deepcopy(sync.state_dict()))
    sync.finish()
    assert same_everywhere(flat(net[:4]))
    if kind != "gradients":
        assert net.eight_bits_True.float().tolist() == [1.0] * 3  # rank 0's
    sync.close()
