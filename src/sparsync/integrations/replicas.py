"""Replicas of anything: FSDP2 modules, pipeline stages, tensor-parallel or plain models.

A hook on every parameter sees its gradient when that is complete: for FSDP2 this rank's shard, reduced
over the shards; in a pipeline the sum of all micro-batches.  When a unit is complete its gradients are
taken out of ``parameter.grad``, accumulated and handed to the engine thread, while other layers, or other
stages, still go backward.  At the end of the step all parts of the model decide together, and averages
are put back into ``parameter.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.integrations.backward import call_after_backward
from sparsync.integrations.fsdp import Gate
from sparsync.integrations.open_step import OpenStep
from sparsync.integrations.placement import Placed
from sparsync.integrations.settings import Nonfinite
from sparsync.integrations.sync import Sync
from sparsync.integrations.usage import Places, Usage
from sparsync.integrations.watch import Watch
from sparsync.integrations.wires import OwnGroups
from sparsync.reducer import Reducer
from sparsync.transports.base import Communicator

__all__ = ["GradientHook", "Microbatches", "ReplicaSync"]


class Microbatches(NamedTuple):
    """How often a pipeline goes backward per step, and by what its gradients are to be multiplied."""

    passes: int
    scale: float


@final
class GradientHook:
    """What parameters call: it must not keep a handle, which keeps parameters, which keep it."""

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
        reducer: over the replicas.
        placed: the parameters.
        gate: what FSDP2 would all-reduce.
        watch: looks at the model.
        places: of the marks of used parameters.
        parts: the ranks that hold the other shards and stages of this replica, and this one.
        groups: made for it.
        nonfinite: what all ranks of all replicas do about NaN or Inf.
        microbatches: of a pipeline: then ``step()`` closes the step, not ``backward()``.
        overlap: exchange a unit as soon as it is complete; else at the end.
        first: runs before anything of the first step is committed; raises if replicas are not equal.
    """

    def __init__(
        self,
        reducer: Reducer,
        placed: Sequence[Placed],
        gate: Gate,
        watch: Watch,
        places: Places,
        parts: Communicator,
        groups: OwnGroups,
        *,
        nonfinite: Nonfinite,
        microbatches: Microbatches | None,
        overlap: bool,
        first: Callable[[Reducer], Any],
    ) -> None:
        pieces = {p.name: p.piece for p in placed if p.piece is not None}
        super().__init__(reducer, groups, parts, pieces)
        self._gate, self._watch = gate, watch
        self._nonfinite, self._overlap = nonfinite, overlap
        assert self._verdict is not None
        self._usage = Usage(places, parts, self._verdict, reducer)
        self._parameters = {p.name: p.parameter for p in placed}
        self._unit = {
            self._parameters[slot.name]: i
            for i, unit in enumerate(reducer.units)
            for slot in unit.slots
        }
        self._scheduled = microbatches is not None
        passes, self._scale = microbatches or Microbatches(1, 1.0)
        self._passes = {p.parameter: 1 if gate.manages(p.parameter) else passes for p in placed}
        self._paused = False
        self._first: Callable[[Reducer], Any] | None = first
        self._open: OpenStep | None = None
        self._last: OpenStep | None = None
        hook = GradientHook(self)
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._unit]  # type: ignore[no-untyped-call]
        watch.owner = self  # the model keeps this handle, as DDP keeps its own

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
            raise ConfigurationError(
                "backward() has closed the step already; step() is for pipelines: attach with schedule="
            )
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

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; see ``Sync.state_dict``."""
        if self._open is not None:  # a backward pass broke off
            self._discard()
        return super().state_dict()

    # ---- while gradients come, on autograd's thread ----------------------------------------------

    def on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient; exchange the units whose turn has come."""
        if not self._gate.admits(parameter) or self._paused:
            return
        this = self._present_step()
        unit = self._unit[parameter]
        if unit in this.launched:
            self._discard()
            raise ConfigurationError(self._late(parameter))
        if this.count(parameter) == self._passes[parameter]:
            this.ready[unit] += 1
        if self._overlap and not self.reducer.clipper.waits:
            for unit in this.next_complete():
                this.launch(unit, self._scale)

    def _present_step(self) -> OpenStep:
        """Return the open step, or open one."""
        task = -1 if self._scheduled else torch._C._current_graph_task_id()
        this = self._open
        if (
            this is not None and this.task != task
        ):  # that backward pass broke off, or goes on around
            self._discard()
            this = None
        if this is None:
            self.upkeep.before(self.reducer)
            this = self._open = OpenStep(self.reducer, self._engine, self._parameters, task)
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
        """Undo what a broken backward pass has begun."""
        self._open = None
        self._engine.submit(self.reducer.refuse).result()

    # ---- the end of the step -----------------------------------------------------------------------

    def _close(self) -> None:
        task = -1 if self._scheduled else torch._C._current_graph_task_id()
        if self._open is None:
            self.upkeep.before(self.reducer)
        this = self._open or OpenStep(self.reducer, self._engine, self._parameters, task)
        self._open = None
        self._last = this
        if self.reducer.clipper.waits:
            self.reducer.clipper.measure(this.local_gradients())
        for unit in this.missing():
            this.launch(unit, 1.0)
        if self._first is not None:  # behind the units: jobs start in one order on all ranks
            first, self._first = self._first, None
            this.jobs.append(self._engine.submit(first(self.reducer)))
        this.jobs.append(self._engine.submit(self._usage.share(this.came)))
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
            self.reducer.monitor.log.write()
        this.put_back_(self._usage.found)
        self._watch.left = True
        self.upkeep.after(self.reducer, self._engine, self._inner)

    def _finish(self, this: OpenStep) -> None:
        """Commit, or refuse; on the engine's thread, when everything has landed."""
        try:
            self._land(this.jobs)
            this.write_(self.reducer.commit(propagate_nonfinite=self._nonfinite == "propagate"))
        except NonFiniteGradientError:
            self.reducer.skip()
            raise
        except BaseException:
            self.reducer.refuse()
            raise

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watch.remove()
