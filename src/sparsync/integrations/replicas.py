"""Replicas of anything: FSDP2 modules, pipeline stages, tensor-parallel or plain models.

A hook on every parameter sees its complete gradient: with FSDP2 that of this rank's shard, in a pipeline
the sum of all micro-batches.  A complete unit is exchanged while other layers or stages go backward.  At
the end of the step all parts of the model decide together; averages go back into ``parameter.grad``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.correction import Correction
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import AdaptiveDensity
from sparsync.integrations.consensus import PartsConsensus
from sparsync.integrations.ddp_guard import averages_left
from sparsync.integrations.options import Options
from sparsync.integrations.shards import (
    Fsdp,
    Shard,
    aligned,
    keys_of,
    ranks_of,
    shards_of,
)
from sparsync.integrations.sync import Groups, Sync, call_after_backward, write_
from sparsync.sparse import Vector
from sparsync.transports.agree import agree, check_equal_parameters
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine, run
from sparsync.transports.process_group import TorchCommunicator
from sparsync.units import Slot, Unit, check_same_parameters, local_of

__all__ = ["ReplicaGuard", "ReplicaStep", "ReplicaSync", "attach_replicas"]


def attach_replicas(
    model: nn.Module, options: Options, replicate: Any, schedule: Any = None
) -> ReplicaSync:
    """Exchange gradients between the replicas of what this rank holds; see ``attach``."""
    _check_free(model)
    _microbatches(schedule)
    ranks = ranks_of(replicate)
    shards = shards_of(model, ranks)
    fsdp = Fsdp(model)
    fsdp.check_covers(shards)
    groups = Groups(options.transport.world, options.transport.timeout)
    try:
        inner = groups.make(_other_parts(ranks, groups))
        parts = TorchCommunicator(inner, timeout=options.transport.timeout)
        options = _for_parts(options, parts, shards)
        units = _units(options, model, shards)
        consensus = PartsConsensus(parts, keys_of(shards))
        reducer = options.reducer(
            groups.make(ranks), units, consensus, scheduled=schedule is not None
        )
    except BaseException:
        groups.close()
        raise
    return ReplicaSync(model, reducer, shards, fsdp, consensus, groups, options, schedule)


def _microbatches(schedule: Any) -> tuple[int, float]:
    """Return how often a pipeline goes backward per step, and by what its gradients are multiplied.

    A schedule scales them when all have come; those that are under way then are scaled here.
    """
    if schedule is None:
        return 1, 1.0
    count, scales = (getattr(schedule, name, None) for name in ("_n_microbatches", "scale_grads"))
    if not isinstance(count, int) or not isinstance(scales, bool):
        raise ConfigurationError(
            f"schedule is {type(schedule).__name__}; give the schedule of torch.distributed.pipelining "
            "that runs this stage, e.g. ScheduleGPipe or Schedule1F1B"
        )
    return count, 1 / count if scales else 1.0


def _check_free(model: nn.Module) -> None:
    """Refuse a second attach: gradients would be averaged twice."""
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(isinstance(hook, _GradientHook) for hook in hooks.values()):
            raise ConfigurationError(
                f"the gradient of '{name}' is exchanged already; attach once, or close() the first "
                "handle before"
            )


def _other_parts(ranks: Sequence[int], groups: Groups) -> list[int]:
    """Return the global ranks that hold the parts of this rank's replica, this one's included.

    They are those that have the same place among their own replicas.
    """
    place = sorted(ranks).index(dist.get_rank())
    world = dist.get_process_group_ranks(groups.world)
    places = groups.gathered([place])
    return [rank for rank, its in zip(world, places, strict=True) if its == [place]]


def _for_parts(options: Options, parts: Communicator, shards: Sequence[Shard]) -> Options:
    """Agree with the other parts, and leave what differs from part to part out of common decisions.

    Raises:
        ConfigurationError: what only a single part, or parameters of a single kind, can have.
        PeerError: parts were told different things.
    """
    run(agree(parts, options.facts))
    if parts.world_size > 1 and options.correction and options.correction.clip is not None:
        raise ConfigurationError(
            "Correction(clip=...) needs the norm of whole local gradients, but each rank holds a shard "
            "or a stage; omit it and clip the averages with torch.nn.utils.clip_grad_norm_"
        )
    kinds = {p.kind for p in shards}
    if len(kinds) == 1:
        return options
    adapts = isinstance(options.density, AdaptiveDensity)
    if adapts or options.algorithm.prepare is not None:
        what = "AdaptiveDensity" if adapts else f"the algorithm '{options.algorithm.name}'"
        raise ConfigurationError(
            f"{what} decides by what a rank holds, and parameters that lie on several ranks "
            f"({', '.join(sorted(kinds))}) would be treated differently there; give a fixed density and "
            "another algorithm"
        )
    return replace(options, algorithm=replace(options.algorithm, shared=False))


def _units(options: Options, model: nn.Module, shards: Sequence[Shard]) -> list[Unit]:
    """Plan units of one kind each.

    A parameter that is replicated over tensor-parallel ranks must be selected from by itself: together
    with shards, which differ from rank to rank, other entries of it would be chosen on each of them.
    """
    units: list[Unit] = []
    for kind in dict.fromkeys(p.kind for p in shards):
        alike = [(p.name, local_of(p.parameter)) for p in shards if p.kind == kind]
        units += options.units(alike, model)
    return units


@final
class _GradientHook:
    """Called by parameters; must not keep a handle, which keeps parameters, which keep it."""

    def __init__(self, sync: ReplicaSync) -> None:
        self._sync = weakref.ref(sync)

    def __call__(self, parameter: Tensor) -> None:
        """Hand a complete gradient over."""
        sync = self._sync()
        if sync is not None:
            sync.on_gradient(parameter)


@final
class ReplicaSync(Sync):
    """The state of one model's sparse synchronisation between replicas, on this rank.

    Args:
        model: the module.
        reducer: over the replicas.
        shards: the parameters.
        fsdp: the switches of FSDP2.
        consensus: of the ranks that hold the other shards and stages of this replica.
        groups: made for it.
        options: of ``attach``.
        schedule: of a pipeline: then ``step()`` closes the step, not ``backward()``.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        shards: Sequence[Shard],
        fsdp: Fsdp,
        consensus: PartsConsensus,
        groups: Groups,
        options: Options,
        schedule: Any,
    ) -> None:
        pieces = {p.name: p.piece for p in shards if p.piece is not None}
        super().__init__(model, reducer, groups, options.monitoring, (), consensus, pieces)
        self._fsdp, self._parts, self._overlap = fsdp, consensus, options.compression.overlap
        self._parameters = {p.name: p.parameter for p in shards}
        self._unit = {
            self._parameters[slot.name]: i
            for i, unit in enumerate(reducer.units)
            for slot in unit.slots
        }
        self._scheduled = schedule is not None
        passes, self._scale = _microbatches(schedule)
        self._passes = {p.parameter: 1 if fsdp.manages(p.parameter) else passes for p in shards}
        self._paused = False
        self._compared = False  # replicas' weights, before anything of the first step is committed
        self._open: ReplicaStep | None = None
        self._last: ReplicaStep | None = None
        hook = _GradientHook(self)
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._unit]  # type: ignore[no-untyped-call]
        # the model keeps its guard, and so this handle, as DDP keeps its own
        self._guard = ReplicaGuard(model, fsdp, self._unit, options.correction, owner=self)

    # ---- for the user --------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; the next backward pass outside exchanges their sum.

        Of FSDP2 modules, shards are still summed: ``set_requires_gradient_sync(False)`` saves that, too.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def step(self) -> None:
        """Close the step of a pipeline: call it after ``schedule.step()``, before the optimizer.

        Exchanges what has not been, waits for the rest, and puts averages into ``parameter.grad``.

        Raises:
            ConfigurationError: without ``schedule=``, when ``backward()`` itself closes the step.
            NonFiniteGradientError: NaN or Inf on some rank of some stage; no rank applied anything.
            CommunicationError: a peer is gone, or took longer than the timeout.
        """
        if not self._scheduled:
            super().step()
        self._close()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers, as for DDP, and when the last step's exchanges ran.

        "exchanges_last_step" has ``[unit, begin, end]``, "waited_last_step" begin and end of what the
        training thread waited; in seconds of this machine's ``time.perf_counter()``.
        """
        last = self._last
        spans = [] if last is None else [[unit, *span] for unit, span in last.spans.items()]
        waited = None if last is None else list(last.waited)
        return {**super().stats(), "exchanges_last_step": spans, "waited_last_step": waited}

    # ---- while gradients come, on autograd's thread ----------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient; exchange the units whose turn has come."""
        if not self._fsdp.admits(parameter) or self._paused:
            return
        this = self._present_step()
        unit = self._unit[parameter]
        if unit not in this.order:
            self._discard()
            raise ConfigurationError(self._late(parameter))
        if this.count(parameter) == self._passes[parameter]:
            this.ready[unit] += 1
        if self._overlap and not self._measures:
            while this.order and this.is_complete(this.order[0]):
                this.launch(this.order[0], self._scale)

    @property
    def _measures(self) -> bool:
        """Whether the norm of all gradients is waited for."""
        return self.reducer.corrector is not None and self.reducer.corrector.waits

    def _present_step(self) -> ReplicaStep:
        """Return the open step, or open one."""
        task = -1 if self._scheduled else torch._C._current_graph_task_id()
        this = self._open
        if this is not None and this.task != task:
            # that backward pass broke off, or goes on around this one
            self._discard()
            this = None
        if this is None:
            self._begin_step()
            this = self._open = ReplicaStep(self.reducer, self._engine, self._parameters, task)
            if not self._scheduled:
                self._close_after_backward()
        return this

    def _close_after_backward(self) -> None:
        if not call_after_backward(self._close_outermost):
            self._discard()
            raise ConfigurationError(
                "gradients came outside of backward(), as in a pipeline of FSDP2 modules; attach with "
                "schedule= and call step() after the schedule's own"
            )

    def _close_outermost(self) -> None:
        if torch._C._current_autograd_node() is not None:  # of the backward pass around this one
            self._discard()
            raise ConfigurationError(
                "a backward pass inside another brought gradients, as torch.utils.checkpoint has it, and "
                "would close the step more than once; pass use_reentrant=False to checkpoint()"
            )
        self._close()

    def _late(self, parameter: Tensor) -> str:
        name = next(n for n, p in self._parameters.items() if p is parameter)
        if self._scheduled:
            advice = "call step() after every step of the schedule that attach was given"
        else:
            advice = "a module that runs several times per forward pass needs overlap=False"
        return f"a gradient of '{name}' came after its exchange had begun; {advice}"

    def _discard(self) -> None:
        self._open = None
        super()._discard()

    # ---- the end of the step -----------------------------------------------------------------------

    def _close(self) -> None:
        task = -1 if self._scheduled else torch._C._current_graph_task_id()
        if self._open is None:
            self._begin_step()
        this = self._open or ReplicaStep(self.reducer, self._engine, self._parameters, task)
        self._open = None
        self._last = this
        if self.reducer.corrector and self._measures:
            self.reducer.corrector.measure(this.local_gradients())
        while this.order:
            this.launch(this.order[0], 1.0)
        if not self._compared:  # after the units: jobs start in one order on all ranks
            this.jobs.append(self._engine.submit(self._check_first_weights()))
        used = self._parts.share_used(self.reducer.channel("used"), this.came)
        this.jobs.append(self._engine.submit(used))
        this.jobs.append(self._engine.submit(self.reducer.share()))
        finished = self._engine.submit(lambda: self._finish(this))
        begin = self.reducer.comm.now
        try:
            finished.result()
        except NonFiniteGradientError:
            if self._nonfinite != "skip":
                raise
            this.release()  # gradients stay None: every optimizer passes over them
        finally:
            this.waited = (begin, self.reducer.comm.now)
            if self.reducer.monitor is not None:
                self.reducer.monitor.write()
        this.put_back_(self._parts.used)
        self._guard.left = True
        self._end_step()

    def _finish(self, this: ReplicaStep) -> None:
        """Commit, or refuse; on the engine's thread, when everything has landed."""
        try:
            self._wait(this.jobs)
            this.write_(self.reducer.commit(propagate_nonfinite=self._nonfinite == "propagate"))
        except NonFiniteGradientError:
            self.reducer.skip()
            raise
        except BaseException:
            self.reducer.refuse()
            raise

    async def _check_first_weights(self) -> None:
        """Refuse replicas that began with different weights: DDP would have sent rank 0's."""
        self._compared = True
        if not self.reducer.step + self.reducer.skipped:
            named = [(name, local_of(weights)) for name, weights in self._parameters.items()]
            await check_equal_parameters(self.reducer.channel("weights"), named)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._guard.remove()


@final
class ReplicaStep:
    """Takes gradients out of ``parameter.grad``, so that nobody scales or clips what is under way.

    Units start in one order on all ranks, the last first, as gradients mostly come: a rank in which they
    came otherwise must not wait where its peers do not.

    Attributes:
        task: of autograd, in which the step was opened.
        came: names of parameters that had a gradient here.
        order: of the units that have not started.
        ready: complete parameters, per unit.
        spans: begin and end of their exchanges, by the clock of the reducer's communicator.
        waited: begin and end of the training thread's wait.
        jobs: what the engine runs.
        failed: nothing is to be waited for any more.
    """

    def __init__(
        self, reducer: Reducer, engine: Engine, parameters: Mapping[str, Tensor], task: int
    ) -> None:
        self._reducer, self._engine, self._parameters = reducer, engine, parameters
        self.task = task
        self._passes: Counter[Tensor] = Counter()
        self.ready = [0] * len(reducer.units)
        self.order = list(reversed(range(len(reducer.units))))
        self.came: set[str] = set()
        self._taken: dict[str, Tensor] = {}
        self._gradients: list[dict[Slot, tuple[Tensor, Tensor]]] = [{} for _ in reducer.units]
        self.spans: dict[int, tuple[float, float]] = {}
        self.waited = (0.0, 0.0)
        self.jobs: list[Future[None]] = []
        self.failed = False

    def count(self, parameter: Tensor) -> int:
        """Count a backward pass that has come to a parameter; return how many have."""
        self._passes[parameter] += 1
        return self._passes[parameter]

    def is_complete(self, unit: int) -> bool:
        """Tell whether all gradients of a unit have come."""
        return self.ready[unit] == len(self._reducer.units[unit].slots)

    def local_gradients(self) -> list[Tensor]:
        """Return what of the gradients lies here, where they are still in ``parameter.grad``."""
        return [local_of(p.grad) for p in self._parameters.values() if p.grad is not None]

    def launch(self, unit: int, scale: float) -> None:
        """Take and accumulate a unit's gradients, and hand it to the engine.

        Args:
            unit: the first of the order.
            scale: by which gradients are multiplied.
        """
        self.order.remove(unit)
        for slot in self._reducer.units[unit].slots:
            parameter = self._parameters[slot.name]
            local = local_of(self._take(slot.name, parameter))
            if scale != 1:
                local.mul_(scale)
            self._gradients[unit][slot] = (parameter, local)
            weights = local_of(parameter).reshape(-1)
            self._reducer.accumulate(unit, slot.start, local.reshape(-1), weights)
        if local.is_cuda:  # the engine's thread has streams of its own
            torch.cuda.current_stream(local.device).synchronize()
        self.jobs.append(self._engine.submit(self._exchange(unit)))

    def _take(self, name: str, parameter: Tensor) -> Tensor:
        """Take what is in ``parameter.grad``, of whatever backward pass: peers may add to it now."""
        if parameter.grad is None:  # not used here: peers may have, and its residual waits
            gradient = torch.zeros_like(parameter.detach())
        else:
            gradient = aligned(parameter.grad.detach(), parameter)
            parameter.grad = None
            self.came.add(name)
        self._taken[name] = gradient
        return gradient

    async def _exchange(self, unit: int) -> None:
        if self.failed:  # the group is broken: do not wait for every unit's deadline
            return
        begin = self._reducer.comm.now
        try:
            await self._reducer.exchange(unit)
        except BaseException:
            self.failed = True
            raise
        self.spans[unit] = begin, self._reducer.comm.now

    def write_(self, averages: Sequence[Vector]) -> None:
        """Write the averages into what was taken; on the engine's thread."""
        for unit, average in enumerate(averages):
            write_(average, self._reducer.units[unit], self._gradients[unit])
            device = self._reducer.units[unit].device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def put_back_(self, names: Collection[str]) -> None:
        """Put the averages of parameters into ``parameter.grad``, and let go of all."""
        for name, average in self._taken.items():
            if name in names:
                self._parameters[name].grad = average
        self.release()

    def release(self) -> None:
        """Let go of the gradients."""
        self._taken.clear()
        self._gradients.clear()


@final
class _ModuleHook:
    """A hook of a module, whose copies do nothing: copied or loaded models are not attached."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Call."""
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return _ModuleHook, ()


@final
class ReplicaGuard:
    """Refuses changes of a model, and averages that stay in its gradients, at every forward pass.

    Args:
        model: any model; of a list of modules each is watched, since the list itself is never called.
        fsdp: knows the parameters of FSDP2.
        exchanged: the parameters whose gradients are exchanged.
        correction: done to them before: with momentum or decay, a gradient must not come twice.
        owner: kept alive by the model.

    Attributes:
        left: averages lie in the gradients, and no backward pass has begun since.
    """

    def __init__(
        self,
        model: nn.Module,
        fsdp: Fsdp,
        exchanged: Iterable[Tensor],
        correction: Correction | None,
        owner: object,
    ) -> None:
        self._fsdp, self._exchanged, self._owner = fsdp, set(exchanged), owner
        self.left = False
        several = isinstance(model, nn.ModuleList | nn.ModuleDict)
        modules = list(model.children()) if several else [model]
        before, after = _ModuleHook(self._before_forward), _ModuleHook(self._after_forward)
        self._handles = [module.register_forward_pre_hook(before) for module in modules]
        if correction and (correction.momentum or correction.weight_decay):
            self._handles += [module.register_forward_hook(after) for module in modules]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Refuse parameters that came after attach, whose gradients would stay on this replica.

        Raises:
            ConfigurationError: names the first of them.
        """
        of_fsdp = self._fsdp.check_same(self._exchanged)
        check_same_parameters(model, self._exchanged, of_fsdp)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Look again when a backward pass begins: gradients of outputs come before any other."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_gradients)  # type: ignore[no-untyped-call]

    def _before_gradients(self, gradient: Tensor) -> None:
        """Refuse to add to averages that the correction has made.

        Raises:
            ConfigurationError: gradients were not zeroed since the last exchange.
        """
        left, self.left = self.left, False
        if left and any(
            p.grad is not None and bool(local_of(p.grad).any()) for p in self._exchanged
        ):
            raise averages_left()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._owner = None
