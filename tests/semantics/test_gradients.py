"""Test practices with gradients: accumulation, clipping, NaN, COO gradients and precision."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from sparsync import Correction
from sparsync.units import plan_units
from tests.on_ranks import refused

from .models import Odd, Words
from .practice import section
from .training import (
    RATE,
    SPARSE,
    Training,
    added,
    assert_close,
    attached,
    batch,
    equal_on_all_ranks,
    gradients,
    here,
    mean_square,
    moved,
    network,
    same_training,
    sgd,
    weights,
)

practice = section(__name__, "Gradients")


_SUM = "works. Gradients are local, so they add up as usual."


@practice(
    "gradient accumulation under `no_sync()`",
    attach="works. The sum over micro-batches is exchanged once, in the backward pass of the last "
    "micro-batch. Below density 1, the undelivered part stays in the residual. As with plain DDP, "
    "the forward pass determines whether gradients are exchanged, so it must also be inside the "
    "context.",
    updates=_SUM,
    local=f"{_SUM} Call `step()` once per optimizer step.",
    UpdateSpace=f"{_SUM} They are exchanged in `step()`.",
)
def test_no_sync(column):
    same_training(column, micro=2)


@practice(
    "several backward passes per step without `no_sync()`",
    attach="works. Each pass exchanges its gradients together with the values that are already in "
    "`parameter.grad`; the law holds over both passes. There is one exchange per pass.",
    local=_SUM,
)
def test_backward_twice(column):
    same_training(column, micro=2, no_sync=False)
    if column == "updates":
        with attached(Words(), column=column) as (ddp, sync):
            for micro in range(3):
                mean_square(ddp, micro, here()).backward()
            assert sync.stats()["local_steps"] == 0  # passes do not count as steps


@practice(
    "the same, with momentum or decay in `correction=`",
    attach="refused. The averages of the first pass would enter the momentum a second time. A "
    "forgotten `zero_grad()` is refused for the same reason. Use `no_sync()`. The same applies "
    "without DDP (`replicate=`).",
)
def test_corrected_gradients_count_once(column):
    for view in (False, True):
        ddp_options = {"gradient_as_bucket_view": view}
        correction = Correction(momentum=0.9)
        with attached(network(), SPARSE, ddp=ddp_options, correction=correction) as (ddp, _):
            for step in range(2):
                ddp.zero_grad(set_to_none=step == 0)
                with ddp.no_sync():
                    mean_square(ddp, step, here()).backward()
                mean_square(ddp, step, here()).backward()
            with refused("still in the gradients", "no_sync()"):
                mean_square(ddp, 2, here()).backward()


@practice(
    "a second `backward()` of a kept graph (`retain_graph=True`), or of an older forward pass",
    attach="refused. DDP exchanges once per forward pass, so the gradients of the second pass "
    "would stay on their rank (as they silently do under plain DDP). Add the losses, or use "
    "`no_sync()`. Without DDP (`replicate=`), every pass is exchanged.",
    local=_SUM,
)
def test_second_backward(column):
    if column == "attach":
        _second_backward_is_refused()
        return
    training, once = Training(column, network()), network()
    loss = mean_square(training.called, 0, here())
    loss.backward(retain_graph=True)
    loss.backward()
    mean_square(once, 0, here()).backward()
    assert_close(gradients(training.net), added((2.0, gradients(once))), 1e-6, "twice")
    training.close()


def _second_backward_is_refused():
    with attached(network()) as (ddp, _):
        loss = mean_square(ddp, 0, here())
        loss.backward(retain_graph=True)
        with refused("second backward pass", "no_sync()"):
            loss.backward()
        ddp.zero_grad()
        first, second = mean_square(ddp, 1, here()), mean_square(ddp, 2, here())
        first.backward()
        with refused("second backward pass", "Add the losses"):
            second.backward()
        ddp.zero_grad()
        with ddp.no_sync():  # a pass that is declared as local is allowed
            (0.0 * ddp.module(torch.ones(2, 20))).sum().backward()
        ddp.zero_grad()
        mean_square(ddp, 3, here()).backward()
        assert equal_on_all_ranks(gradients(ddp))


@practice(
    "`backward(create_graph=True)`",
    attach="refused. The graph of a gradient does not pass through the exchange. "
    "`torch.autograd.grad` before `backward()` works.",
    updates="refused. DDP raises torch's \"a leaf Variable that requires grad is being "
    'used in an in-place operation"; pass the plain module to `attach` instead.',
    local="works. Gradients and their graphs are local.",
)
def test_graphs_of_gradients(column):
    if column == "attach":
        with attached(network()) as (ddp, _), refused("create_graph=True", "torch.autograd.grad"):
            mean_square(ddp, 0, here()).backward(create_graph=True)
        return
    if column == "updates":
        with attached(network(), column=column) as (ddp, _), refused("leaf", error=RuntimeError):
            mean_square(ddp, 0, here()).backward(create_graph=True)
        return
    net = Training(column, network()).net
    mean_square(net, 0, here()).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in net.parameters())
    found = torch.autograd.grad(penalty, list(net.parameters()))
    net.zero_grad()  # breaks the cycle of a gradient and its graph
    assert all(bool(g.isfinite().all()) for g in found)
    assert any(bool(g.any()) for g in found)


@practice(
    "clipping of the reduced gradient (`clip_grad_norm_` after `backward()`)",
    attach="works. Gradients and their norms are equal on all ranks. The part that clipping "
    "removes is lost, as in dense training; the residual is not clipped.",
)
def test_clipped_average(column):
    same_training(column, clip=0.05)


@practice(
    "clipping of local gradients",
    attach="works. `Correction(clip=...)` clips before gradients are accumulated; a hook on a parameter "
    "also sees local gradients. "
    "(tests/unit/test_correction.py::test_clipping_equals_torchs_on_one_rank)",
    local="works. `clip_grad_norm_` before `optimizer.step()` clips this rank's gradients.",
    UpdateSpace="works. `clip_grad_norm_` before `step()` clips this rank's gradients.",
)
def test_clipped(column):
    same_training(column, clip=0.05)


practice(
    "NaN or Inf on one rank",
    attach="works. All ranks together raise an error, skip the step or propagate the values "
    "(`nonfinite=`); residuals are unchanged. "
    "(tests/distributed/test_ddp.py::test_nonfinite_gradients_are_refused_collectively)",
    updates="works. Every rank returns to the weights that it had after the last "
    "exchange, and the affected rank drops moments that are not finite; a second "
    "occurrence in a row raises an error. "
    "(tests/distributed/test_updates.py::test_nan_on_one_rank_brings_all_back)",
    UpdateSpace="works. All ranks raise an error; weights, residuals and the affected rank's "
    "moments are unchanged. "
    "(tests/unit/test_adam.py::test_update_space_adam_keeps_its_moments_when_a_step_is_refused)",
    averaging="works. The affected rank raises an error before its values reach other ranks. This "
    "includes averaged buffers and moments. `nonfinite='spread'` lets the values spread. "
    "(tests/unit/test_averager.py::test_what_is_not_finite_stays_at_home_unless_it_may_spread)",
)


@practice(
    "sparse (COO) gradients: embeddings with `sparse=True`",
    attach="works. COO gradients are accumulated into a dense residual; the averages are again in "
    "COO form, and contain the delivered rows.",
    updates="works. The local optimizer applies the gradients; weights are exchanged.",
    UpdateSpace="refused. Build the embedding with `sparse=False`.",
    averaging="works. The local optimizer applies the gradients; weights are averaged.",
)
def test_coo(column):
    if column != "UpdateSpace":
        same_training(column, Words)
        return
    training = Training(column, Words())
    training.backward(0)
    with refused("'words.weight' is sparse", "sparse=False"):
        training.step()


practice = section(__name__, "Precision and devices")


@practice(
    "AMP: bfloat16 autocast",
    everywhere="works. Weights and gradients are float32; no setting is needed.",
)
def test_autocast(column):
    def loss(model, number, rank):
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, number, rank)

    same_training(column, loss=loss, tolerance=2e-3)


_OWN_SCALE = "works. Every rank has its own scale."


@practice(
    "AMP: `GradScaler`, with an overflow on one rank",
    attach="works. With `Monitoring(scaler=...)`, all ranks skip the step and lower their scales, "
    "and residuals are unchanged.",
    updates=f"{_OWN_SCALE} A step that `scaler.step(optimizer)` skips still counts as a local step, "
    "whether or not `Monitoring(scaler=...)` is given. "
    "(tests/distributed/test_updates.py::test_a_step_that_only_one_rank_skips_still_counts)",
    UpdateSpace="refused. If one rank skipped its `step()`, the others would wait for it. "
    "Use bfloat16, which needs no scaler.",
    averaging=f"{_OWN_SCALE} A rank that skips its step contributes its unchanged model.",
)
def test_scaler(column):
    if column == "UpdateSpace":
        _update_space_takes_no_scaler()
        return
    _scaled(column, sgd)


def _scaled(column, optimizer):
    attach = column == "attach"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    settings = {"scaler": scaler} if attach else {}
    training = Training(column, network(), optimizer=optimizer, **settings)
    for step in range(4):
        training.optimizer.zero_grad()
        before, kept = weights(training.net), _kept(training) if attach else None
        overflow = step == 2 and here() == 1
        skips = step == 2 and (attach or here() == 1)
        loss = mean_square(training.called, step, here())
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        assert moved(training.net, before) == (not skips)
        assert scaler.get_scale() == (512.0 if step >= 2 and (attach or here() == 1) else 1024.0)
        if not attach:
            training.average()
        elif skips:
            after = _kept(training)
            assert after.keys() == kept.keys() and kept
            assert all(torch.equal(after[n], kept[n]) for n in kept)
    training.finish()
    assert equal_on_all_ranks(weights(training.net))
    assert all(bool(w.isfinite().all()) for w in weights(training.net).values())
    training.close()


def _kept(training):
    return training.handle.state_dict()["content"]["reducer"]["residual"]


def _update_space_takes_no_scaler():
    training = Training("UpdateSpace", network())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_square(training.net, 0, here())).backward()
    with refused("does not support a GradScaler", "bfloat16"):
        scaler.step(training.optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(training.optimizer)
    assert equal_on_all_ranks(weights(training.net))


@practice(
    "AMP: `GradScaler` with a fused optimizer, whose `step()` is called even for a step "
    "that is skipped",
    attach="works. No difference from an optimizer without `fused=True`.",
    updates="works. A skipped step changes no weights, but counts as a local step. "
    "(tests/unit/test_stepping.py::test_what_a_scaler_skips_counts_once)",
    averaging="works. No difference from an optimizer without `fused=True`.",
)
def test_fused_scaler(column):
    _scaled(column, lambda parameters: torch.optim.SGD(parameters, lr=RATE, fused=True))


@practice(
    "AMP: a `GradScaler` other than the one passed to `attach`, or with none passed",
    attach="refused. The residual would keep the scale of the step that wrote it. The first "
    "`scaler.step(optimizer)` raises an error. If a gradient overflows before that, the error for "
    "the overflow names `scaler=`. A disabled scaler is not refused. The same applies without DDP "
    "(`replicate=`).",
    updates="works. Updates have no scale. "
    "(tests/unit/test_stepping.py::test_what_a_scaler_skips_counts_once)",
)
def test_a_scaler_that_attach_does_not_know(column):
    say = ["by a GradScaler", "Monitoring(scaler=scaler)"]
    other, plain = torch.amp.GradScaler("cpu"), network()
    with attached(network()) as (ddp, _), attached(network(), scaler=other) as (told, _):
        known = sparsync.attach(plain, replicate=dist.group.WORLD)
        for model, words in (
            (ddp, "attach was not given"),
            (told, "other than the one given to attach"),
            (plain, "attach was not given"),
        ):
            optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu")
            before = weights(model)
            scaler.scale(mean_square(model, 0, here())).backward()
            with refused(*say, words):
                scaler.step(optimizer)
            assert_close(weights(model), before, 0.0, "after the refusal")
            torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
            assert moved(model, before)
        known.close()
        scaler.scale(mean_square(plain, 0, here())).backward()
        scaler.step(optimizer)  # nothing is attached any more


@practice(
    "an overflow under `GradScaler` with a `nonfinite=` other than 'propagate'",
    attach="refused. `attach` refuses `scaler=` together with such a setting. Without `scaler=`, "
    "'raise' ends with an error that names `scaler=`. With 'skip', the step leaves no gradients, "
    "so `scaler.step` raises an error.",
)
def test_scaler_needs_propagate(column):
    for policy, error, words in (
        ("raise", sparsync.errors.NonFiniteGradientError, "(with a GradScaler: scaler=)"),
        ("skip", sparsync.ConfigurationError, "Monitoring(scaler=scaler)"),
    ):
        with attached(network(), nonfinite=policy) as (ddp, _):
            optimizer, scaler = sgd(ddp.parameters()), torch.amp.GradScaler("cpu")
            before = weights(ddp)
            with refused(words, error=error):
                factor = float("inf") if here() == 1 else 1.0
                scaler.scale(mean_square(ddp, 0, here()) * factor).backward()
                scaler.step(optimizer)
            assert_close(weights(ddp), before, 0.0, "after the refusal")
        scaler = torch.amp.GradScaler("cpu")
        with refused(f"nonfinite={policy!r}", "GradScaler"):
            Training(column, network(), nonfinite=policy, scaler=scaler)


@practice(
    "float32, bfloat16 and float64 parameters in one model, scalars, parameters without elements",
    attach="works. Each dtype has its own units; residuals of 16-bit parameters are float32. The "
    "average is rounded to the gradient's dtype.",
    updates="works. Shared weights of 16-bit parameters are kept in float32.",
    UpdateSpace="works. Updates of 16-bit parameters are exchanged in float32.",
    averaging="works. Parameters are sent as one vector, which is float64 if any parameter is.",
)
def test_dtypes(column):
    same_training(column, Odd, tolerance=1e-2)


@practice(
    "float16 parameters",
    attach="works. Like bfloat16, except beyond float16's range: see the next row.",
    local="works. Like bfloat16.",
)
def test_float16(column):
    def loss(model, number, rank):
        x, y = batch(number, rank)
        return (model(x.half()).float() - y).pow(2).mean()

    same_training(column, lambda: network().half(), loss=loss, tolerance=2e-3)


@practice(
    "a total that float16 cannot hold",
    attach="refused. A delivered entry may be the sum of several steps; if it exceeds "
    "65504, all ranks refuse the step as if it contained Inf. Prefer bfloat16.",
)
def test_float16_does_not_overflow(column):
    net = nn.Linear(10, 1, bias=False).half()
    nn.init.zeros_(net.weight)
    x = torch.full((10,), 30_000.0, dtype=torch.float16)
    with attached(net, SPARSE) as (ddp, _):
        ddp(x).sum().backward()
        with refused(
            "NaN or Inf", "float16: > 65504", error=sparsync.errors.NonFiniteGradientError
        ):
            for _ in range(5):
                ddp.zero_grad()
                ddp(x).sum().backward()


@practice(
    "complex parameters",
    attach="refused. Only real entries can be exchanged. Use `torch.view_as_real`.",
    updates="refused. As with `attach`.",
    UpdateSpace="refused. As with `attach`.",
    averaging="works. Complex numbers are averaged as pairs of reals. (tests/unit/test_averager.py"
    "::test_parameters_are_averaged_in_place_whatever_their_dtypes_and_strides)",
)
def test_complex(column):
    if torch.__version__ < "2.9":  # before 2.9, DDP itself raises an error
        pytest.skip("torch 2.9 is the first whose DDP broadcasts complex parameters over gloo")
    net = network()
    net.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused("'turn' is torch.complex64", *(["view_as_real"] * (column != "UpdateSpace"))):
        Training(column, net)


@practice(
    "parameters on several devices of one rank",
    attach="untested. Each device has its own units, which is tested. An exchange of gradients "
    "from two GPUs has not been run.",
    UpdateSpace="untested. As with `attach`.",
    updates="refused. All parameters are exchanged as one vector, which must be on one device. "
    "(tests/unit/test_offload.py::test_parameters_on_several_devices_are_refused)",
    averaging="untested. All parameters would be sent as one vector on the first parameter's "
    "device; this has not been run. "
    "(tests/unit/test_averager.py::test_parameters_are_averaged_in_place_whatever_their_dtypes_and_strides)",
)
def test_units_hold_one_device(column):
    # "meta" stands for a second device, although it cannot compute
    named = [(str(i), torch.zeros(4, device="meta" if i % 2 else "cpu")) for i in range(4)]
    units = plan_units(named)
    assert [(u.device.type, [s.name for s in u.slots]) for u in units] == [
        ("cpu", ["0", "2"]),
        ("meta", ["1", "3"]),
    ]
