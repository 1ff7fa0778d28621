"""The steps in which gradients are exchanged: begin, accumulate, exchange, commit, write averages back.

``GradientSteps`` is the same for all models.  A ``Source`` (``gradients/sync.py``) calls it with the
gradients of a model. The ``Ranks`` that exchange them are fixed by ``attach``, or join and leave
(``elastic/gradients.py``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsync.console import say
from sparsync.errors import CommunicationError, ConfigurationError, NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import rescale_
from sparsync.feedback.step import channel_of
from sparsync.gradients.runs import Run
from sparsync.gradients.sentinel import check_replicas
from sparsync.handle import Hook, Presence
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.transports.agree import agree
from sparsync.transports.driver import Engine, run
from sparsync.transports.ledger import Traffic
from sparsync.units import Unit, local_of

if TYPE_CHECKING:  # not imported at run time, because most models need neither
    from sparsync.gradients.consensus import PartsConsensus
    from sparsync.gradients.hierarchy import NodeReducer

__all__ = ["AllRanks", "GradientSteps", "Ranks", "Step"]


class Step(ABC):
    """A step in progress, and the engine's jobs for it.

    Attributes:
        failed: whether an exchange has failed; the remaining exchanges are then skipped.
        spans: begin and end of every unit's exchange, by the clock of the reducer's communicator.
        waited: begin and end of the training thread's wait.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.jobs: list[Future[None]] = []
        self.failed = False
        self.spans: dict[int, tuple[float, float]] = {}
        self.waited: tuple[float, float] | None = None

    @abstractmethod
    def write(self, averages: Sequence[Vector]) -> None:
        """Write the averages of all units into the gradients."""

    def forget(self, finished: Future[None]) -> None:
        """Drop the jobs; keep them if the wait was interrupted, because the engine still needs them."""
        if finished.done():
            self.jobs.clear()


class Ranks(ABC):
    """The ranks that exchange the gradients of a step.

    Attributes:
        membership: the presence of this rank, through which it may leave.
    """

    membership: Presence

    @property
    @abstractmethod
    def counts(self) -> bool:
        """Whether this rank's gradients count in the averages; otherwise zeros are used instead."""

    @abstractmethod
    def begin(self, *, again: bool) -> bool:
        """Synchronise before the first gradient is accumulated; return False if this rank has left.

        With ``again``, the step is repeated, because it failed after its exchange had begun.
        """

    @abstractmethod
    def averages(self, this: Step) -> list[Vector] | None:
        """Wait for all jobs of a step, then commit; return None if peers committed without this rank.

        This runs on the engine's thread, like ``finished``.
        """

    @abstractmethod
    def finished(self) -> None:
        """Prepare for the next step, after the averages were written or the step was refused."""

    @abstractmethod
    def settled(self, applies: bool) -> bool:
        """Return whether this rank's optimizer should apply the averages; runs on the training thread."""

    @abstractmethod
    def end(self) -> None:
        """Record that the step is closed, whether it was applied or not."""

    @abstractmethod
    def part(self) -> None:
        """Wait until all ranks have applied the last step."""


@final
class AllRanks(Ranks):
    """The ranks that called ``attach`` together; ``whole`` commits their steps.

    Inside a node, ``reducer`` exchanges only this rank's part, and ``whole`` is the ``NodeReducer``.
    """

    def __init__(self, reducer: Reducer, whole: Reducer | NodeReducer, policy: str) -> None:
        self._reducer, self._whole, self._policy = reducer, whole, policy
        self.membership = Presence()

    @property
    def counts(self) -> bool:
        """Whether this rank's gradients count in the averages: always."""
        return True

    def begin(self, *, again: bool) -> bool:
        """Begin a step; begin it again only if all ranks do so.

        Otherwise messages from a rank that is still in its first attempt would be mistaken for messages
        of the second attempt.
        """
        reducer = self._reducer
        reducer.comm.check_whole()
        if again:
            try:
                with reducer.exchanging():
                    facts = {"the step that is begun again": reducer.step}
                    run(agree(reducer.channel("retry"), facts))
            except CommunicationError as error:
                raise type(error)(
                    f"rank {dist.get_rank()} repeats {reducer.place}, which broke off after "
                    f"its exchange had begun, but other ranks do not repeat it: {error}; when "
                    "backward() raises on some ranks only, restart all of them"
                ) from error
        return True

    def averages(self, this: Step) -> list[Vector]:
        """Wait for all jobs of a step, then commit."""
        try:
            for job in this.jobs:
                job.result()
        except BaseException:
            self._reducer.fail()
            raise
        return self._whole.commit(propagate_nonfinite=self._policy == "propagate")

    def finished(self) -> None:
        """Do nothing, because the reducer has already advanced."""

    def settled(self, applies: bool) -> bool:
        """Apply the averages unless the step was refused."""
        return applies

    def end(self) -> None:
        """Do nothing."""

    def part(self) -> None:
        """Do nothing: all ranks apply a step, or none does."""


@final
class GradientSteps:
    """Runs the steps in which one model's gradients are exchanged.

    ``ignored`` names parameters and buffers that may differ between ranks. Inside a node, ``nodes``
    accepts whole units, and the reducer exchanges only this rank's part of them.

    Attributes:
        ranks: the ranks that exchange the steps.
        before: steps and bytes before the first step of this process.
        last: the last step that was settled.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        engine: Engine,
        options: Options,
        ignored: Collection[str] = (),
        consensus: PartsConsensus | None = None,
        nodes: NodeReducer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.reducer, self.engine, self.consensus, self.nodes = reducer, engine, consensus, nodes
        self._plain, self._whole, self._ignored = (
            weakref.ref(model),
            nodes or reducer,
            frozenset(ignored),
        )
        watched = options.monitoring
        self._scaler, self._sentinel, self._policy = (
            watched.scaler,
            watched.sentinel,
            watched.policy,
        )
        self.ranks = ranks or AllRanks(reducer, self._whole, watched.policy)
        self.before: tuple[int, Traffic] | None = None
        self.last: Step | None = None
        self._launched = -1  # the last step whose exchange has begun
        self._finishing: Future[None] | None = None  # the job that ends the last step
        self._left = False  # whether gradients still hold the last step's averages

    @property
    def units(self) -> Sequence[Unit]:
        """The units in which gradients are accumulated; inside a node, whole units."""
        return self._whole.units

    @property
    def scaler(self) -> Any:
        """The GradScaler that scales the gradients, or None."""
        return self._scaler

    @property
    def measures(self) -> bool:
        """Whether the norm of all gradients must be known before any gradient is accumulated."""
        return self.reducer.corrector is not None and self.reducer.corrector.waits

    @property
    def joins(self) -> bool:
        """Whether small gradients are joined; False with a clip, which needs each gradient's norm."""
        correction = self.reducer.correction
        return correction is None or correction.clip is None

    # ---- called in every step, in this order -------------------------------------------------------

    def begin(self) -> bool:
        """Begin a step, and adapt the residual to its scale; return False if this rank has left."""
        reducer, ledger = self.reducer, self.reducer.comm.ledger
        # An exception in the program, e.g. KeyboardInterrupt, may have interrupted the wait for the last
        # step.  The other ranks commit that step, so this rank must finish it first.
        if self._finishing is not None:
            wait([self._finishing])
        if self.before is None:
            self.before = reducer.step, ledger.set_up()
        try:
            if not self.ranks.begin(again=self._launched == reducer.step):
                return False
            if self._scaler is not None:
                rescale_(reducer, self._scaler.get_scale())
        except BaseException:
            self.ranks.end()
            raise
        return True

    def accumulate(self, run: Run, gradient: Tensor, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of a run of parameters, 1-D, to its unit."""
        if not self.ranks.counts:
            gradient.zero_()
        correction, weights = self.reducer.correction, None
        if correction and correction.weight_decay:
            own = [local_of(parameter).reshape(-1) for parameter in parameters]
            weights = own[0] if len(own) == 1 else torch.cat(own)
        self._whole.accumulate(run.unit, run.start, gradient, weights)

    def launch(self, this: Step, unit: int) -> None:
        """Submit the exchange of a complete unit."""
        self._launched = self.reducer.step
        this.jobs.append(self.engine.submit(self._exchange(this, unit)))

    async def _exchange(self, this: Step, unit: int) -> None:
        """Exchange a unit; this runs on the engine's thread, like ``finish``."""
        if this.failed:  # the group is broken, so more exchanges would wait until their deadlines
            if self.nodes is not None:
                await self.nodes.follow(unit)
            return
        begin = self.reducer.comm.now
        try:
            await self._whole.exchange(unit)
        except BaseException:
            this.failed = True
            raise
        this.spans[unit] = begin, self.reducer.comm.now

    def finish(self, this: Step) -> None:
        """Wait for all jobs, then write the averages into the gradients, or undo the step."""
        try:
            averages = self.ranks.averages(this)
            if averages is not None:
                this.write(averages)
        except NonFiniteGradientError:
            self.reducer.skip()
            raise
        except BaseException:
            self._whole.refuse()
            raise
        finally:
            self.wait_for_gpu()
            self.ranks.finished()

    def settle(self, this: Step, finished: Future[None]) -> bool:
        """Wait for ``finish`` on the training thread; return whether to apply the averages."""
        try:
            return self.ranks.settled(self._wait(this, finished))
        finally:
            self.ranks.end()

    def _wait(self, this: Step, finished: Future[None]) -> bool:
        self.last, self._left, begin = this, True, self.reducer.comm.now
        self._finishing = finished
        try:
            finished.result()
        except NonFiniteGradientError:
            if self._policy != "skip":
                raise
            return False
        finally:
            this.waited = begin, self.reducer.comm.now
            this.forget(finished)
            if self.reducer.monitor is not None:
                self.reducer.monitor.write()  # an error raised here leaves the gradients intact
        # every rank clears its notice, so that it is not repeated, but only the lowest rank prints it
        notice = self.reducer.take_notice()
        if notice and self.reducer.comm.rank == 0:
            say(notice)
        return True

    def compare(self, *, alike: bool = False) -> None:
        """Compare replicas if due; this runs on the training thread, while the engine is idle.

        Parts of a replica are also compared if they are ``alike``, i.e. hold the same parameters, as the
        ranks of a node do.
        """
        sentinel, done, model = self._sentinel, self.reducer.step - 1, self._plain()
        if sentinel is None or model is None or not sentinel.due(done):
            return
        tensors, rank = sentinel.tensors(model, self._ignored), dist.get_rank()
        place = self.reducer.comm.ledger.place(done)
        parts = None if self.consensus is None else channel_of(self.consensus.parts, "weights")

        async def job() -> None:
            replicas = self.reducer.channel("weights")
            with self.reducer.exchanging():
                await check_replicas(sentinel, replicas, tensors, place, parts, rank)
                # compare parts after replicas, so that all nodes agree
                if alike and parts is not None:
                    await check_replicas(sentinel, parts, tensors, place, None, rank)
            self.wait_for_gpu()

        self.engine.submit(job()).result()

    # ---- whenever ----------------------------------------------------------------------------------

    def discard(self, *, ends: bool = True) -> None:
        """Undo the work of an interrupted backward pass; with ``ends``, also end the step."""

        def undo() -> None:
            self._whole.refuse()
            self.wait_for_gpu()

        self.engine.submit(undo).result()
        if ends:
            self.ranks.end()

    def restart(self) -> None:
        """Continue from a state that the reducer has loaded."""
        self._launched, self.before = -1, None
        self.reducer.comm.ledger.begin_step(self.reducer.step)

    def wait_for_gpu(self) -> None:
        """Wait for the GPU work of this thread, because other threads may use other streams."""
        for device in {unit.device for unit in self.units if unit.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def refuse_averages(
        self, modules: Iterable[nn.Module], exchanged: Collection[Tensor], until: ExitStack
    ) -> None:
        """Refuse a backward pass that adds to averages: momentum or decay would count them twice.

        The check runs in hooks on the modules' outputs, because a backward pass starts with their
        gradients.
        """
        correction, me = self.reducer.correction, weakref.ref(self)
        if not correction or not (correction.momentum or correction.weight_decay):
            return

        def begin(_gradient: Tensor) -> None:
            steps = me()
            left = steps is not None and steps._left
            if steps is not None:
                steps._left = False
            grads = [p.grad for p in exchanged if p.grad is not None] if left else []
            if any(bool(local_of(grad).any()) for grad in grads):
                raise ConfigurationError(
                    "the averages of the last exchange are still in the gradients, and the correction "
                    "would count them in momentum or decay once more; call zero_grad() after every step, "
                    "and do all but the last backward pass of a step within no_sync()"
                )

        def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(begin)  # type: ignore[no-untyped-call]

        for module in modules:
            until.callback(module.register_forward_hook(Hook(after_forward)).remove)
