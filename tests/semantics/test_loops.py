"""Test practices of training loops with uneven inputs, evaluation, exceptions and optimizers."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Ddp

import sparsync
from sparsync import Correction
from sparsync.attach import check_optimizer
from sparsync.updates import OuterStep
from sparsync_papers.baseline_optimizers import UpdateSpaceAdamW
from tests.on_ranks import refused

from .practice import section
from .training import (
    RATE,
    SPARSE,
    STEPS,
    Training,
    added,
    assert_close,
    attached,
    equal_on_all_ranks,
    everywhere,
    gradients,
    here,
    loop,
    mean_square,
    moved,
    network,
    residuals,
    same_training,
    sgd,
    weights,
)

practice = section(__name__, "Loops")


BATCHES = (2, 6)  # numbers of batches on ranks 0 and 1

_STEP = (
    "works. A rank without batches stops training, but calls `step()` as often as the other ranks."
)


@practice(
    "uneven inputs",
    attach="works. Use `with ddp.join():`. A rank without batches contributes zero gradients and "
    "still delivers its residual. Averages are over all ranks. Residuals that are left at the "
    "end are kept, and included in the saved state.",
    updates="works. A rank without batches calls `sync.step()` once for every optimizer step of "
    "the other ranks. With DDP, every rank needs at least two batches. `join()` is refused.",
    UpdateSpace=f"{_STEP} Without new gradients, these calls deliver its residual.",
    averaging=f"{_STEP} Its weights still follow the average, and count in it.",
)
def test_uneven_inputs(column):
    if column == "attach":
        for options in ({}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}):
            _join_delivers_what_is_left(options)
        return
    if column == "updates":
        with attached(network(), SPARSE, column) as (ddp, _), refused("sync.step()"), ddp.join():
            mean_square(ddp, 0, here())
    training = Training(column, network(), period=2 if column == "averaging" else 1)
    net = training.net
    start = weights(net)
    came = added((0.0, start))
    for step in range(max(BATCHES)):
        came = added((1.0, came), (RATE, _alone(net, step)))
        training.optimizer.zero_grad()
        if step < BATCHES[here()]:
            mean_square(net, step, here()).backward()
        if column == "updates" and step >= BATCHES[here()]:
            training.handle.step()
        elif step < BATCHES[here()] or not training.averages:
            training.optimizer.step()
        if training.averages:
            training.average()
    training.finish()
    training.close()
    assert equal_on_all_ranks(weights(net))
    if column == "UpdateSpace":
        left = everywhere(residuals(training.handle.state_dict(), came))
        ranks = dist.get_world_size()
        total = added((ranks, start), (-ranks, weights(net)), (1.0, left))
        assert_close(everywhere(came), total, 1e-5, "the law")


def _alone(model, step):
    """Return this rank's own gradients at a model's weights, or zeros once it has no batches."""
    twin = network()
    twin.load_state_dict(model.state_dict())
    if step < BATCHES[here()]:
        mean_square(twin, step, here()).backward()
    return gradients(twin)


def _join_delivers_what_is_left(options):
    """Check the law over all steps, and that all ranks end with the weights of the last active rank."""
    with attached(network(), SPARSE, ddp=options) as (ddp, sync):
        optimizer, ranks = sgd(ddp.parameters()), dist.get_world_size()
        came = applied = added((0.0, weights(ddp.module)))
        norms = []
        with ddp.join():
            for step in range(BATCHES[here()]):
                came = added((1.0, came), (1.0, _alone(ddp.module, step)))
                optimizer.zero_grad()
                mean_square(ddp, step, here()).backward()
                applied = added((1.0, applied), (1.0, gradients(ddp.module)))
                optimizer.step()
                norms.append(sync.stats()["residual_norm"][0])
        state = sync.state_dict()
        assert state["content"]["reducer"]["step"] == max(BATCHES)
        left = residuals(state, came)
        if here() == 0:
            applied = added((0.0, applied))  # only rank 1 has seen all averages
        total = added((ranks, everywhere(applied)), (1.0, everywhere(left)))
        assert_close(everywhere(came), total, 1e-4, "the law")
        assert equal_on_all_ranks(weights(ddp.module))
        ddp.zero_grad()  # a second epoch
        mean_square(ddp, 9, here()).backward()
        assert equal_on_all_ranks(gradients(ddp.module))
        if here() == 0:  # rank 0's residual has shrunk since its last batch, and was saved
            assert 0 < sum(float(v.square().sum()) for v in left.values()) < norms[-1] ** 2


@practice(
    "uneven inputs at density 1",
    attach="works. The final weights are the same as with plain DDP's `join()`.",
)
def test_join_at_density_1(column):
    def train(ddp):
        with ddp.join():
            loop(ddp, sgd(ddp.parameters()), BATCHES[here()])
        return weights(ddp.module)

    with attached(network()) as (ddp, _):
        assert_close(train(ddp), train(Ddp(network())), 1e-6, "against plain DDP")


@practice(
    "NaN or Inf while a rank has no batches",
    attach="works. All ranks raise an error; ranks without batches raise it from `join()`.",
)
def test_join_and_overflow(column):
    with attached(network()) as (ddp, sync):
        with refused("NaN or Inf", error=sparsync.errors.NonFiniteGradientError), ddp.join():
            for step in range(BATCHES[here()]):
                loss = mean_square(ddp, step, here())
                (loss * float("nan") if step == 4 else loss).backward()
                ddp.zero_grad()
        assert sync.stats()["refused_exchanges"] == 1


@practice(
    "`join(divide_by_initial_world_size=False)`, or decay in `correction=` under `join()`",
    attach="refused. A rank without batches still delivers its residual, so averages must be over "
    "all ranks. Its weights are outdated, so they must not decay.",
)
def test_join_refuses(column):
    for options, correction, words in (
        (
            {"divide_by_initial_world_size": False},
            None,
            "divides by the ranks that still have batches",
        ),
        ({}, Correction(weight_decay=0.1), "give weight_decay to the optimizer"),
    ):
        training = Training("attach", network(), 1.0, correction=correction)
        with refused(words), training.called.join(**options):
            training.backward(0)
        training.handle.close()


@practice(
    "evaluation between steps (`eval()`, `no_grad()`)",
    attach="works. The evaluation does not touch gradients.",
    updates="works. The evaluation uses this rank's weights or, inside `with sync.shared():`, the "
    "shared weights.",
    local="works. The evaluation does not touch gradients, and uses this rank's weights.",
)
def test_evaluation(column):
    def evaluate(model, rank):
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 20))
        model.train()

    same_training(column, before=evaluate)


@practice(
    "an exception in one rank's forward pass, caught, after which training continues",
    attach="works. The other ranks wait for this rank. If it skips a step altogether, the last "
    "exchange of the other ranks ends with an error at its deadline.",
    local="works. As with `attach`.",
)
def test_failing_forward(column):
    def fail_on_one_rank(model, rank):
        if rank == 1:
            try:
                model(torch.ones(2, 19))
            except RuntimeError:
                return
            raise AssertionError("a batch of the wrong shape was accepted")

    same_training(column, before=fail_on_one_rank)


@practice(
    "Ctrl-C or an exception while a step waits for its exchange, caught, after which training continues",
    attach="works. The other ranks commit the exchange, so this rank also commits it, before its "
    "next step. The averages of the interrupted step are dropped, as under plain DDP.",
    updates="works. The exchange continues, and is applied before the weights next change, or by "
    "`finish()`. Training continues as if there had been no interruption.",
)
def test_interrupted_waits(column):
    for delay, stopped in (
        ((0, [0, 1]), (0, [0]), (1, [0])) if column == "updates" else ((0, [0, 1]),)
    ):
        expected, left = _train_through(column, delay, stopped)
        found, kept = _train_through(column, delay, stopped, interrupted)
        assert_close(found, expected, 0.0, "weights")
        assert_close(kept, left, 0.0, "residuals")
        assert equal_on_all_ranks(found)


def _train_through(column, delay, stopped, stop=lambda sync: nullcontext()):
    """Return weights and residuals after a step that is broken off on some ranks."""
    net, updates = network(), column == "updates"
    optimizer = _adamw(net.parameters()) if updates else sgd(net.parameters())
    limits = {"transport": sparsync.Transport(timeout=20.0)}
    if updates:
        settings = {"algorithm": "allgather", "density": SPARSE, "residual": "weights"}
        outer = OuterStep(**settings, period=1 + delay, delay=delay)
        sync = sparsync.attach(net, optimizer, outer, **limits)
    else:
        among = {"replicate": dist.group.WORLD}
        sync = sparsync.attach(net, optimizer, "allgather", SPARSE, **among, **limits)
    with sync:
        for step in range(4):
            optimizer.zero_grad()
            loss = mean_square(net, step, here())
            stops = step == 2 and here() in stopped
            with stop(sync) if stops else nullcontext():
                loss.backward()
                if updates or not stops:
                    optimizer.step()
        kept = residuals(sync.state_dict(), weights(net))
        sync.finish()
        return weights(net), kept


@contextmanager
def interrupted(sync):
    """Interrupt the training thread's first wait, while the exchange is still in flight."""
    goes_on, result = threading.Event(), Future.result
    sync._engine.submit(lambda: goes_on.wait(20.0))

    def stop(future, *given):
        if threading.current_thread() is not threading.main_thread():
            return result(future, *given)
        patch.undo()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Future, "result", stop)
        with pytest.raises(KeyboardInterrupt):
            yield
    goes_on.set()


def counted(training):
    """Return the number of steps that sparsync has counted."""
    handle = training.handle
    return handle.steps if hasattr(handle, "steps") else handle.reducer.step


def quiet(training, column):
    return training.called.no_sync() if column == "attach" else nullcontext()


def assert_follows(column, iteration, gradient, optimizer=sgd, after=lambda training: None):
    """Assert that an iteration steps once, by the mean of ``gradient(model, step, rank)`` over ranks."""
    training, twin = Training(column, network(), 1.0, optimizer=optimizer), network()
    for step in range(STEPS):
        training.optimizer.zero_grad()
        iteration(training, step)
        training.step()
        assert counted(training) == step + 1
        ranks = dist.get_world_size()
        mean = added(*((1 / ranks, gradient(twin, step, rank)) for rank in range(ranks)))
        for name, parameter in twin.named_parameters():
            parameter.grad = mean[name].to(parameter.dtype)
        sgd(twin.parameters()).step()
    after(training)
    training.finish()
    assert_close(weights(training.net), weights(twin), 1e-5, "one process")
    training.close()


def gradient_of(model, step, rank):
    model.zero_grad()
    mean_square(model, step, rank).backward()
    return gradients(model)


_COUNTED = (
    "works. Gradients are local, so dropping them has no effect on the other ranks. Only the "
    "optimizer's step counts."
)
_QUIET = "Run the pass within `no_sync()`, or use `torch.autograd.grad`."


@practice(
    "a backward pass whose gradients are dropped: adversarial inputs (FGSM), a GAN's other player",
    attach=f"works. {_QUIET} Otherwise, its gradients are exchanged, as under plain DDP, and "
    "later exchanges deliver the rest of them.",
    local=_COUNTED,
)
def test_dropped_gradients(column):
    def iteration(training, step):
        with quiet(training, column):
            mean_square(training.called, step + 9, here()).backward()
        training.optimizer.zero_grad()
        mean_square(training.called, step, here()).backward()

    assert_follows(column, iteration, gradient_of)


@practice(
    "a pass that one rank does alone (`find_executable_batch_size`)",
    attach="works. Use `no_sync()`. Otherwise, the pass waits for the other ranks, as under plain "
    "DDP.",
    updates=f"{_COUNTED} Before the first step of a DDP model, use `no_sync()`, as under plain "
    "DDP: DDP rebuilds its buckets in the second pass, in which all ranks must take part.",
    local=_COUNTED,
)
def test_a_pass_of_one_rank(column, folder):
    """Before the first step and directly after a load, ranks have not compared their states yet."""

    def iteration(training, step):
        if step == STEPS - 1:
            resume(training)
        if step in (0, STEPS - 1) and here() == 0:
            with training.called.no_sync() if training.attaches else nullcontext():
                mean_square(training.called, 9, 0).backward()
            training.optimizer.zero_grad()
        dist.barrier()
        mean_square(training.called, step, here()).backward()

    def resume(training):
        if training.attaches:
            sparsync.save(training.handle, folder)
            sparsync.load(training.handle, folder)

    assert_follows(column, iteration, gradient_of, after=resume)


@practice(
    "accumulation without `no_sync()`, a micro-batch without a loss on one rank",
    attach="works. This rank contributes zeros to the exchange of this micro-batch.",
    local="works. Gradients are local, and the optimizer's step counts even without them.",
)
def test_a_micro_batch_without_a_loss(column):
    def loss(model, number, rank):
        value = mean_square(model, number, rank)
        return value * 0.0 if rank == 1 and number % 2 == 0 else value

    same_training(column, micro=2, no_sync=False, loss=loss)


practice(
    "an iteration that some ranks leave out (`continue` without a batch, or where a loss is NaN)",
    attach="refused. The other ranks wait for this rank's `backward()`, and raise an error at "
    "their deadline, as under plain DDP. "
    "(tests/distributed/test_faults.py::test_a_frozen_rank_is_named_at_the_deadline)",
    updates="refused. `finish()` and `save` raise an error that says that ranks have taken "
    "different numbers of local steps. Call `sync.step()` in place of the omitted iteration. "
    "(tests/distributed/test_updates.py::test_other_numbers_of_steps_are_told_by_finish_and_save)",
)


practice = section(__name__, "Optimizers")


@practice(
    "SGD",
    attach="works. Replicas are bit-identical.",
    local="works. With density 1 and period 1, this equals training on the averaged gradient.",
)
def test_sgd(column):
    same_training(column)


@practice(
    "SGD with momentum and weight decay",
    attach="works. Momentum and decay apply to averages. Below a density of 0.1 %, use "
    "`correction=`, which applies them before the exchange (`docs/optimizers.md`). If "
    "`optimizer=` is given, applying them twice is refused.",
    updates="works. Each rank has its own momentum.",
    averaging="works. Momentum is local, or averaged with `moments=`.",
)
def test_momentum(column):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)

    same_training(column, optimizer=optimizer, exact=False)


practice(
    "momentum correction (`correction=`)",
    attach="works. At density 1 with `masking=False`, it equals torch's momentum. "
    "(tests/distributed/test_ddp.py::test_momentum_correction_under_ddp)",
)


@practice(
    "Adam and AdamW",
    attach="works. At density 1, this equals dense training. At lower densities, the second "
    "moment differs from the one in dense training, and `attach(optimizer=)` warns about this.",
    updates="works. `attach(model, optimizer)` chooses this exchange; moments are local, and no "
    "update is lost.",
    UpdateSpace="works. Use `UpdateSpaceAdamW`; moments are local.",
    averaging="works. Moments are local, averaged, or reset, according to `moments=`. "
    "(tests/unit/test_averager.py::test_moments_stay_or_travel_or_are_reset)",
)
def test_adamw(column):
    if column != "UpdateSpace":
        same_training(column, optimizer=_adamw, tolerance=1e-4, exact=False)
        return
    net = network()
    optimizer = UpdateSpaceAdamW(net, 0.01, "allgather", density=SPARSE)
    start = weights(net)
    loop(net, optimizer)
    assert equal_on_all_ranks(weights(net))
    assert moved(net, start)


_SCHEDULE = "works. The learning rates remain in the user's optimizer."


@practice("learning-rate schedules", attach=_SCHEDULE, updates=_SCHEDULE, averaging=_SCHEDULE)
def test_schedules(column):
    def optimizer(parameters):
        made = sgd(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    same_training(column, optimizer=optimizer)


@practice("parameter groups", attach=_SCHEDULE, updates=_SCHEDULE, averaging=_SCHEDULE)
def test_parameter_groups(column):
    def optimizer(parameters):
        first, *others = parameters
        groups = [{"params": [first], "lr": RATE / 10}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=RATE)

    same_training(column, optimizer=optimizer)


class Several:
    def __init__(self, parameters):
        first, *others = parameters
        self.parts = [torch.optim.SGD([first], lr=RATE / 10), sgd(others)]

    def zero_grad(self, **options):
        for part in self.parts:
            part.zero_grad(**options)

    def step(self):
        for part in self.parts:
            part.step()


@practice(
    "several optimizers",
    attach="works. `attach` needs no optimizer.",
    updates="works. Pass all of them: `attach(model, [first, second])`. The steps of the last "
    "optimizer count.",
    averaging="works. Call `step()` after the last optimizer's step.",
)
def test_several_optimizers(column):
    same_training(column, optimizer=Several)


@practice(
    "an optimizer that is not the one that was attached: replaced later, or one of several",
    attach="works. `attach` needs no optimizer.",
    updates="refused. The other optimizer's steps would never be exchanged, so the first step is "
    "refused before it changes anything. After replacing an optimizer (staged unfreezing), call "
    "`finish()` and `close()`, and attach again on all ranks.",
    averaging="works. The averager's `step()` averages the weights, whichever optimizer changed "
    "them.",
)
def test_other_optimizers(column):
    net = network()
    training = Training(column, net, 1.0)
    first, second = net.parameters(), list(net.parameters())[:1]
    try:
        for optimizer in (training.optimizer, sgd(first), sgd(second)):
            start = weights(net)
            training.backward(0)
            if column != "updates" or optimizer is training.optimizer:
                optimizer.step()
                assert moved(net, start)
                continue
            with refused("SGD is about to step '0.weight' (", "attach was given another optimizer"):
                optimizer.step()
            assert not moved(net, start)
    finally:
        training.close()
    optimizer.step()  # nothing is attached any more
    # optimizers of other parameters and wrappers of an attached optimizer are not refused
    if column == "updates":
        one, other = network(), network()
        inner = sgd(one.parameters())
        with sparsync.attach(one, inner, exchange="updates") as sync:
            for optimizer in (sgd(other.parameters()), Wrapper(inner)):
                mean_square(other, 0, here()).backward()
                mean_square(one, 0, here()).backward()
                optimizer.step()
            assert sync.stats()["local_steps"] == 1


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps another one and exposes its parameters."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        self.inner.step()


@practice(
    "a second `attach` of the same parameters",
    attach="refused. The parameters would be exchanged twice. After `close()`, they may be "
    "attached again.",
    updates="refused. As with `attach`. The same applies to a part of the model, and to a "
    "module that contains the model.",
)
def test_attached_twice(column):
    exchange = "gradients" if column == "attach" else "updates"
    inside = {"replicate": dist.group.WORLD} if column == "attach" else {}
    net, other = network(), network()
    around = torch.nn.ModuleList([net, other])

    def attach(model, how=exchange, where=inside):
        return sparsync.attach(model, sgd(model.parameters()), exchange=how, **where)

    with attach(net):
        for model in (net, net[0], around):
            with refused("weight' is exchanged already", "close() the first handle"):
                attach(model)
            with refused("weight' is exchanged already"):
                attach(model, "updates", {})
        attach(other).close()
    attach(net[0]).close()


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


_LATER = (
    "refused. Gradients would be used before they are exchanged. `attach` raises the error, or "
    "else the next forward pass."
)


@practice(
    "optimizers inside `backward()` (`_apply_optimizer_in_backward`)",
    attach=_LATER,
    updates=_LATER,
    UpdateSpace="refused. As with `attach`, but `step()` raises the error.",
)
def test_optimizer_in_backward(column):
    net = network()
    if column == "UpdateSpace":
        training = Training(column, net)
        training.backward(0)
        _in_backward(net)
        with refused("'0.weight' is stepped inside backward()"):
            training.step()
        return
    for steps in (0, 1):  # also after a step, when the model has already been checked
        net = network()
        training = Training(column, net)
        for step in range(steps):
            training.backward(step)
            training.step()
        _in_backward(net)
        with refused("'0.weight' is stepped inside backward()"):
            training.backward(steps)
        training.close()
    exchange = "gradients" if column == "attach" else "updates"
    for model, options in ((Ddp(net), {}), (net, {"replicate": dist.group.WORLD})):
        with refused("'0.weight' is stepped inside backward()", "after backward()"):
            sparsync.attach(model, exchange=exchange, **options)


def _in_backward(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch itself uses torch.jit
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})


_INSIDE = (
    "refused. The step raises an error, so `backward()` fails. Call the optimizer's `step()` "
    "after `backward()`."
)


@practice(
    "optimizers inside `backward()`, called by parameter hooks "
    "(`register_post_accumulate_grad_hook`)",
    attach=_INSIDE,
    updates=_INSIDE,
)
def test_optimizers_in_hooks(column):
    net = network()
    own = {parameter: sgd([parameter]) for parameter in net.parameters()}
    exchange = "gradients" if column == "attach" else "updates"
    for model, options in ((Ddp(net), {}), (net, {"replicate": dist.group.WORLD})):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with sparsync.attach(model, list(own.values()), exchange=exchange, **options):
            hooks = [p.register_post_accumulate_grad_hook(lambda p: own[p].step()) for p in own]
            with refused("SGD is about to step inside backward()", "after backward()"):
                mean_square(model, 0, here()).backward()
            for hook in hooks:
                hook.remove()
        assert all(map(torch.equal, before, net.parameters()))
    # optimizers of models that are not attached, e.g. of a copy, may step inside backward()
    other = copy.deepcopy(net)
    alone = {parameter: sgd([parameter]) for parameter in other.parameters()}
    with sparsync.attach(Ddp(net), list(own.values()), exchange=exchange):
        for parameter in other.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: alone[p].step())
        mean_square(other, 0, here()).backward()
    assert not any(map(torch.equal, other.parameters(), net.parameters()))


_TWICE = (
    "refused. This optimizer averages weights itself. Pass the optimizer inside it to `attach`, "
    "and use that optimizer in the loop. "
    "(tests/unit/test_optimizers.py::test_weights_are_not_averaged_twice)"
)
practice("`PostLocalSGDOptimizer`", attach=_TWICE, updates=_TWICE)


@practice(
    "sharpness-aware minimisation (SAM): two passes, and one step of the optimizer inside",
    attach="works. Run the first pass within `no_sync()`, as SAM's authors do.",
    updates="works. Pass either the SAM optimizer or the optimizer inside it to `attach`. "
    "Exchanges use the unperturbed weights. "
    "(tests/distributed/test_updates.py::test_sam_steps_once_per_iteration)",
    local="works. Both passes are local; call `step()` once per iteration.",
)
def test_sam(column):
    def climb(model):
        before = [parameter.data.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.1)
        model.zero_grad()
        return before

    def descend(model, before):
        for parameter, its in zip(model.parameters(), before, strict=True):
            parameter.data = its

    def iteration(training, step):
        with quiet(training, column):
            mean_square(training.called, step, here()).backward()
        before = climb(training.net)
        mean_square(training.called, step, here()).backward()
        descend(training.net, before)

    def gradient(model, step, rank):
        gradient_of(model, step, rank)
        before = climb(model)
        found = gradient_of(model, step, rank)
        descend(model, before)
        return found

    assert_follows(column, iteration, gradient)


class Outer(torch.optim.SGD):
    """A subclass of SGD that calls SGD's ``step``, which has its own hooks once an SGD exists."""

    def step(self, closure=None):
        return super().step(closure)


@practice(
    "a subclass of an optimizer, whose `step` calls its base's",
    attach="works. Every `backward()` is a step.",
    updates="works. Only the outermost call counts as a step.",
    averaging="works. Call the averager's `step()` after the optimizer's.",
)
def test_subclasses_of_optimizers(column):
    def iteration(training, step):
        mean_square(training.called, step, here()).backward()

    sgd(network().parameters())
    assert_follows(column, iteration, gradient_of, lambda given: Outer(given, lr=RATE))


@practice(
    "LBFGS",
    attach="works. The closure must return the loss averaged over ranks, because the loss "
    "determines how often the closure is called. Plain DDP requires the same.",
    updates="refused. LBFGS compares gradients from successive steps, but averaging "
    "changes the weights in between.",
)
def test_lbfgs(column):
    net, start = network(), weights(network())
    if column == "updates":
        with refused("LBFGS compares gradients"):
            Training(column, net, optimizer=torch.optim.LBFGS)
        return
    with attached(net) as (ddp, sync):
        optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = mean_square(ddp, 0, here())
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        for _ in range(STEPS):
            optimizer.step(closure)
        assert equal_on_all_ranks(weights(net)) and moved(net, start)
        assert sync.steps > STEPS  # every call of the closure counts as a step


practice(
    "the handle is not kept, and nothing is closed",
    attach="works. The model keeps a reference to the handle, whose threads, sockets and groups "
    "end with the model. "
    "(tests/distributed/test_exits.py::test_a_handle_that_nobody_keeps_goes_with_its_model)",
    updates="works. The module keeps a reference to the handle, with or without DDP. "
    "(tests/distributed/test_exits.py::test_a_handle_that_nobody_keeps_exchanges)",
)

_EXIT = (
    "works. Within 5 s, the exchange in flight is abandoned, its thread ends, and sockets are "
    "closed. Exit codes do not change. "
    "(tests/distributed/test_exits.py::test_a_process_ends_as_it_should_while_an_exchange_is_under_way)"
)
practice(
    "the end of the script, `sys.exit()` or an exception in the middle of training",
    attach=_EXIT,
    updates=_EXIT,
)


@practice(
    "Adafactor, Adagrad, RMSprop, Rprop, Adadelta",
    attach="works. As with Adam: at density 1, this equals dense training, and at lower "
    "densities, there is a warning.",
    updates="works. Like any local optimizer.",
    averaging="works. Like any local optimizer.",
)
def test_adafactor(column):
    def optimizer(parameters):
        return torch.optim.Adafactor(parameters, lr=0.01)

    same_training(column, optimizer=optimizer, exact=False)


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "RMSprop", "Rprop", "Adadelta", "NAdam"])
def test_optimizers_with_second_moments_are_warned_of(name):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))])
    with pytest.warns(UserWarning, match=rf"{name} divides by its second moment"):
        check_optimizer(optimizer, Correction(), sparse=True)
