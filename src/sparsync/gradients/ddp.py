"""Exchange the gradients of a DDP model: ``sync = sparsync.attach(ddp_model)``.

The hook adds each gradient of a bucket to its unit (``accumulated = residual + gradient``).  Once a unit
is complete, its exchange is queued on the engine's thread while the backward pass continues.  After the
last exchange comes the commit, which writes the averages into the buckets and completes their futures.
All residuals are written in the commit, when every total of the step is known to be finite.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError
from sparsync.gradients.buckets import Bucket, BucketStep, Places
from sparsync.gradients.hierarchy import NodeReducer
from sparsync.gradients.steps import GradientSteps
from sparsync.gradients.sync import GradientSync, Source
from sparsync.handle import CommHook, Handle, call_after_backward, make_engine, weakly
from sparsync.options import Options
from sparsync.transports.agree import check_equal_parameters
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups
from sparsync.units import (
    Slot,
    check_kinds,
    check_same_parameters,
    kinds_of,
    replicated_tensors,
    substituted,
    training,
)

__all__ = ["BucketSource", "attach_ddp", "check_ddp"]


def attach_ddp(model: Any, options: Options) -> GradientSync:
    """Exchange the gradients of a DDP model; see ``attach``."""
    check_ddp(model)
    trained = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    elements = sum(parameter.numel() for parameter in trained.values())
    options = options.for_size(elements, options.tell)
    units = options.units(trained.items(), model.module)
    ranks = dist.get_process_group_ranks(model.process_group)
    groups, nodes = Groups(model.process_group, **options.transport.waits), None
    try:
        if options.transport.hierarchy is not None:
            nodes = NodeReducer(options, ranks, units, groups)
        reducer = nodes.reducer if nodes else options.reducer(groups.make(ranks), units)
        consensus = nodes.consensus if nodes else None
        engine, ignored = make_engine(reducer, groups, consensus), model.parameters_to_ignore
        steps = GradientSteps(model.module, reducer, engine, options, ignored, consensus, nodes)
        source = BucketSource(model, trained, steps)
    except BaseException:
        groups.close()
        raise
    pieces = nodes.pieces if nodes else None
    sync = GradientSync(model.module, steps, source, groups, options, pieces)
    # DDP sends rank 0's weights when it is built.  Weights loaded afterwards may differ between ranks,
    # and equal averages would never make such replicas equal again.
    try:
        for comm in sync.communicators:
            tensors = replicated_tensors(model.module, model.parameters_to_ignore)
            run(check_equal_parameters(comm, tensors.items()))
    except BaseException:
        sync.close()
        raise
    return sync


def check_ddp(model: Any) -> None:
    """Refuse a model that is not a DDP module, already has a hook, or would bypass the hook."""
    if not isinstance(model, DistributedDataParallel):
        first = "" if dist.is_initialized() else "torch.distributed.init_process_group(), and "
        raise ConfigurationError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}; "
            f"wrap it first: {first}torch.nn.parallel.DistributedDataParallel(model)"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigurationError(
            "this model was wrapped under torch._dynamo.config.optimize_ddp = 'python_reducer', which "
            "hands gradients over one by one; leave optimize_ddp at its default and wrap again"
        )
    # DDP's C++ reducer accepts only one hook in its lifetime, and cannot report whether it has one.
    # ``_comm_hooks`` is DDP's own list of registered hooks; no public method exposes it.
    if model._comm_hooks and CommHook.closed_of(model) is None:
        raise ConfigurationError(
            "this model already has a communication hook; attach once, to a freshly wrapped model "
            "(a hook cannot be removed from DDP), or close() the first handle"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigurationError(
            "DDP(skip_all_reduce_unused_params=True) hands over only some buckets, not always "
            "including the last, which marks the end of a backward pass; omit it: sparse "
            "algorithms send "
            "hardly anything for parameters that no rank has used"
        )
    _check_not_nested(model)


def _check_not_nested(model: DistributedDataParallel) -> None:
    """Refuse parameters whose gradients are also exchanged by a DDP module inside the model."""
    own = {parameter for parameter in model._module_parameters if parameter.requires_grad}
    for name, inner in model.module.named_modules():
        if isinstance(inner, DistributedDataParallel) and own & set(inner._module_parameters):
            where = f"'{name}' of this model" if name else "the module of this DDP model"
            raise ConfigurationError(
                f"{where} is a DistributedDataParallel as well, and both would exchange the same "
                "gradients; wrap once, or let the outer one ignore the parameters of the inner one "
                "(_set_params_and_buffers_to_ignore_for_model)"
            )


@final
class BucketSource(Source):
    """Passes the gradients in DDP's buckets to the steps.

    DDP knows only the parameters that it was built with, and exchanges once per forward pass.  Any other
    gradient would stay on its rank, and replicas would drift apart unnoticed.  So the model is checked
    on every forward pass, and every gradient on arrival.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        trained: Mapping[str, Tensor],
        steps: GradientSteps,
    ) -> None:
        self._model, self._trained, self._steps = weakref.ref(model), dict(trained), steps
        self._place: dict[Tensor, tuple[int, Slot]] = {
            trained[slot.name]: (i, slot)
            for i, unit in enumerate(steps.units)
            for slot in unit.slots
        }
        self._open = BucketStep(steps.units)
        self._places: dict[int, Places] = {}  # by number of the bucket
        self._kinds = kinds_of(trained)
        # autograd's node on which DDP has hooked the gradient of the first parameter
        self._node = None if not trained else get_gradient_edge(next(iter(trained.values()))).node
        self._seen: list[Any] = []  # the parameters that trained when the model was last checked
        # True if the last backward pass was exchanged, and no forward pass has followed
        self._exchanged = False
        self._begun = 0  # number of backward passes whose exchange has begun

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context, in which gradients accumulate on this rank."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    @property
    def scaler(self) -> Any:
        """The GradScaler that ``attach`` was given, or None, for ``follow_scalers``."""
        return self._steps.scaler

    def discard(self) -> None:
        """Undo the work of an interrupted backward pass."""
        self._steps.discard()

    # ---- gradients that DDP's hook would not see -----------------------------------------------

    def watch(self, sync: Handle) -> None:
        """Receive DDP's buckets; check all parameters on every forward pass, and gradients on arrival."""
        model = self._model()
        assert model is not None
        # weak references, because parameters may outlive the handle, which the communication hook
        # keeps alive
        handles: list[Any] = [model.register_forward_pre_hook(weakly(self._check_model))]
        check = weakly(self._check_gradient)
        for parameter in self._trained.values():
            handles.append(parameter.register_post_accumulate_grad_hook(check))  # type: ignore[no-untyped-call]
        for handle in handles:
            sync.on_close.callback(handle.remove)
        self._steps.refuse_averages([model], self._trained.values(), sync.on_close)
        sync.on_close.callback(CommHook.taken(model, sync, self.on_bucket).release)

    def _check_model(self, *_forward: Any) -> None:
        """Refuse a model whose parameters have changed since ``attach``; name one that differs."""
        if not torch.is_grad_enabled():  # an evaluation has no backward pass
            return
        # Refuse a broken group before DDP prepares for a backward pass: if an earlier pass failed, the
        # state of DDP may be incomplete.
        self._steps.reducer.comm.check_whole()
        self._exchanged = False
        model = self._model()
        assert model is not None
        self._check_node()
        if (seen := training(model.module)) == self._seen:  # the usual case, on every step
            return
        if substituted(model.module):
            # functional_call replaces parameters with tensors for one call.  Their gradients either reach
            # the parameters, and are exchanged, or belong to the caller.
            return
        alone = model.parameters_to_ignore
        check_same_parameters(model.module, self._trained, alone=alone, kinds=self._kinds)
        self._seen = seen
        if model.find_unused_parameters:
            return  # DDP treats frozen or removed parameters as unused and does not wait for them
        present = {p for p in model.module.parameters() if p.requires_grad}
        gone = [name for name, parameter in self._trained.items() if parameter not in present]
        # if all parameters were removed, no backward pass goes through DDP, so no rank waits
        if gone and len(gone) < len(self._trained):
            self._seen = []  # so that the next forward pass also fails
            raise ConfigurationError(
                f"'{gone[0]}' was frozen or removed after attach ({len(gone)} parameters in all), and "
                "DDP would wait for its gradient; wrap and attach again, or build DDP with "
                "find_unused_parameters=True"
            )

    def _check_node(self) -> None:
        """Refuse parameters whose gradients DDP no longer sees."""
        # If a parameter is converted or moved to a device, autograd forgets the node on which DDP has its
        # hooks.  Converting the parameter back does not restore the node.
        if self._node is None or torch.compiler.is_compiling():
            return
        name, first = next(iter(self._trained.items()))
        if first.requires_grad and get_gradient_edge(first).node is not self._node:
            check_kinds(self._trained, self._kinds)
            raise ConfigurationError(
                f"'{name}' was converted or moved after DDP had wrapped it, and back, as by cpu() and "
                "cuda(), so DDP does not see its gradient any more, and ranks would drift apart; convert "
                "a copy instead (copy.deepcopy(ddp.module).cpu()), or wrap and attach again"
            )

    def _check_gradient(self, parameter: Tensor) -> None:
        """Refuse a gradient that has a graph, or comes from a backward pass that is not exchanged."""
        # This hook runs for every parameter in every step, so the usual case must return quickly. Within
        # a backward pass, gradients are enabled only with create_graph=True.
        if not (self._exchanged or torch.is_grad_enabled()):
            return
        _, slot = self._place[parameter]
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise ConfigurationError(
                f"backward(create_graph=True): the gradient of '{slot.name}' has a graph, which does "
                "not go through the exchange; take gradients for higher orders with torch.autograd.grad"
            )
        model = self._model()
        if not self._exchanged or model is None or not model.require_backward_grad_sync:
            return
        # Whether this backward pass is exchanged is not known until it ends, because the first bucket may
        # come after this gradient.  The flag is cleared so that the check is queued only once per pass.
        self._exchanged, begun = False, self._begun

        def check() -> None:
            if self._begun == begun:  # no bucket has arrived
                self._exchanged = True
                raise ConfigurationError(
                    f"a second backward pass added to the gradient of '{slot.name}' after its exchange, "
                    "without a forward pass of the DDP model: that sum would stay on this rank. Add the "
                    "losses, or do all but the last forward and backward pass within no_sync(); with "
                    "several optimizers under Lightning give "
                    "Trainer(strategy='ddp_find_unused_parameters_true')"
                )

        Variable._execution_engine.queue_callback(check)

    def _check_join(self) -> None:
        """Refuse settings that do not work with ``join()``, also on ranks whose data has ended."""
        model, correction = self._model(), self._steps.reducer.correction
        if model is None or not model._join_config.enable:
            return
        if not model._divide_by_initial_world_size:
            raise ConfigurationError(
                "join(divide_by_initial_world_size=False) divides by the ranks that still have batches, "
                "but a rank without goes on delivering its residual; leave it at True"
            )
        if correction and correction.weight_decay:
            raise ConfigurationError(
                "the correction's weight decay uses this rank's weights, which under join() are out of "
                "date once the rank has no more batches; give weight_decay to the optimizer"
            )

    # ---- the hook, on autograd's thread --------------------------------------------------------

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Accumulate a bucket; submit the exchanges of the units that it completes."""
        # All ranks must submit exchanges in the same order, or they would deadlock.  DDP ensures this:
        # all ranks have the same buckets as rank 0, and DDP calls the hook in the order of bucket
        # numbers, in whatever order gradients arrive.
        if bucket.index() == 0:
            self._open = BucketStep(self._steps.units)
            self._exchanged = False  # also reset here: the hook may run before any gradient arrives
            self._begun += 1
            self._steps.begin()
            self._check_join()
        this, steps = self._open, self._steps
        future = this.take(Bucket(bucket.buffer(), self._places_of(bucket)))
        # To clip by the norm of all gradients, all of them must have arrived before the first one is
        # accumulated, so no exchange overlaps with the backward pass.
        complete = self._accumulate(this) if bucket.is_last() or not steps.measures else []
        # the accumulation was queued on the stream of autograd's thread; the engine uses its own stream
        steps.wait_for_gpu()
        for unit in complete:
            steps.launch(this, unit)
        if bucket.is_last():
            this.check_complete()
            # ``_share`` is a coroutine, which starts after the units' coroutines.  The next job is a
            # callable, which the engine runs only when every earlier coroutine has ended.
            this.jobs.append(steps.engine.submit(self._share(this)))
            finished = steps.engine.submit(lambda: self._finish(this))
            if not call_after_backward(lambda: self._after(this, finished)):
                # Under join(), DDP calls the hook outside of backward() on a rank without further
                # batches.  The rank's residual is still delivered.  The call may block, because autograd
                # is not running.
                self._after(this, finished)
        return future

    def _places_of(self, bucket: Any) -> Places:
        """Return the places of a bucket's gradients in the units.

        DDP rebuilds its buckets after the first step, in the order in which gradients arrived.
        """
        parameters, known = bucket.parameters(), self._places.get(bucket.index())
        if known is None or known.identities != [id(parameter) for parameter in parameters]:
            known = Places(parameters, self._place, joined=self._steps.joins)
            self._places[bucket.index()] = known
        return known

    def _accumulate(self, this: BucketStep) -> list[int]:
        """Accumulate the gradients that are waiting; return the units that they complete."""
        waiting = this.drain()
        corrector = self._steps.reducer.corrector
        if corrector and self._steps.measures:
            corrector.measure(g for bucket in waiting for _, g in bucket.pairs())
        complete = []
        for bucket in waiting:
            for its, gradient in bucket.flat():
                self._steps.accumulate(its, gradient, bucket.parameters(its))
                this.accumulated[its.unit] += len(its.members)
                if this.accumulated[its.unit] == len(this.units[its.unit].slots):
                    complete.append(its.unit)
        return complete

    async def _share(self, this: BucketStep) -> None:
        if not this.failed:  # otherwise, peers may have died, and ``share`` would wait for them
            await self._steps.reducer.share()

    def _finish(self, this: BucketStep) -> None:
        # DDP waits for every future without a deadline, so each must get a value even after an error.
        # The error itself is raised by ``_after``, and so by backward().
        try:
            self._steps.finish(this)
        except BaseException:
            this.zero_()
            raise
        finally:
            this.complete()

    # ---- after DDP has copied the buckets back, on autograd's thread ------------------------------

    def _after(self, this: BucketStep, finished: Future[None]) -> None:
        self._exchanged = True
        try:
            if not self._steps.settle(this, finished):
                # set gradients to None: if they were zero, momentum and decay would still change weights
                for parameter in self._place:
                    parameter.grad = None
                return
            model = self._model()
            if model is not None and (model.find_unused_parameters or model.static_graph):
                _deliver_to_unused(pair for bucket in this.buckets for pair in bucket.pairs())
        finally:
            # DDP rebuilds its buckets at the next forward pass, and a reference would keep the memory of
            # the old ones alive
            if finished.done():  # otherwise the wait was interrupted, and the engine still writes
                this.buckets.clear()
        self._steps.compare(alike=True)


def _deliver_to_unused(averages: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write averages to parameters that no rank used in this step, but that receive residuals.

    DDP does not touch the gradients of such parameters (``find_unused_parameters``, ``static_graph``).
    The delivered mass has already left the residuals, so it would be lost if it were dropped here.
    """
    for parameter, average in averages:
        if not parameter.requires_grad:
            # The parameter has been frozen since.  With a gradient, momentum and decay would change it,
            # so its residual is dropped.
            continue
        average = average.view(parameter.shape)
        # if nothing arrived, the gradient stays None, as in plain DDP, so optimizers skip the parameter
        if parameter.grad is None and bool(average.any()):
            parameter.grad = average.clone()
        elif parameter.grad is not None and not parameter.grad.is_sparse:
            # DDP has copied the bucket's average, unless it considers the parameter unused; for all other
            # parameters, this copy changes nothing
            parameter.grad.copy_(average)
