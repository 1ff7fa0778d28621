"""The steps of gradients: begin, accumulate, exchange, commit, and write averages where they belong."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsync.console import say
from sparsync.errors import CommunicationError, ConfigurationError, NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import (
    ParsedState,
    agree_state,
    check_fields,
    parse_state,
    reducer_state,
    rescale_,
    take_state,
)
from sparsync.feedback.step import channel_of
from sparsync.fields import same
from sparsync.gradients.runs import Run
from sparsync.gradients.sentinel import check_replicas
from sparsync.handle import Handle, Hook
from sparsync.options import Options
from sparsync.sparse import Vector
from sparsync.transports.agree import agree, on_all_or_none
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups
from sparsync.units import Piece, Unit, local_of

if TYPE_CHECKING:  # neither is needed without parts
    from sparsync.gradients.consensus import PartsConsensus
    from sparsync.gradients.hierarchy import NodeReducer

__all__ = ["GradientSync", "Step"]


class Step(ABC):
    """One step under way, and the engine's jobs for it.

    Attributes:
        failed: an exchange has failed, so nothing is to be waited for any more.
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


class GradientSync(Handle):
    """The handle of a model whose gradients are exchanged on every step.

    ``ignored`` are parameters and buffers that may differ between ranks.  ``nodes`` exchanges whole
    units, of which the reducer has this rank's part.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        groups: Groups | ExitStack,
        options: Options,
        ignored: Collection[str] = (),
        consensus: PartsConsensus | None = None,
        pieces: Mapping[str, Piece] | None = None,
        nodes: NodeReducer | None = None,
    ) -> None:
        super().__init__(model, reducer, groups, options, consensus, pieces)
        self._nodes, self._whole = nodes, nodes or reducer
        self._ignored = frozenset(ignored)
        self._opened = (-1, 0)  # the last step that was opened, and the bytes sent before
        self._last: Step | None = None
        self._left = False  # averages lie in the gradients, and no backward pass has begun since

    @property
    def steps(self) -> int:
        """Local steps that are done; a rank that joins others begins with their number."""
        return self.reducer.step

    def contribute(
        self,
        _seen: float | None = None,
        /,
        *,
        tokens: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Where updates are exchanged, weigh this rank's by what its steps have seen.

        Raises:
            ConfigurationError: gradients are exchanged.
        """
        raise ConfigurationError(
            "contribute() weighs updates, and this exchanges gradients, which are averaged as DDP does; "
            "multiply the loss by n * ranks / (sum of all ranks' n) instead (docs/optimizers.md)"
        )

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: local steps, exchanges, bytes of each and by phase, residual norms.

        Every exchange of gradients is also a local step.  Means of bytes are over local steps, without
        what ``finish`` sends, which is given apart.
        "inner" has the phases between shards of one replica, whose bytes count nowhere else.
        "spans_last_exchange" has ``[unit, begin, end]``, "waited_last_exchange" begin and end of what the
        training thread waited; in seconds of this machine's ``time.perf_counter()``.
        """
        stats, last = super().stats(), self._last
        if self._inner is not None:
            phases = self._inner.ledger.by_phase()
            stats["inner"] = {phase: traffic.as_dict() for phase, traffic in phases.items()}
        spans = {} if last is None else last.spans
        stats["exchange"] = "gradients"
        stats["spans_last_exchange"] = [[unit, *span] for unit, span in spans.items()]
        stats["waited_last_exchange"] = list(last.waited) if last and last.waited else None
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the residuals of its "pieces" of the parameters, thresholds, ...

        After a ``backward()`` that broke off it is the state before that step.
        """
        if self._engine.running:
            self._discard()
        state = reducer_state(self.reducer)
        return {**state, "pieces": copy.deepcopy(self._pieces)} if self._pieces else state

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed.

        Raises:
            ConfigurationError: the state is of another set-up, or of other pieces of the parameters.
        """
        check_fields(state)
        mine, saved = self._pieces, state.get("pieces", {})
        saved = saved if isinstance(saved, Mapping) else {"(all)": saved}
        if not same({name: saved.get(name) for name in {**mine, **saved}}, mine):
            wrong = (n for n in {**mine, **saved} if not same(saved.get(n), mine.get(n)))
            name = next(wrong)
            raise ConfigurationError(
                f"the saved state has piece {saved.get(name)} of '{name}', this rank holds "
                f"{mine.get(name)}; load each rank's own state into the same set-up"
            )
        return parse_state(self.reducer, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it.

        Raises:
            ConfigurationError: see ``validate``; other ranks raise a ``CheckpointError`` that names this.
            PeerError: the ranks' states are of different steps, or do not fit on a rank that holds
                another part of this replica.

        If it raises, nothing was changed on any rank.
        """
        comms = self.communicators
        parsed = run(on_all_or_none(comms, lambda: self.validate(state), "load its saved state"))
        run(agree_state(self.reducer.comm, parsed, parts=self._inner))
        self._discard()
        keep_scale, former = self._scaler is not None, reducer_state(self.reducer)

        def take() -> None:
            take_state(
                self.reducer, parsed, keep_scale=keep_scale
            )  # brought to it by the next step

        try:
            run(on_all_or_none(comms, take, "take its saved state over"))
        except Exception:  # at this scale a residual would overflow, on some rank
            take_state(self.reducer, parse_state(self.reducer, former), keep_scale=True)
            raise
        self._opened, self._before = (-1, 0), None
        self.reducer.comm.ledger.begin_step(self.reducer.step)

    def shared(self) -> AbstractContextManager[None]:
        """Show the weights that all ranks share; where gradients are exchanged, these are the model's."""
        return nullcontext()

    def finish(self) -> None:
        """Make replicas equal; where gradients are exchanged, they are."""

    def step(self) -> None:
        """Close the step of a pipeline; anywhere else ``backward()`` does.

        Raises:
            ConfigurationError: ``backward()`` has closed the step.
        """
        raise ConfigurationError(
            "backward() has closed the step already; step() is for pipelines: attach with "
            "Compression(schedule=...)"
        )

    # ---- averages that were not zeroed -----------------------------------------------------------

    def _refuse_averages(self, modules: Iterable[nn.Module], exchanged: Collection[Tensor]) -> None:
        """Refuse backward passes that add to averages, which momentum or decay would count again.

        Gradients of a module's outputs come before any other of a backward pass.
        """
        correction, me = self.reducer.correction, weakref.ref(self)
        if not correction or not (correction.momentum or correction.weight_decay):
            return

        def begin(_gradient: Tensor) -> None:
            sync = me()
            left = sync is not None and sync._left
            if sync is not None:
                sync._left = False
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
            self.on_close.callback(module.register_forward_hook(Hook(after_forward)).remove)

    # ---- of every step -------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Bring the residual to the scale of the gradients of this step.

        A step that broke off after its exchange had begun is only begun again if all ranks do: the
        messages of one that still waits for the first attempt would be taken for those of the second.
        """
        reducer = self.reducer
        if self._before is None:
            self._before = reducer.step, reducer.comm.ledger.set_up()
        opened, sent = self._opened
        if opened == reducer.step and reducer.comm.ledger.total().sent > sent:
            try:
                run(agree(reducer.channel("retry"), {"the step that is begun again": reducer.step}))
            except CommunicationError as error:
                raise type(error)(
                    f"rank {dist.get_rank()} begins {reducer.place} again, which broke off after its "
                    f"exchange had begun, but other ranks do not: {error}; when backward() raises on "
                    "some ranks only, restart all of them"
                ) from error
        self._opened = reducer.step, reducer.comm.ledger.total().sent
        if self._scaler is not None:
            rescale_(reducer, self._scaler.get_scale())

    @property
    def _measures(self) -> bool:
        """Whether nothing can be accumulated before the norm of all gradients is known."""
        return self.reducer.corrector is not None and self.reducer.corrector.waits

    @property
    def _joins(self) -> bool:
        """Whether small gradients are joined: a clip is by norms of single ones, bit for bit."""
        correction = self.reducer.correction
        return correction is None or correction.clip is None

    def _accumulate(self, run: Run, gradient: Tensor, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of a run's parameters, 1-D, to its unit."""
        correction, weights = self.reducer.correction, None
        if correction and correction.weight_decay:
            own = [local_of(parameter).reshape(-1) for parameter in parameters]
            weights = own[0] if len(own) == 1 else torch.cat(own)
        self._whole.accumulate(run.unit, run.start, gradient, weights)

    async def _exchange(self, this: Step, unit: int) -> None:
        """Exchange a unit; on the engine's thread, as all that follows until ``_settle``."""
        if this.failed:  # the group is broken: do not wait for every unit's deadline
            if self._nodes is not None:
                await self._nodes.follow(unit)
            return
        begin = self.reducer.comm.now
        try:
            await self._whole.exchange(unit)
        except BaseException:
            this.failed = True
            raise
        this.spans[unit] = begin, self.reducer.comm.now

    def _finish(self, this: Step) -> None:
        """Write the averages into the gradients when all jobs have ended, or undo the step."""
        try:
            averages = self._averages(this)
            if averages is not None:
                this.write(averages)
        except NonFiniteGradientError:
            self.reducer.skip()
            raise
        except BaseException:
            self._whole.refuse()
            raise
        finally:
            self._wait_for_gpu()

    def _averages(self, this: Step) -> list[Vector] | None:
        """Wait for all jobs, and commit; None: the step was committed without this rank."""
        try:
            for job in this.jobs:
                job.result()
        except BaseException:
            self.reducer.fail()
            raise
        return self._whole.commit(propagate_nonfinite=self._nonfinite == "propagate")

    def _settle(self, this: Step, finished: Future[None]) -> bool:
        """Wait for ``_finish`` on the training thread; False: no gradient is to be applied."""
        self._last, self._left, begin = this, True, self.reducer.comm.now
        try:
            finished.result()
        except NonFiniteGradientError:
            if self._nonfinite != "skip":
                raise
            return False
        finally:
            this.waited = begin, self.reducer.comm.now
            this.jobs.clear()
            if self.reducer.monitor is not None:
                self.reducer.monitor.write()  # here, what it raises spoils no gradient
        self._tell()
        return True

    def _tell(self) -> None:
        """Tell the user what the reducer of the lowest rank has noticed, once."""
        notice = self.reducer.take_notice()
        if notice and self.reducer.comm.rank == 0:
            say(notice)

    def _end_step(self, *, alike: bool = False) -> None:
        """Compare replicas if it is time; on the training thread, when the engine has nothing to do.

        Parts that are ``alike``, as the ranks of a node, hold the same parameters, so they are compared.
        """
        sentinel, done, model = self._sentinel, self.reducer.step - 1, self._plain()
        if sentinel is None or model is None or not sentinel.due(done):
            return
        tensors, rank = sentinel.tensors(model, self._ignored), dist.get_rank()
        place = self.reducer.comm.ledger.place(done)
        units, parts = len(self.reducer.units), None
        if self._inner is not None:
            parts = channel_of(self._inner, units, "weights")

        async def compare() -> None:
            replicas = self.reducer.channel("weights")
            await check_replicas(sentinel, replicas, tensors, place, parts, rank)
            if alike and parts is not None:  # after the others: then all nodes find the same
                await check_replicas(sentinel, parts, tensors, place, None, rank)
            self._wait_for_gpu()

        self._engine.submit(compare()).result()

    def _discard(self) -> None:
        """Undo what a broken backward pass has begun."""

        def undo() -> None:
            self._whole.refuse()
            self._wait_for_gpu()

        self._engine.submit(undo).result()

    def _wait_for_gpu(self) -> None:
        """Wait for what this thread has begun: other threads may use other streams."""
        for device in {unit.device for unit in self._whole.units if unit.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
