"""Exchange gradients without DDP, for FSDP2 modules, pipeline stages, tensor-parallel or plain models.

A hook on every parameter sees its complete gradient: with FSDP2 the gradient of this rank's shard, in a
pipeline the sum over all micro-batches.  A complete unit is exchanged while other layers or stages are
still in their backward pass.  At the end of the step, all parts of the model decide together whether to
apply the step, and the averages are written back to ``parameter.grad``.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.exclusive import check_outside_ddp
from sparsync.feedback.changes import Changes
from sparsync.gradients.consensus import PartsConsensus
from sparsync.gradients.runs import Run, parts_of, runs_of, write_part
from sparsync.gradients.shards import (
    Fsdp,
    Shard,
    aligned,
    elements_of,
    keys_of,
    ranks_of,
    shards_of,
)
from sparsync.gradients.steps import GradientSteps, Step
from sparsync.gradients.sync import GradientSync, Source
from sparsync.handle import Handle, Hook, call_after_backward, make_engine, weakly
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.transports import driver
from sparsync.transports.agree import check_equal_digests, digest
from sparsync.transports.communicator import Communicator
from sparsync.transports.process_group import Groups
from sparsync.units import Unit, check_same_parameters, kinds_of, local_of, writable

__all__ = ["ParameterSource", "ReplicaStep", "attach_replicas"]


def attach_replicas(model: nn.Module, options: Options, replicate: Any) -> GradientSync:
    """Exchange gradients between the replicas of this rank's part of a model; see ``attach``."""
    schedule = options.compression.schedule
    passes = _microbatches(schedule)
    ranks = ranks_of(replicate)
    shards = shards_of(model, ranks)
    fsdp = Fsdp(model)
    fsdp.check_covers(shards)
    groups = Groups(options.transport.world, **options.transport.waits)
    try:
        parts = options.parts(ranks, groups)
        options = _for_parts(_for_whole(options, shards, parts), shards)
        units = _units(options, model, shards)
        consensus = PartsConsensus(parts, keys_of(shards))
        reducer = options.reducer(
            groups.make(ranks), units, consensus, scheduled=schedule is not None
        )
        engine = make_engine(reducer, groups, consensus)
        steps = GradientSteps(model, reducer, engine, options, consensus=consensus)
        overlap = options.compression.overlap
        source = ParameterSource(model, steps, consensus, shards, fsdp, passes, overlap=overlap)
    except BaseException:
        groups.close()
        raise
    pieces = {p.name: p.piece for p in shards if p.piece is not None}
    return GradientSync(model, steps, source, groups, options, pieces)


def _microbatches(schedule: Any) -> tuple[int, float] | None:
    """Return the number of a pipeline's backward passes per step, and the factor on its gradients.

    The schedule scales ``parameter.grad`` once all micro-batches are done. If an exchange begins earlier,
    its gradients are no longer in ``parameter.grad``, so they are multiplied by this factor instead.
    """
    if schedule is None:
        return None
    # in torch 2.13, a schedule's number of micro-batches and its scaling are private attributes
    count, scales = (getattr(schedule, name, None) for name in ("_n_microbatches", "scale_grads"))
    if not isinstance(count, int) or not isinstance(scales, bool):
        raise ConfigurationError(
            f"schedule is {type(schedule).__name__}; give the schedule of torch.distributed.pipelining "
            "that runs this stage, e.g. ScheduleGPipe or Schedule1F1B"
        )
    return count, 1 / count if scales else 1.0


def _for_whole(options: Options, shards: Sequence[Shard], parts: Communicator) -> Options:
    """Choose a default density by the size of the whole model, so that all parts choose the same."""
    mine = torch.tensor([elements_of(shards)], device="cpu")
    elements = sum(int(size) for size in driver.run(parts.allgather(mine, "sizes")))
    return options.for_size(elements, options.tell)


def _for_parts(options: Options, shards: Sequence[Shard]) -> Options:
    """Turn off decisions that would differ between parts; refuse options where that is impossible."""
    # With several kinds, some parameters are whole on several ranks of this replica, and each of these
    # ranks also holds different shards. All these ranks must select the same entries of a whole
    # parameter, so the selection must not depend on the shards.
    kinds = {p.kind for p in shards}
    if len(kinds) == 1:
        return options
    if options.algorithm.prepare is not None:
        raise ConfigurationError(
            f"the algorithm '{options.algorithm.name}' decides by what a rank holds, and parameters that "
            f"lie on several ranks ({', '.join(sorted(kinds))}) would be treated differently on "
            "each; choose another algorithm"
        )
    # shares of k depend on all units of a rank, including shards
    return replace(options, algorithm=replace(options.algorithm, shared=False))


def _units(options: Options, model: nn.Module, shards: Sequence[Shard]) -> list[Unit]:
    """Plan units, each with parameters of one kind.

    A parameter that is replicated over tensor-parallel ranks must not share a unit with shards.  Shards
    differ from rank to rank, so each rank would select different entries of the replicated parameter,
    and its copies would drift apart.
    """
    units: list[Unit] = []
    for kind in dict.fromkeys(p.kind for p in shards):
        alike = [(p.name, local_of(p.parameter)) for p in shards if p.kind == kind]
        units += options.units(alike, model)
    return units


@final
class ParameterSource(Source):
    """Passes the gradients of single parameters to the steps, for a model without DDP.

    Args:
        model: the plain module.
        steps: the steps that exchange the gradients.
        parts: makes decisions together with the ranks that hold other parts of this replica.
        shards: the parameters whose gradients are exchanged.
        fsdp: the switches of FSDP2 in the model.
        schedule: for a pipeline, the backward passes per step and the factor on its gradients.
        overlap: exchange units while others are in their backward pass.
        compares: check that replicas begin with equal weights, and make their buffers equal at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: GradientSteps,
        parts: PartsConsensus,
        shards: Sequence[Shard],
        fsdp: Fsdp,
        schedule: tuple[int, float] | None = None,
        *,
        overlap: bool = True,
        compares: bool = True,
    ) -> None:
        self._model, self._steps, self._parts, self._fsdp = weakref.ref(model), steps, parts, fsdp
        self._overlap = overlap
        self._equalises = compares
        # whether replicas' weights have been compared, which happens before the first commit
        self._compared = not compares
        self._parameters = {p.name: p.parameter for p in shards}
        self._noted: dict[str, str] = {}  # recorded by ``_note_first_weights``
        self._changes = Changes(self._parameters)
        self._kinds = kinds_of(self._parameters)
        self._place = {
            self._parameters[slot.name]: (i, slot)
            for i, unit in enumerate(steps.units)
            for slot in unit.slots
        }
        self._runs = [
            runs_of([(i, slot) for slot in unit.slots], joined=steps.joins)
            for i, unit in enumerate(steps.units)
        ]
        self._scheduled = schedule is not None
        passes, self._scale = schedule or (1, 1.0)
        # FSDP2 sums micro-batches in the unsharded gradient, and a stage lets it reduce only after the
        # last one (torch.distributed.pipelining.stage), so a shard's hook is called once per step.
        self._passes = {p.parameter: 1 if fsdp.manages(p.parameter) else passes for p in shards}
        self._paused = False
        self._open: ReplicaStep | None = None

    def watch(self, sync: Handle) -> None:
        """Check the model on every forward pass, and count gradients, until the handle is closed."""
        model = self._model()
        assert model is not None
        # a weak reference: this source keeps the parameters alive, so their hooks must not keep it alive
        weak = weakly(self.on_gradient)
        # compiled autograd would trace the hook, which exchanges messages
        disable: Any = torch.compiler.disable
        hook = Hook(disable(weak.__call__), lambda: weak.owner)
        handles = [p.register_post_accumulate_grad_hook(hook) for p in self._place]  # type: ignore[no-untyped-call]
        # a ModuleList or ModuleDict is never called itself, so its hooks would never run
        several = isinstance(model, nn.ModuleList | nn.ModuleDict)
        modules = list(model.children()) if several else [model]
        # a strong reference: through this hook, the model keeps the handle alive, even if the user drops
        # the handle
        check = Hook(partial(self._check_model, sync))
        handles += [module.register_forward_pre_hook(check) for module in modules]
        for handle in handles:
            sync.on_close.callback(handle.remove)
        self._steps.refuse_averages(modules, self._place, sync.on_close)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on this rank."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def step(self) -> None:
        """End the step of a pipeline, whose backward passes cannot tell which of them is the last."""
        if not self._scheduled:
            super().step()
        self._close()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers; without DDP, they differ between ranks, which see different batches."""
        model = self._model()
        if model is None or not self._equalises:
            return {}
        # shapes may differ between ranks, and are compared as parts of the names
        return {
            f"{name} {tuple(buffer.shape)}": local_of(buffer)
            for name, buffer in model.named_buffers()
            if writable(buffer)
        }

    def _check_model(self, _kept: Handle, model: nn.Module, _inputs: Any) -> None:
        """Refuse parameters added after ``attach``; their gradients would stay on this replica."""
        check_outside_ddp(model)
        self._check_parameters(model)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._note_first_weights()

    def _note_first_weights(self) -> None:
        """Record the weights that replicas begin with, before a forward pass writes to them.

        ``Embedding(max_norm=...)`` shortens the rows that a batch reads, and these rows differ between
        ranks.  Weights that are loaded after a forward pass are recorded again.
        """
        reducer = self._steps.reducer
        # a loaded handle continues from a later step
        if self._compared or reducer.step + reducer.skipped:
            return
        if self._noted and not self._changes.replaced():
            return
        model = self._model()
        # include frozen parameters, e.g. the base model of a LoRA
        frozen = {} if model is None else dict(model.named_parameters())
        every = {**frozen, **self._parameters}
        self._noted = {name: digest(local_of(p)) for name, p in every.items() if writable(p)}
        self._changes.remember()

    def _check_parameters(self, model: nn.Module) -> None:
        ignored = self._fsdp.check_same(self._place)
        check_same_parameters(model, self._parameters, ignored, kinds=self._kinds)

    # ---- while gradients arrive, on autograd's thread ----------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient; exchange the units whose turn has come."""
        # if a gradient is not to be exchanged yet, leave it in ``parameter.grad``, where it accumulates;
        # a later pass exchanges the sum
        if not self._fsdp.admits(parameter) or self._paused:
            return
        this = self._present_step()
        if this is None:
            parameter.grad = None  # optimizers then skip this parameter
            return
        self._fsdp.wait_for(parameter)
        unit, slot = self._place[parameter]
        # the unit's gradients were already taken, so this gradient would stay on this rank
        if unit not in this.order:
            if self._scheduled:
                advice = "call step() after every step of the schedule that attach was given"
            else:
                advice = "a module that runs several times per forward pass needs overlap=False"
            raise self._broken(
                f"a gradient of '{slot.name}' came after its exchange had begun; {advice}"
            )
        this.passes[parameter] += 1
        if this.passes[parameter] == self._passes[parameter]:
            this.ready[unit] += 1
        # Only the first unit of ``order`` may start, even if others are complete.  Gradients may arrive
        # in different orders on different ranks, because graphs may depend on data, but exchanges must
        # start in the same order everywhere.
        if self._overlap and not self._steps.measures:
            while this.order and this.ready[first := this.order[0]] == len(this.units[first].slots):
                self._launch(this, self._scale)

    def _present_step(self) -> ReplicaStep | None:
        """Return the open step, or open one; return None if this rank takes no further steps."""
        # A step consists of one backward pass, or in a pipeline of all backward passes until ``step()``.
        # A backward pass is recognised by autograd's number for it, which only torch._C exposes.
        task = -1 if self._scheduled else torch._C._current_graph_task_id()
        if self._open is not None and self._open.task != task:
            # The backward pass of the open step either failed or encloses this one (checkpointing).
            # Discard the step without ending it: otherwise, an elastic rank might leave before this pass
            # opens its own step.
            self._open = None
            self._steps.discard(ends=False)
        if self._open is None:
            # compiled autograd does not run callbacks that a callback queues (``call_after_backward``)
            compiled = sys.modules.get("torch._dynamo.compiled_autograd")
            if getattr(compiled, "in_compiled_autograd_region", False):
                raise self._broken(
                    "gradients came in compiled autograd, whose backward pass does not tell its end; "
                    "turn it off (torch._dynamo.config.compiled_autograd), or give exchange='updates'"
                )
            # check the model again, because a loop may call parts of it, which have no hook
            if (model := self._model()) is not None and not self._scheduled:
                self._check_parameters(model)
            if not self._steps.begin():
                return None
            self._open = ReplicaStep(self._steps.units, self._runs, task)
            if not self._scheduled and not call_after_backward(self._close_outermost):
                raise self._broken(
                    "gradients came outside of backward(), as in a pipeline of FSDP2 modules; attach "
                    "with Compression(schedule=...) and call step() after the schedule's own"
                )
        return self._open

    def _close_outermost(self) -> None:
        # At the end of the outermost backward pass, none of autograd's nodes is running.  At the end of a
        # nested pass, the node that has started it still runs.
        if torch._C._current_autograd_node() is not None:
            raise self._broken(
                "a backward pass inside another brought gradients, as in torch.utils.checkpoint, and "
                "would close the step more than once; pass use_reentrant=False to checkpoint()"
            )
        self._close()

    def _broken(self, why: str) -> ConfigurationError:
        """Discard the open step, and return the error to raise."""
        self.discard()
        return ConfigurationError(why)

    @property
    def scaler(self) -> Any:
        """The GradScaler that ``attach`` was given, or None, for ``follow_scalers``."""
        return self._steps.scaler

    def discard(self) -> None:
        """Undo the work of an interrupted backward pass."""
        self._open = None
        self._steps.discard()

    def _launch(self, this: ReplicaStep, scale: float) -> None:
        """Take, scale and accumulate the gradients of the next unit in order; submit its exchange."""
        unit = this.order.pop(0)
        names = [slot.name for slot in this.units[unit].slots]
        parameters = [self._parameters[name] for name in names]
        gradients = [local_of(this.take(*pair)) for pair in zip(names, parameters, strict=True)]
        if scale != 1:
            torch._foreach_mul_(gradients, scale)
        # keep the gradients for ``write``; until the commit, the residual uses the memory of large ones
        this.gradients[unit] = gradients
        for its in self._runs[unit]:
            # ``contiguous`` is needed for a strided 1-D tensor that the user has put into .grad, because
            # ``reshape`` keeps its strides
            own = [gradients[number].reshape(-1).contiguous() for number in its.members]
            gradient = own[0] if len(own) == 1 else torch.cat(own)
            self._steps.accumulate(its, gradient, [parameters[number] for number in its.members])
        # gradients were accumulated on autograd's stream, but the engine's thread uses its own stream
        self._steps.wait_for_gpu()
        self._steps.launch(this, unit)

    # ---- the end of the step -----------------------------------------------------------------------

    def _close(self) -> None:
        # A rank whose stage got no gradient still takes part, with zeros: its peers wait for it, and its
        # residual must be delivered.
        steps, reducer, engine = self._steps, self._steps.reducer, self._steps.engine
        if self._open is None:
            steps.begin()
        this = self._open or ReplicaStep(steps.units, self._runs, -1)
        self._open = None
        if reducer.corrector and steps.measures:
            grads = [p.grad for p in self._place if p.grad is not None]
            reducer.corrector.measure(map(local_of, grads))
        while this.order:
            self._launch(this, 1.0)  # the schedule has already scaled these gradients
        # jobs must start in the same order on all ranks: first the units, then the jobs below
        if not self._compared:
            self._note_first_weights()  # needed if the loop calls parts of the model, which have no hook
            this.jobs.append(engine.submit(self._check_first_weights()))
        used = self._parts.share_used(reducer.channel("used"), this.came)
        this.jobs.append(engine.submit(used))
        this.jobs.append(engine.submit(reducer.share()))
        # A gradient is written if any rank used the parameter: with None on one replica and zeros on
        # another, weight decay would change only the latter. If the step was refused, all gradients stay
        # None, so that optimizers skip them.
        finished = engine.submit(lambda: steps.finish(this))
        try:
            if steps.settle(this, finished):
                for name in this.taken.keys() & self._parts.used:
                    # a parameter that has been frozen since gets none: momentum and decay would change it
                    if (parameter := self._parameters[name]).requires_grad:
                        parameter.grad = this.taken[name]
        finally:
            if finished.done():  # otherwise the wait was interrupted, and the engine still writes
                this.taken.clear()
                this.gradients.clear()
        steps.compare()

    async def _check_first_weights(self) -> None:
        """Refuse replicas that began with different weights, which DDP would have made equal."""
        self._compared, reducer = True, self._steps.reducer
        # compare nothing after a load, which continues from a later step
        if not reducer.step + reducer.skipped:
            await check_equal_digests(reducer.channel("weights"), self._noted)


@final
class ReplicaStep(Step):
    """One step, which takes gradients out of ``parameter.grad``, so that nothing else changes them.

    Units start in the same order on all ranks, in whatever order gradients arrive.  Otherwise ranks
    would wait for units that their peers have not started.  The last unit comes first, because gradients
    mostly arrive in this order.

    Attributes:
        task: the number of autograd's task in which the step was opened.
        gradients: the gradients of the units that have started, one per slot.
        passes: number of backward passes that have reached each parameter.
        ready: number of complete parameters, by unit.
        order: the units that have not started, in order.
        taken: gradients taken out of ``parameter.grad``, or zeros if there was none, by name.
        came: names of the parameters that had a gradient on this rank.
    """

    def __init__(self, units: Sequence[Unit], runs: Sequence[Sequence[Run]], task: int) -> None:
        super().__init__(units)
        self.runs, self.task = runs, task
        self.gradients: dict[int, list[Tensor]] = {}
        self.passes: Counter[Tensor] = Counter()
        self.ready = [0] * len(units)
        self.order = list(reversed(range(len(units))))
        self.taken: dict[str, Tensor] = {}
        self.came: set[str] = set()

    def take(self, name: str, parameter: Tensor) -> Tensor:
        """Remove and return ``parameter.grad``, the sum of one or more backward passes.

        Return zeros if there is no gradient, because peers may have used the parameter, and its residual
        may be delivered.
        """
        if parameter.grad is None:
            gradient = torch.zeros_like(parameter.detach())
        else:
            gradient = aligned(parameter.grad.detach(), parameter)
            parameter.grad = None
            self.came.add(name)
        self.taken[name] = gradient
        return gradient

    def write(self, averages: Sequence[Vector]) -> None:
        """Write the averages of all units into the gradients."""
        for unit, (average, runs) in enumerate(zip(averages, self.runs, strict=True)):
            for run, part in parts_of(average, runs):
                write_part(part, run, [self.gradients[unit][number] for number in run.members])
