"""Test practices with models: parameters, layout, changes, DDP's settings and compilation."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.checkpoint import checkpoint

import sparsync
from sparsync import Correction, attach
from tests.on_ranks import gathered, refused

from .models import Branches, channels_last, normed, tied
from .practice import section
from .training import (
    DDP_COLUMNS,
    SPARSE,
    STEPS,
    Case,
    Training,
    added,
    assert_close,
    attached,
    batch,
    equal_on_all_ranks,
    everywhere,
    gradients,
    here,
    local_gradients,
    loop,
    mean_square,
    moved,
    network,
    residuals,
    same_training,
    sgd,
    weights,
)

practice = section(__name__, "Models")


AveragedModel = torch.optim.swa_utils.AveragedModel


@practice(
    "tied parameters",
    everywhere="works. Tied parameters count as one parameter, with one set of residual entries "
    "and one gradient.",
)
def test_tied(column):
    same_training(column, tied)


def frozen():
    net = network()
    net[0].requires_grad_(False)
    return net


@practice(
    "frozen parameters",
    everywhere="works. Frozen parameters have no residual and are not sent.",
    averaging="works. Frozen parameters do not change; `finish()` makes them equal if ranks differ.",
)
def test_frozen(column):
    same_training(column, frozen)


@practice(
    "unused parameters, differing between ranks and steps",
    attach="works. Requires `find_unused_parameters=True`. A rank that does not use a parameter "
    "contributes a zero gradient. The parameter's residual is still delivered, even if no rank "
    "uses the parameter.",
    updates="works. Requires `find_unused_parameters=True`. Rounding may change parameters that "
    "no rank trains, but less than it changes neighbouring parameters; `finish()` restores them.",
    local="works. No setting is needed. The residual of an unused parameter is still delivered.",
    averaging="works. No setting is needed.",
)
def test_unused(column):
    options = {"find_unused_parameters": True}
    same_training(column, Branches, ddp=options)
    if column == "updates":  # with the default settings, which round to 2 bits
        net = Branches()
        ddp, before = Ddp(net, **options), net.never.weight.clone()
        optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.0)
        with attach(ddp, optimizer) as sync:
            loop(ddp, optimizer, 8)
            sync.finish()
            assert equal_on_all_ranks(weights(net))
        torch.testing.assert_close(net.never.weight, before)


@practice(
    "parameters frozen after the start, all or some",
    attach="works. Either freeze all parameters together (as GANs do, alternating between their "
    "players), or freeze some of them, with `find_unused_parameters=True`. Otherwise, the next "
    "forward pass is refused, because DDP would wait for the gradients. The weights of a frozen "
    "layer no longer change: the undelivered part of its gradients is dropped.",
    updates="works. As with `attach`, but DDP itself raises the error, one step later. Changes in "
    "the weights that are not delivered yet are still delivered.",
    local="works. The residual of a frozen parameter is still delivered.",
    averaging="works. A frozen parameter is still averaged. "
    "(tests/unit/test_averager.py::test_a_model_that_changes_is_refused_but_may_freeze)",
)
def test_frozen_later(column):
    if column == "attach":
        _frozen_for_a_while()
        return
    training = Training(column, network(), ddp={"find_unused_parameters": True})
    for step in range(STEPS):
        training.backward(step)
        if step == 1:
            training.net[0].requires_grad_(False)
        training.step()
    training.finish()
    training.close()
    assert equal_on_all_ranks(weights(training.net))


def _frozen_for_a_while():
    with attached(network()) as (ddp, _):
        ddp.requires_grad_(False)
        ddp(torch.ones(2, 20, requires_grad=True)).sum().backward()
        ddp.requires_grad_(True)
        mean_square(ddp, 0, here()).backward()
        assert equal_on_all_ranks(gradients(ddp))
    net = network()
    with attached(net, ddp={"find_unused_parameters": True}) as (ddp, _):
        net[0].weight.requires_grad_(False)
        mean_square(ddp, 0, here()).backward()
        twin = network()
        twin[0].weight.requires_grad_(False)
        mine = local_gradients(Case(), twin, 0, here())
        mean = added((1 / dist.get_world_size(), everywhere(mine)))
        assert_close(gradients(net), mean, 1e-6, "with a frozen layer")


CHANGES = {
    "0.weight": lambda net: net[0].weight.requires_grad_(True),
    "2.bias": lambda net: net[2].bias.requires_grad_(False),
    "3.weight": lambda net: net.__setitem__(3, nn.Linear(30, 5)),
    "4.": lambda net: net.append(nn.Linear(5, 5)),
}


@practice(
    "parameters unfrozen, added or replaced after the start (also in `model.module`)",
    attach="refused. DDP would not exchange their gradients, so each rank would train them alone. "
    "The error in the next forward pass names the parameter.",
    updates="refused. As with `attach`.",
    UpdateSpace="refused. The error, raised by `step()`, names the parameter.",
    averaging="refused. The error, raised by `step()`, names the parameter. "
    "(tests/unit/test_averager.py::test_a_model_that_changes_is_refused_but_may_freeze)",
)
def test_changed_models(column):
    attach = column in DDP_COLUMNS
    for name in CHANGES if attach else ("0.weight", "3.weight"):
        net = network()
        net[0].weight.requires_grad_(False)
        training = Training(column, net, 1.0)
        if attach:
            training.backward(0)
        CHANGES[name](net)
        if column == "updates" and name == "2.bias":  # frozen: DDP itself raises, a step later
            training.backward(1)
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                training.backward(2)
            training.close()
            continue
        said = {"0.weight": " trains now", "3.weight": " was replaced by another parameter"}
        with refused(f"'{name}", said.get(name, "")):
            training.backward(1) if attach else training.handle.step()
        training.close()
    if not attach:
        return
    with attached(network(), column=column) as (ddp, _):
        ddp.module = network()
        with refused("'0.weight' was replaced"):
            mean_square(ddp, 0, here())


@practice(
    "`load_state_dict(assign=True)` after the start",
    attach="refused. Neither the exchange nor the optimizer knows the new parameters. The error "
    "in the next forward pass names the first new parameter. Load with `assign=False`, which "
    "copies values. The same applies without DDP (`replicate=`).",
    updates="refused. As with `attach`.",
    UpdateSpace="refused. As with `attach`, but `step()` raises the error.",
)
def test_assigned_parameters(column):
    for steps in (0, 1):
        training = Training(column, network())
        for step in range(steps):
            training.backward(step)
            training.step()
        copied = {name: value.clone() for name, value in training.net.state_dict().items()}
        training.net.load_state_dict(copied, assign=True)
        with refused("'0.weight' was replaced", "load_state_dict(assign=True)", "assign=False"):
            training.backward(steps)
            training.step()
        training.close()


@practice(
    "a model that is converted or moved after the start (`ddp.double()`, `ddp.cpu()`), and perhaps back",
    attach="refused. DDP would no longer receive the model's gradients (without sparsync, this "
    "happens silently), so the next forward pass raises an error. Convert a copy of `ddp.module` "
    "instead.",
    updates="refused. A forward pass is refused only while the model's dtype or device differs from the "
    "original one. Converting the model and converting it back does no harm.",
)
def test_converted_models(column):
    for steps in (0, 2):
        training = Training(column, network())
        for step in range(steps):
            training.backward(step)
            training.step()
        training.net.double()
        with refused("'0.weight' was torch.float32 on cpu when", "is torch.float64 on cpu now"):
            training.called(torch.ones(2, 20, dtype=torch.float64))
        training.net.float()
        if column == "updates":
            training.backward(steps)
            training.step()
        else:
            with refused("'0.weight' was converted or moved", "copy.deepcopy(ddp.module)"):
                training.backward(steps)
        training.close()
    net = network()
    if column == "attach":
        with (
            sparsync.attach(net, replicate=dist.group.WORLD),
            refused("is torch.float64 on cpu now"),
        ):
            net.double()(torch.ones(2, 20, dtype=torch.float64))


def _ignoring(net, *names):
    Ddp._set_params_and_buffers_to_ignore_for_model(net, names)
    return net


@practice(
    "parameters that DDP ignores (`_set_params_and_buffers_to_ignore_for_model`), replaced later",
    attach="works. Ignored parameters are identified by name, as in DDP, and stay local to each "
    "rank.",
    updates="works. As with `attach`.",
)
def test_ignored_by_name(column):
    net = _ignoring(network(), "3.weight", "3.bias")
    training = Training(column, net)
    torch.manual_seed(here())
    net[3] = nn.Linear(30, 5)
    rest = dict(net.named_parameters())
    own = {name: rest.pop(name) for name in ("3.weight", "3.bias")}
    training.optimizer = sgd(net.parameters()) if column == "attach" else training.optimizer
    for step in range(STEPS):
        training.backward(step)
        assert all(parameter.grad is not None for parameter in own.values())
        training.optimizer.step()
    training.finish()
    training.close()
    assert moved(network()[:3], weights(net[:3]))
    assert equal_on_all_ranks(weights(net[:3]))
    assert not equal_on_all_ranks(weights(net[3]))


@practice(
    "`torch.func.functional_call` of the wrapped model",
    attach="works. Tensors computed from the parameters (`p - lr * g`) pass their gradients on to "
    "the parameters, whose gradients are exchanged. Gradients of tensors that do not depend on "
    "the parameters are local, as under plain DDP.",
    updates="works. Gradients are local. The shared weights follow the model's own parameters.",
)
def test_functional_call(column):
    with attached(network(), column=column) as (ddp, _):
        for step in range(2):  # at the first forward pass there is no earlier one
            ddp.zero_grad()
            doubled = {name: 2 * parameter for name, parameter in ddp.named_parameters()}
            x, y = batch(step)
            called = torch.func.functional_call(ddp, doubled, x)
            (called - y).pow(2).mean().backward()
            twin = network()
            doubled = {name: 2 * parameter for name, parameter in twin.named_parameters()}
            (torch.func.functional_call(twin, doubled, x) - y).pow(2).mean().backward()
            mine = gradients(twin)
            if column == "attach":
                mine = added((1 / dist.get_world_size(), everywhere(mine)))
            assert_close(gradients(ddp.module), mine, 1e-6, "of parameters behind others")
        ddp.zero_grad()
        others = {n: p.detach().clone().requires_grad_() for n, p in ddp.named_parameters()}
        torch.func.functional_call(ddp, others, x).sum().backward()
        assert all(other.grad is not None for other in others.values())
        assert all(parameter.grad is None for parameter in ddp.parameters())


@practice(
    "BatchNorm's buffers",
    attach="works. DDP broadcasts rank 0's buffers before every forward pass.",
    updates="works. At `attach`, all ranks take rank 0's buffers. From then on, each exchange "
    "averages them, and DDP's own broadcast is off; with `DDP(broadcast_buffers=False)`, buffers "
    "stay local. Integer buffers, buffers that are not saved, and frozen parameters that the "
    "model itself changes stay local until `finish()` replaces them with rank 0's.",
    UpdateSpace="works. Buffers stay local.",
    averaging="works. Buffers are averaged or stay local, according to `buffers=`. "
    "(tests/unit/test_averager.py::test_buffers_follow_their_rule)",
)
def test_buffers(column):
    if column == "attach":
        _buffers_are_those_of_rank_0()
        return
    for averaged in (True, False) if column == "updates" else (False,):
        training, alone = Training(column, normed(), ddp={"broadcast_buffers": averaged}), normed()
        for step in range(STEPS):
            training.backward(step)
            # statistics of the inputs do not depend on the weights
            mean_square(alone, step, here())
            training.step()
        training.finish()
        training.close()
        assert equal_on_all_ranks(weights(training.net))
        mean, expected = ({"mean": n[0].running_mean.double()} for n in (training.net, alone))
        if averaged:
            expected = added((1 / dist.get_world_size(), everywhere(expected)))
        assert_close(mean, expected, 1e-6, "statistics")


@practice(
    "buffers that contain Inf: attention masks",
    everywhere="works. Such buffers are treated as constants, and remain unchanged.",
)
def test_masks(column):
    def masked():
        net = network()
        net.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        return net

    same_training(column, masked)


@practice(
    "buffers that no step changes: position tables, finite masks",
    attach="works. Buffers are not exchanged; DDP broadcasts rank 0's, as without sparsync.",
    updates="works. Only a flag per buffer is exchanged. Once a buffer changes on any rank, it is "
    "averaged in every exchange from then on.",
    UpdateSpace="works. Buffers stay local.",
    averaging="works. Buffers are averaged with the model, except those with `persistent=False`. "
    "`OuterAverager` treats them like `updates`.",
)
def test_still_buffers(column):
    sent = []
    for size in (1, 10_000):
        net = network()
        net.register_buffer("table", torch.arange(size).float())
        net.register_buffer("seen", torch.zeros(3))
        training = Training(column, net, 1.0)
        try:
            for step in range(5):
                net.seen += here()  # like a statistic of this rank's own inputs
                if step == 4 and here() == 1:
                    net.table += 1.0
                training.backward(step)
                training.step()
                if step == 3 and column in DDP_COLUMNS:
                    sent.append(training.handle.stats()["bytes_sent_last_exchange"])
            tables = gathered(net.table)
        finally:
            training.close()
        local = {"attach": [0.0, 0.0], "UpdateSpace": [0.0, 1.0]}
        assert [float(table[0]) for table in tables] == local.get(column, [0.5, 0.5])
        assert all(torch.equal(t[1:] - t[:1], torch.arange(1.0, size)) for t in tables)
    assert len(set(sent)) <= 1, "what never changes was sent"


@practice(
    "weights that are loaded after the start",
    attach="works. All ranks must load the same weights, as with plain DDP. The residual and the "
    "optimizer's moments still belong to the former weights. `sparsync.load` restores the "
    "residual together with the weights. Closing the handle and attaching again starts without a "
    "residual.",
    updates="works. Before the first step, all ranks may load the same weights, and training "
    "starts from them. Weights that differ between ranks, or that are loaded between steps, are "
    "refused. "
    "(tests/distributed/test_updates.py::test_a_checkpoint_that_is_loaded_after_attach_is_the_start_of_all)",
    UpdateSpace="works. As with `attach`, but there is no handle to close: make a new optimizer.",
    averaging="works. Before the first step, all ranks begin from the weights that "
    "`load_state_dict` has loaded. Between steps, schemes that keep former weights, such "
    "as WAGMA-SGD's stale models, refuse loaded weights; the other schemes continue from "
    "them.",
)
def test_weights_that_are_loaded_after_the_start(column):
    loaded = network(seed=5).state_dict()

    def end(net, density, steps):
        """Run the steps with negative numbers, load a state, and train from step 0."""
        training = Training(column, net, density)
        kept = []
        try:
            for step in steps:
                if step == 0:
                    if column == "attach":
                        kept.append(training.handle.state_dict())
                    net.load_state_dict(loaded)
                    if column == "attach":
                        kept.append(training.handle.state_dict())
                training.backward(step % STEPS)
                training.step()
            training.finish()
        finally:
            training.close()
        return weights(net), [residuals(state, weights(net)) for state in kept]

    expected, _ = end(network(seed=5), 1.0, range(STEPS))
    for begin in (0, -2):
        found, _ = end(network(), 1.0, range(begin, STEPS))
        assert_close(found, expected, 0.0, f"loaded after {-begin} steps")
    found, kept = end(network(), SPARSE, range(-2, STEPS))
    assert equal_on_all_ranks(found)
    if kept:
        assert any(value.any() for value in kept[0].values())
        assert_close(kept[1], kept[0], 0.0, "the residual")


def _buffers_are_those_of_rank_0():
    def train(ddp):
        loop(ddp, sgd(ddp.parameters()))
        ddp.eval()
        ddp(torch.zeros(1, 20))  # makes DDP broadcast the statistics of the last step
        buffers = {n: b.double() for n, b in ddp.module.named_buffers()}
        return buffers | weights(ddp.module)

    with attached(normed()) as (ddp, _):
        end = train(ddp)
    assert equal_on_all_ranks({n: v for n, v in end.items() if "running" not in n})
    assert_close(end, train(Ddp(normed())), 1e-6, "against plain DDP")


@practice(
    "channels_last",
    attach="works. Residuals are stored in element order, not in memory order, so a saved "
    "residual fits either layout.",
    local="works. Strides do not change.",
)
def test_channels_last(column):
    same_training(column, channels_last)


@practice(
    "copying or pickling the wrapped model (`copy.deepcopy(ddp)`, `torch.save(ddp)`)",
    attach="refused. A copy would train without the exchange. Copy or save `model.module`. "
    "Without DDP (`replicate=`), nothing is wrapped, and a copy is a plain model.",
    updates="refused. As with `attach`; a plain module can be copied.",
)
def test_copies(column):
    with attached(network(), column=column) as (ddp, _):
        mean_square(ddp, 0, here()).backward()
        for copying in (
            lambda: copy.deepcopy(ddp),
            lambda: torch.save(ddp, io.BytesIO()),
            lambda: AveragedModel(ddp),
        ):
            with refused("cannot be copied or pickled", "model.module"):
                copying()
        torch.save(ddp.module, io.BytesIO())
        # the copy has no hook, so this pass is local
        mean_square(copy.deepcopy(ddp.module), 1, here()).backward()


@practice(
    "EMA of the weights (`AveragedModel`)",
    attach="works. Average `model.module`; the EMA is equal on all ranks.",
    updates="works. The EMA is equal on all ranks if it is updated inside `with sync.shared():`; "
    "otherwise, it differs between ranks.",
    UpdateSpace="works. The EMA is equal on all ranks.",
    averaging="works. The EMA is equal on all ranks whenever the models are: after every step "
    "with period 1, or after `finish()`.",
)
def test_ema(column):
    training = Training(column, network())
    ema, own = (
        AveragedModel(training.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        for _ in range(2)
    )
    by_hand = None
    for step in range(STEPS):
        training.backward(step)
        training.step()
        own.update_parameters(training.net)
        if column == "updates":
            with training.handle.shared():
                ema.update_parameters(training.net)
        else:
            ema.update_parameters(training.net)
            now = weights(training.net)
            by_hand = now if by_hand is None else added((0.5, by_hand), (0.5, now))
    assert equal_on_all_ranks(weights(ema))
    assert equal_on_all_ranks(weights(own)) == (column != "updates")
    if by_hand is not None:
        assert_close(weights(ema.module), by_hand, 1e-6, "EMA")
    training.close()


practice = section(__name__, "DDP's settings, compilation")


@practice(
    "`static_graph=True`",
    attach="works. The exchange of the first step takes place after the backward pass.",
    updates="works. There is no difference from a graph that is not static.",
)
def test_static_graph(column):
    same_training(column, ddp={"static_graph": True, "bucket_cap_mb": 0.001})


@practice(
    "`static_graph=True` with parameters that are never used",
    attach="works. The correction's decay and velocity also apply to unused parameters.",
)
def test_unused_ones_decay_in_a_static_graph(column):
    ends = []
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        correction = Correction(weight_decay=0.5)
        with attached(Branches(), ddp=options, correction=correction) as (ddp, _):
            for _ in range(STEPS):
                ddp.zero_grad()
                ddp(torch.ones(4, 20)).pow(2).mean().backward()
            ends.append(gradients(ddp.module))
    assert_close(*ends, 1e-6, "static_graph")
    decay = added((0.5, weights(Branches())))["never.weight"]
    assert torch.allclose(ends[0]["never.weight"], decay, atol=1e-6)


@practice(
    "`gradient_as_bucket_view=True`, `zero_grad(set_to_none=False)`, many buckets",
    attach="works. Units do not depend on DDP's buckets.",
    updates="works. Nothing depends on DDP's buckets.",
)
def test_bucket_view(column):
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    same_training(column, ddp=options, set_to_none=False)


@practice(
    "`DDP(skip_all_reduce_unused_params=True)`",
    attach="refused. DDP would pass only some buckets to the hook, and perhaps never the last "
    "one. Omit this setting.",
    updates="refused. As with `attach`. With updates, DDP reduces nothing in any case.",
)
def test_skipped_buckets(column):
    if "skip_all_reduce_unused_params" not in inspect.signature(Ddp).parameters:
        return  # torch before 2.13 has no such setting
    ddp = Ddp(network(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with refused("skip_all_reduce_unused_params=True", "omit it"):
        _attach(ddp, column)


@practice(
    "DDP around DDP",
    attach="works. The outer DDP must ignore the parameters of the inner DDP, and both must be "
    "attached. Two that would exchange the same parameters are refused.",
    updates="refused. Only two that would exchange the same parameters are refused.",
)
def test_nested(column):
    with refused("the module of this DDP model", "wrap once"):
        _attach(Ddp(Ddp(network())), column)
    net = network()
    net[3] = Ddp(net[3])
    with refused("'3' of this model", "wrap once"):
        _attach(Ddp(net), column)
    if column == "updates":
        return
    outer = Ddp(_ignoring(net, "3.module.weight", "3.module.bias"))
    with attach(net[3], algorithm="dense"), attach(outer, algorithm="dense"):
        for step in range(STEPS):
            outer.zero_grad()
            mean_square(outer, step, here()).backward()
        mine = local_gradients(Case(), network(), STEPS - 1, here())
    mean = added((1 / dist.get_world_size(), everywhere(mine)))
    # by position, because names differ: one is "3.module.weight"
    found = dict(zip(mean, gradients(net).values(), strict=True))
    assert_close(found, mean, 1e-6, "nested")


def _attach(model, column):
    return attach(model, exchange="gradients" if column == "attach" else "updates")


practice(
    "a second communication hook",
    attach="refused. DDP accepts only one hook; DDP's native mixed precision also uses one. "
    "(tests/distributed/test_ddp.py::test_attach_refuses)",
)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


@practice(
    "`torch.compile` of the wrapped model",
    attach="works. With the default `optimize_ddp`, DDP's hooks run between the compiled "
    "parts. Attach either the compiled model or the DDP model inside it.",
    updates="works. As with `attach`.",
    local="works. Compile the model; `step()` is not compiled.",
    slow=("attach", "UpdateSpace", "averaging"),
)
def test_compiled(column):
    same_training(column, wrap=compiled)
    if column == "updates":  # DDP exchanges nothing, so gradients differ between ranks
        with attached(network(), column=column, wrap=compiled) as (model, _):
            mean_square(model, 0, here()).backward()
            assert not equal_on_all_ranks(gradients(model))


@practice(
    "a container around a DDP model, or the module inside it",
    attach="refused. DDP would continue to exchange all gradients. `attach` refuses a container. "
    "With `replicate=`, the first forward pass inside DDP is refused.",
    updates="refused. As with `attach`. The module inside is refused in DDP's first forward pass.",
)
def test_around_ddp(column):
    exchange = "gradients" if column == "attach" else "updates"
    inside = {"replicate": dist.group.WORLD} if column == "attach" else {}
    for container in (nn.Sequential(Ddp(network())), nn.ModuleDict({"net": Ddp(network())})):
        with refused(" wraps a DistributedDataParallel ('", "give attach() that inner module"):
            sparsync.attach(container, sgd(container.parameters()), exchange=exchange)
    for wrap in (lambda ddp: ddp, compiled):
        net = network()
        called = wrap(Ddp(net))
        start, optimizer = weights(net), sgd(net.parameters())
        handle = sparsync.attach(net, optimizer, exchange=exchange, **inside)
        with handle, refused("runs inside a DistributedDataParallel", "attach the DDP model"):
            called(torch.zeros(4, 20))
        assert not moved(net, start)


@practice(
    "`torch.compile` of the model before it is wrapped",
    attach="works. No difference, except that names in saved states have torch's prefix.",
    local="works. As with `attach`.",
)
def test_compiled_inside(column):
    same_training(column, wrap_inner=compiled)


@practice(
    "`torch._dynamo.config.optimize_ddp = 'python_reducer'`",
    attach="refused. This reducer passes on gradients one by one, and does not signal the last "
    "one. Use the default setting when wrapping the model.",
    updates="refused. As with `attach`; alternatively, attach the plain module.",
)
def test_python_reducer(column):
    before = torch._dynamo.config.optimize_ddp
    try:
        torch._dynamo.config.optimize_ddp = "python_reducer"
        ddp = Ddp(network())
    finally:
        torch._dynamo.config.optimize_ddp = before
    with refused("python_reducer", "wrap again"):
        _attach(ddp, column)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.net, self.reentrant = network(), reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for part in self.net:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@practice("activation checkpointing, not reentrant", everywhere="works. No difference.")
def test_checkpointed(column):
    same_training(column, lambda: Checkpointed(reentrant=False))


@practice(
    "activation checkpointing, reentrant",
    attach="works. No difference, if DDP itself allows it. Without DDP (`replicate=`), it is "
    "refused.",
    local="works. No difference.",
)
def test_checkpointed_reentrant(column):
    same_training(column, lambda: Checkpointed(reentrant=True), ddp={"bucket_cap_mb": 0.001})
