"""DistributedDataParallel: ``sync = sparsync.attach(ddp_model)``.

The hook adds each gradient of a bucket to its unit (``accumulated = residual + gradient``).  When a
unit is complete its exchange goes to the engine thread, while the backward pass goes on.  After the
last one comes the commit, which writes the averages into the buckets and completes their futures.  So
all residuals are written together, after every total of the step is known to be finite.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.gradients.buckets import Bucket, BucketStep, Places
from sparsync.gradients.hierarchy import NodeReducer
from sparsync.gradients.steps import GradientSync
from sparsync.handle import call_after_backward, weakly
from sparsync.options import Monitoring, Options, say_on_rank_0
from sparsync.transports.agree import check_equal_parameters
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups
from sparsync.units import (
    Slot,
    check_same_parameters,
    replicated_tensors,
    substituted,
    training,
)

__all__ = ["CommHook", "DdpSync", "attach_ddp", "check_ddp"]


def attach_ddp(model: Any, options: Options) -> DdpSync:
    """Exchange the gradients of a DDP model; see ``attach``."""
    check_ddp(model)
    trained = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    elements = sum(parameter.numel() for parameter in trained.values())
    options = options.for_size(elements, say_on_rank_0)
    units = options.units(trained.items(), model.module)
    ranks = dist.get_process_group_ranks(model.process_group)
    groups, nodes = Groups(model.process_group, **options.transport.waits), None
    try:
        if options.transport.hierarchy is not None:
            nodes = NodeReducer(options, ranks, units, groups)
        reducer = nodes.reducer if nodes else options.reducer(groups.make(ranks), units)
    except BaseException:
        groups.close()
        raise
    sync = DdpSync(model, reducer, trained, options.monitoring, groups, nodes)
    try:
        for comm in sync.communicators:
            tensors = replicated_tensors(model.module, model.parameters_to_ignore)
            run(check_equal_parameters(comm, tensors.items()))
    except BaseException:
        sync.close()
        raise
    return sync


def check_ddp(model: Any) -> None:
    """Refuse a model that is not DDP, has a hook, or exchanges without one."""
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
    if model._comm_hooks and CommHook.closed_of(model) is None:
        raise ConfigurationError(
            "this model already has a communication hook; attach once, to a freshly wrapped model "
            "(a hook cannot be removed from DDP), or close() the first handle"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigurationError(
            "DDP(skip_all_reduce_unused_params=True) hands over some buckets only, and not always the "
            "last, so that the end of a backward pass would never come; omit it: sparse algorithms "
            "hardly send the zeros of what no rank has used"
        )
    _check_not_nested(model)


def _check_not_nested(model: DistributedDataParallel) -> None:
    """Refuse parameters whose gradients a DDP inside the model exchanges, too."""
    own = {parameter for parameter in model._module_parameters if parameter.requires_grad}
    for name, inner in model.module.named_modules():
        if isinstance(inner, DistributedDataParallel) and own & set(inner._module_parameters):
            where = f"'{name}' of this model" if name else "the module of this DDP model"
            raise ConfigurationError(
                f"{where} is a DistributedDataParallel, too, and both would exchange the same gradients; "
                "wrap once, or let the outer one ignore what the inner one has "
                "(_set_params_and_buffers_to_ignore_for_model)"
            )


@final
class DdpSync(GradientSync):
    """The handle of a DDP model.

    DDP knows the parameters that it was built with, and exchanges once per forward pass.  Anything
    else would stay on its rank, and replicas would drift apart without a word: so the model is looked at
    on every forward pass, and every gradient is.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        trained: Mapping[str, Tensor],
        monitoring: Monitoring,
        groups: Groups,
        nodes: NodeReducer | None = None,
    ) -> None:
        ignored = model.parameters_to_ignore
        parts = (nodes.consensus, nodes.pieces, nodes) if nodes else ()
        super().__init__(model.module, reducer, groups, monitoring, ignored, *parts)
        self._model, self._trained = weakref.ref(model), dict(trained)
        self._place: dict[Tensor, tuple[int, Slot]] = {
            trained[slot.name]: (i, slot)
            for i, unit in enumerate(self._whole.units)
            for slot in unit.slots
        }
        self._open = BucketStep(self._whole.units)
        self._places: dict[int, Places] = {}  # by number of the bucket
        self._seen: list[int] = []  # what trained when the model was looked at
        self._exchanged = False  # and no forward pass since
        self._begun = 0  # backward passes that were exchanged
        self._watch(model)
        self.on_close.callback(CommHook.taken(model, self).release)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context, in which gradients add up on this rank."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    # ---- what DDP's hook would not see ---------------------------------------------------------

    def _watch(self, model: DistributedDataParallel) -> None:
        """Look at all parameters on every forward pass, and at every gradient, until ``close``."""
        handles: list[Any] = [model.register_forward_pre_hook(weakly(self._check_model))]
        check = weakly(self._check_gradient)  # a parameter may outlive its model
        for parameter in self._trained.values():
            handles.append(parameter.register_post_accumulate_grad_hook(check))  # type: ignore[no-untyped-call]
        for handle in handles:
            self.on_close.callback(handle.remove)
        self._refuse_averages([model], self._trained.values())

    def _check_model(self, *_forward: Any) -> None:
        """Refuse a model that is no longer the one that was attached: by name of a parameter."""
        if not torch.is_grad_enabled():
            return
        self._exchanged = False
        model = self._model()
        assert model is not None
        if (seen := training(model.module)) == self._seen:
            return
        if substituted(model.module):
            return  # gradients go to what was given, or through it to the parameters, and are exchanged
        check_same_parameters(model.module, self._trained.values(), alone=self._ignored)
        self._seen = seen
        if model.find_unused_parameters:
            return  # what is frozen or gone counts as unused
        present = {p for p in model.module.parameters() if p.requires_grad}
        gone = [name for name, parameter in self._trained.items() if parameter not in present]
        if gone and len(gone) < len(self._trained):  # all: no gradients, and DDP does not wait
            self._seen = []
            raise ConfigurationError(
                f"'{gone[0]}' was frozen or removed after attach ({len(gone)} parameters in all), and "
                "DDP would wait for its gradient; wrap and attach again, or build DDP with "
                "find_unused_parameters=True"
            )

    def _check_gradient(self, parameter: Tensor) -> None:
        """Refuse a gradient with a graph, or of a backward pass that is not exchanged."""
        if not (self._exchanged or torch.is_grad_enabled()):  # as create_graph=True enables it
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
        self._exchanged, begun = False, self._begun  # look once per backward pass, at its end

        def check() -> None:
            if self._begun == begun:
                self._exchanged = True
                raise ConfigurationError(
                    f"a second backward pass added to the gradient of '{slot.name}' after its exchange, "
                    "without a forward pass of the DDP model: it would stay on this rank. Add the "
                    "losses, or do all but the last forward and backward pass within no_sync(); with "
                    "several optimizers under Lightning give "
                    "Trainer(strategy='ddp_find_unused_parameters_true')"
                )

        Variable._execution_engine.queue_callback(check)

    def _check_join(self) -> None:
        """Refuse what DDP's ``join()`` cannot have: the same on all ranks, whoever is done."""
        model, correction = self._model(), self.reducer.correction
        if model is None or not model._join_config.enable:
            return
        if not model._divide_by_initial_world_size:
            raise ConfigurationError(
                "join(divide_by_initial_world_size=False) divides by the ranks that are not done, but a "
                "rank that is done goes on delivering its residual; leave it at True"
            )
        if correction and correction.weight_decay:
            raise ConfigurationError(
                "the correction decays by this rank's weights, which under join() are old once it is "
                "done; give weight_decay to the optimizer"
            )

    # ---- the hook, on autograd's thread --------------------------------------------------------

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Accumulate a bucket; submit the units that it completes."""
        if bucket.index() == 0:
            self._open = BucketStep(self._whole.units)
            self._exchanged = False  # DDP may say so before its first gradient
            self._begun += 1
            self._begin_step()
            self._check_join()
        this = self._open
        future = this.take(Bucket(bucket.buffer(), self._places_of(bucket)))
        # where the norm of all gradients is needed, nothing overlaps with the backward pass
        complete = self._launch(this) if bucket.is_last() or not self._measures else []
        self._wait_for_gpu()
        for unit in complete:
            this.jobs.append(self._engine.submit(self._exchange(this, unit)))
        if bucket.is_last():
            this.check_complete()
            this.jobs.append(self._engine.submit(self._share(this)))
            finished = self._engine.submit(lambda: self._close_buckets(this))
            if not call_after_backward(lambda: self._after(this, finished)):
                # a rank that is done, under join(): its residual is still delivered
                self._after(this, finished)
        return future

    def _places_of(self, bucket: Any) -> Places:
        """Return where the gradients of a bucket lie; DDP makes its buckets once more after a step."""
        parameters, known = bucket.parameters(), self._places.get(bucket.index())
        if known is None or known.identities != [id(parameter) for parameter in parameters]:
            known = Places(parameters, self._place, joined=self._joins)
            self._places[bucket.index()] = known
        return known

    def _launch(self, this: BucketStep) -> list[int]:
        """Accumulate the gradients that wait; return the units that they complete."""
        waiting, this.waiting = this.waiting, []
        if self.reducer.corrector and self._measures:
            self.reducer.corrector.measure(g for bucket in waiting for _, g in bucket.pairs())
        complete = []
        for bucket in waiting:
            for its, gradient in bucket.flat():
                self._accumulate(its, gradient, bucket.parameters(its))
                this.accumulated[its.unit] += len(its.members)
                if this.accumulated[its.unit] == len(this.units[its.unit].slots):
                    complete.append(its.unit)
        return complete

    async def _share(self, this: BucketStep) -> None:
        if not this.failed:
            await self.reducer.share()

    def _close_buckets(self, this: BucketStep) -> None:
        try:
            self._finish(this)
        except BaseException:
            this.zero_()
            raise
        finally:
            this.complete()

    # ---- after DDP has copied the buckets back, on autograd's thread ------------------------------

    def _after(self, this: BucketStep, finished: Future[None]) -> None:
        self._exchanged = True
        try:
            if not self._settle(this, finished):
                for parameter in self._place:
                    parameter.grad = None  # every optimizer skips it, momentum included
                return
            model = self._model()
            if model is not None and (model.find_unused_parameters or model.static_graph):
                _deliver_to_unused(pair for bucket in this.buckets for pair in bucket.pairs())
        finally:
            this.buckets.clear()  # DDP may rebuild its buckets: the old ones must not live on
        self._end_step(alike=True)


@final
class CommHook:
    """State of the hook, which DDP keeps for ever: without a handle it allreduces, as DDP does."""

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model: Any = None if model is None else weakref.ref(model)
        self.sync: Any = None

    @staticmethod
    def taken(model: DistributedDataParallel, sync: Any) -> CommHook:
        """Let a model's buckets go to ``sync.on_bucket``."""
        hook = CommHook.closed_of(model)
        if hook is None:
            hook = CommHook(model)
            model.register_comm_hook(hook, _on_bucket)
        model._comm_hooks = list(model._comm_hooks)
        hook.sync = sync
        return hook

    def release(self) -> None:
        """Let go of the handle; what is copied from now on has no hook."""
        self.sync = None
        if (model := self.model()) is not None:
            model._comm_hooks = _Closed(model._comm_hooks)

    @staticmethod
    def closed_of(model: Any) -> CommHook | None:
        """Return the hook of a handle that was closed, which can be used again."""
        hooks = [state for _, state in model._comm_hooks]
        free = hooks and isinstance(hooks[0], CommHook) and hooks[0].sync is None
        return hooks[0] if free else None

    def __reduce__(self) -> Any:
        if self.sync is not None:
            raise ConfigurationError(
                "a DDP model with sparsync attached cannot be copied or pickled: its threads and its "
                "residuals belong to this rank; copy or save model.module, and attach to the copy's own "
                "DDP"
            )
        return CommHook, ()  # a copy of the model is not attached


@final
class _Closed(list[Any]):
    """DDP's list of hooks: a copy of the model has another reducer, where none is registered."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


def _on_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    if hook.sync is None:
        return allreduce_hook(hook.model().process_group, bucket)
    return hook.sync.on_bucket(bucket)


def _deliver_to_unused(averages: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give parameters that no rank used the residual mass that was delivered to them.

    DDP leaves their gradients alone (``find_unused_parameters``, ``static_graph``); dropped, that mass
    would be lost to the model.
    """
    for parameter, average in averages:
        average = average.view(parameter.shape)
        if parameter.grad is None and bool(average.any()):
            parameter.grad = average.clone()
        elif parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.copy_(average)  # DDP wants it used
