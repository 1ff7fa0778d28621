"""DistributedDataParallel: ``sync = sparsync.attach(ddp_model, density=0.01)``.

The hook adds each gradient of a bucket to its unit (``accumulated = residual + gradient``).  When a
unit is complete its exchange goes to the engine thread, while the backward pass goes on.  After the
last one comes the commit, which writes the averages into the buckets and completes their futures.  So
all residuals are written together, after every total of the step is known to be finite.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.integrations.ddp_guard import DdpGuard, check_join, deliver_to_unused_
from sparsync.integrations.hierarchy import NodeReducer, node_reducer
from sparsync.integrations.options import Monitoring, Options
from sparsync.integrations.sync import Groups, Sync, call_after_backward, write_
from sparsync.units import Slot, Unit

__all__ = ["BucketStep", "DdpSync", "attach_ddp"]

Arrived = tuple[Tensor, Tensor]  # a parameter, and its gradient: a view of a bucket


def attach_ddp(model: Any, options: Options) -> DdpSync:
    """Exchange the gradients of a DDP model; see ``attach``."""
    _check_model(model)
    trained = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    units = options.units(trained.items(), model.module)
    ranks = dist.get_process_group_ranks(model.process_group)
    groups = Groups(model.process_group, options.transport.timeout)
    try:
        if options.transport.hierarchy is not None:
            nodes = node_reducer(options, ranks, units, groups)
            reducer = nodes.reducer
        else:
            nodes, reducer = None, options.reducer(groups.make(ranks), units)
    except BaseException:
        groups.close()
        raise
    sync = DdpSync(model, reducer, trained, options.monitoring, groups, nodes)
    try:
        sync.check_equal_weights()
    except BaseException:
        sync.close()
        raise
    return sync


def _check_model(model: Any) -> None:
    """Refuse a model that is not DDP, has a hook, or exchanges without one.

    Raises:
        ConfigurationError: any of it.
    """
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
    if model._comm_hooks and _Hook.closed_of(model) is None:
        raise ConfigurationError(
            "this model already has a communication hook; attach once, to a freshly wrapped model "
            "(a hook cannot be removed from DDP), or close() the first handle"
        )


@final
class DdpSync(Sync):
    """The state of one DDP model's sparse synchronisation on this rank."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        trained: Mapping[str, Tensor],
        monitoring: Monitoring,
        groups: Groups,
        nodes: NodeReducer | None = None,
    ) -> None:
        parts = (None, None) if nodes is None else (nodes.consensus, nodes.pieces)
        super().__init__(
            model.module, reducer, groups, monitoring, model.parameters_to_ignore, *parts
        )
        self._nodes = nodes
        self._whole = nodes or reducer  # takes gradients of whole units
        self._model = weakref.ref(model)
        self._place: dict[Tensor, tuple[int, Slot]] = {
            trained[slot.name]: (i, slot)
            for i, unit in enumerate(self._whole.units)
            for slot in unit.slots
        }
        self._open = BucketStep(self._whole.units)
        self._guard = DdpGuard(model, trained, reducer.correction)
        hook = _Hook.closed_of(model)
        if hook is None:
            hook = _Hook(model)
            model.register_comm_hook(hook, _on_bucket)
        self._hook, hook.sync = hook, self

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's own context, in which gradients add up on this rank."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    def _unhook(self) -> None:
        self._hook.sync = None
        self._guard.remove()

    # ---- the hook, on autograd's thread --------------------------------------------------------

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Accumulate a bucket; submit the units that it completes."""
        if bucket.index() == 0:
            self._open = BucketStep(self._whole.units)
            self._guard.exchanging()
            self._begin_step()
            if (model := self._model()) is not None and model._join_config.enable:
                check_join(model, self.reducer.correction)
        this, buffer = self._open, bucket.buffer()
        future, gradients = this.take(bucket)
        for parameter, gradient in gradients:
            unit, slot = self._find(parameter)
            this.gradients[unit][slot] = (parameter, gradient)
        corrector = self.reducer.corrector
        if corrector and corrector.waits:
            # for the norm of all gradients: nothing overlaps with the backward pass
            this.waiting += gradients
            gradients = this.waiting if bucket.is_last() else []
            if gradients:
                corrector.measure(gradient for _, gradient in gradients)
        complete = self._accumulate(this, gradients)
        if buffer.is_cuda:  # the engine's thread has streams of its own
            torch.cuda.current_stream(buffer.device).synchronize()
        for unit in complete:
            this.jobs.append(self._engine.submit(self._exchange(this, unit)))
        if bucket.is_last():
            this.check_complete()
            this.jobs.append(self._engine.submit(self._share(this)))
            in_backward = call_after_backward(lambda: self._after(this))
            this.finished = self._engine.submit(lambda: self._finish(this))
            if not in_backward:
                # a rank that is done, under join(): its residual is still delivered
                self._after(this)
        return future

    def _accumulate(self, this: BucketStep, gradients: Sequence[Arrived]) -> list[int]:
        """Accumulate gradients; return the units that they complete."""
        complete = []
        for parameter, gradient in gradients:
            unit, slot = self._find(parameter)
            weights = parameter.detach().reshape(-1)
            self._whole.accumulate(unit, slot.start, gradient.detach().reshape(-1), weights)
            this.accumulated[unit] += 1
            if this.accumulated[unit] == len(self._whole.units[unit].slots):
                complete.append(unit)
        return complete

    def _find(self, parameter: Tensor) -> tuple[int, Slot]:
        """Return the unit of a parameter, and where it lies there."""
        if parameter not in self._place:
            raise ConfigurationError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient but had "
                "requires_grad=False when attach was called; freeze or thaw before wrapping in DDP"
            )
        return self._place[parameter]

    # ---- on the engine's thread ------------------------------------------------------------------

    async def _exchange(self, this: BucketStep, unit: int) -> None:
        if this.failed:  # the group is broken: do not wait for every unit's deadline
            if self._nodes is not None:
                await self._nodes.follow(unit)
            return
        try:
            await self._whole.exchange(unit)
        except BaseException:
            this.failed = True
            raise

    async def _share(self, this: BucketStep) -> None:
        if not this.failed:
            await self._whole.share()

    def _finish(self, this: BucketStep) -> None:
        try:
            self._wait(this.jobs)
            averages = self._whole.commit(propagate_nonfinite=self._nonfinite == "propagate")
            for unit, average in enumerate(averages):
                write_(average, self._whole.units[unit], this.gradients[unit])
        except NonFiniteGradientError:
            self._whole.skip()
            this.zero_()
            raise
        except BaseException:
            self._whole.refuse()
            this.zero_()
            raise
        finally:
            this.complete()

    # ---- after DDP has copied the buckets back, on autograd's thread ------------------------------

    def _after(self, this: BucketStep) -> None:
        try:
            assert this.finished is not None
            this.finished.result()
        except NonFiniteGradientError:
            if self._nonfinite != "skip":
                raise
            for parameter in self._place:
                parameter.grad = None  # every optimizer skips it, momentum included
            return
        finally:
            self._guard.exchanged()
            if self.reducer.monitor is not None:
                self.reducer.monitor.write()  # here, what it raises spoils no gradient
        model = self._model()
        if model is not None and (model.find_unused_parameters or model.static_graph):
            deliver_to_unused_(pair for unit in this.gradients for pair in unit.values())
        self._end_step(alike=True)
        this.release()  # DDP may rebuild its buckets: the old ones must not live on


@final
class _Hook:
    """State of the hook, which DDP keeps for ever: without a handle it allreduces, as DDP does."""

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model: Any = None if model is None else weakref.ref(model)
        self.sync: DdpSync | None = None

    @staticmethod
    def closed_of(model: Any) -> _Hook | None:
        """Return the hook of a handle that was closed, which can be used again."""
        hooks = [state for _, state in model._comm_hooks]
        return hooks[0] if hooks and isinstance(hooks[0], _Hook) and hooks[0].sync is None else None

    def __reduce__(self) -> Any:
        return _Hook, ()  # a copy of the model is not attached


def _on_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    if hook.sync is None:
        return allreduce_hook(hook.model().process_group, bucket)
    return hook.sync.on_bucket(bucket)


@final
class BucketStep:
    """One backward pass: its buckets, and where each unit's averages go."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.buckets: list[tuple[torch.futures.Future[Tensor], Tensor, Tensor]] = []
        self.gradients: list[dict[Slot, Arrived]] = [{} for _ in units]
        self.accumulated = [0 for _ in units]  # parameters of each
        self.waiting: list[Arrived] = []  # gradients, for the norm of all of them
        self.jobs: list[Future[None]] = []
        self.failed = False
        self.finished: Future[None] | None = None

    def take(self, bucket: Any) -> tuple[torch.futures.Future[Tensor], list[Arrived]]:
        """Keep a bucket; return its future and its gradients, dense also where they are COO."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        # the gradient of an embedding with sparse=True has a bucket of its own
        dense = buffer.to_dense() if buffer.is_sparse else buffer
        gradients = [dense] if buffer.is_sparse else bucket.gradients()
        self.buckets.append((future, buffer, dense))
        pairs = zip(bucket.parameters(), gradients, strict=True)
        return future, [(p, _as_parameter(g, p)) for p, g in pairs]

    def check_complete(self) -> None:
        """Refuse a backward pass that has left out parameters.

        Raises:
            ConfigurationError: names the first of them.
        """
        for unit, gradients in zip(self.units, self.gradients, strict=True):
            missing = [slot.name for slot in unit.slots if slot not in gradients]
            if missing:
                raise ConfigurationError(
                    f"no gradient came for '{missing[0]}' ({len(missing)} parameters in all), which "
                    "required one when attach was called; freeze or thaw before wrapping in DDP"
                )

    def complete(self) -> None:
        """Hand the buckets back to DDP, each in its own layout."""
        for future, buffer, dense in self.buckets:
            # rows that hold nothing are left out: what COO gradients are for
            future.set_result(dense.to_sparse(1) if buffer.is_sparse else dense)

    def release(self) -> None:
        """Let go of the buckets."""
        self.buckets.clear()
        self.waiting.clear()
        for gradients in self.gradients:
            gradients.clear()

    def zero_(self) -> None:
        """Zero the gradients of a refused step, which hold what undid it, or local gradients."""
        for _, _, dense in self.buckets:
            dense.zero_()


def _as_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """View a piece of a bucket in its parameter's order: a bucket keeps the parameter's strides.

    DDP hands it over as if it were contiguous; in a channels_last convolution its elements would be in
    the order of memory, and weight decay or a saved residual would meet those of others.
    """
    strides = torch.empty_like(parameter, device="meta").stride()  # contiguous if they overlap
    if gradient.stride() == strides or gradient.numel() == 0:
        return gradient
    return gradient.as_strided(parameter.shape, strides, gradient.storage_offset())
