"""The handle of a model whose gradients are exchanged, and the interface of their sources."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, final

from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.exclusive import refuse_inside_backward
from sparsync.feedback.reducer_state import (
    ParsedState,
    agree_state,
    parse_state,
    reducer_state,
    take_state,
)
from sparsync.fields import Exactly, Fields, opened, sealed
from sparsync.gradients.steps import GradientSteps
from sparsync.handle import Handle
from sparsync.options import Options
from sparsync.scalers import follow_scalers
from sparsync.state import outside_inference
from sparsync.transports.agree import equalise_, on_all_or_none
from sparsync.transports.driver import run
from sparsync.transports.process_group import Groups
from sparsync.units import Piece

__all__ = ["GradientSync", "Source"]


class Source(ABC):
    """Passes a model's gradients to ``GradientSteps``, in DDP's buckets or parameter by parameter."""

    @abstractmethod
    def watch(self, sync: Handle) -> None:
        """Set hooks on the model until ``sync`` is closed; through one of them, the model keeps it alive.

        The source itself must not refer to ``sync``, because such a cycle would delay freeing a model
        that the user has dropped.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate on this rank."""

    @abstractmethod
    def discard(self) -> None:
        """Undo the work of an interrupted backward pass."""

    @property
    def exchange(self) -> str:
        """The kind of exchange, as shown by ``stats``."""
        return "gradients"

    def contribute(self) -> None:
        """Refuse to weigh this rank's updates, because gradients are exchanged."""
        raise ConfigurationError(
            "contribute() weighs updates, and this exchanges gradients, which are averaged as DDP does; "
            "multiply the loss by n * ranks / (sum of all ranks' n) instead (docs/optimizers.md)"
        )

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers that each rank has changed on its own; with DDP, there are none."""
        return {}

    def step(self) -> None:
        """End a step that ``backward()`` cannot end, e.g. in a pipeline."""
        raise ConfigurationError(
            "backward() has closed the step already; step() is for pipelines: attach with "
            "Compression(schedule=...)"
        )


@final
class GradientSync(Handle):
    """The handle of a model whose gradients are exchanged on every step.

    ``source`` collects the gradients, and ``steps`` does the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: GradientSteps,
        source: Source,
        groups: Groups | ExitStack,
        options: Options,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        reducer, engine = steps.reducer, steps.engine
        membership, consensus = steps.ranks.membership, steps.consensus
        super().__init__(model, reducer, engine, groups, options, membership, consensus, pieces)
        self._steps, self._source = steps, source
        follow_scalers()
        source.watch(self)
        self.on_close.callback(refuse_inside_backward(self))

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate; the next backward pass exchanges the sum.

        FSDP2 modules still sum over shards, unless you also call ``set_requires_gradient_sync(False)``.
        """
        return self._source.no_sync()

    @property
    def steps(self) -> int:
        """The number of finished local steps; a joining rank takes over the number of its peers."""
        return self.reducer.step

    def contribute(
        self,
        _seen: float | None = None,
        /,
        *,
        tokens: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Refuse to weigh this rank's updates, because gradients are exchanged.

        Raises:
            ConfigurationError: gradients are exchanged.
        """
        self._source.contribute()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: local steps, exchanges, bytes per exchange and phase, residual norms.

        Every exchange of gradients is also a local step. Mean bytes are per local step and exclude the
        bytes sent by ``finish``, which are listed separately. "inner" lists the phases between shards of
        one replica, whose bytes are not counted elsewhere. "spans_last_exchange" is a list of ``[unit,
        begin, end]``, and "waited_last_exchange" holds the begin and end of the training thread's wait.
        Both are in seconds of this machine's ``time.perf_counter()``.
        """
        stats, last = self._numbers(self._steps.before), self._steps.last
        if self._inner is not None:
            phases = self._inner.ledger.by_phase()
            stats["inner"] = {phase: traffic.as_dict() for phase, traffic in phases.items()}
        spans = {} if last is None else last.spans
        stats["exchange"] = self._source.exchange
        stats["spans_last_exchange"] = [[unit, *span] for unit, span in spans.items()]
        stats["waited_last_exchange"] = list(last.waited) if last and last.waited else None
        return stats

    @outside_inference
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the residuals of its pieces of the parameters, thresholds and more.

        After a failed ``backward()``, this is the state before that step.
        """
        if self._engine.running:
            self._source.discard()
        pieces = copy.deepcopy(self._pieces)
        return sealed("gradients", {"reducer": reducer_state(self.reducer), "pieces": pieces})

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed.

        Raises:
            ConfigurationError: the state is from a different set-up, or holds the wrong pieces of the
                parameters.
        """
        pieces = Fields({name: Exactly(piece) for name, piece in self._pieces.items()})
        content = opened(state, "gradients", Fields({"reducer": object, "pieces": pieces}))
        return parse_state(self.reducer, content["reducer"])

    @outside_inference
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, bit for bit, from a state that this rank has saved; all ranks must call this.

        Raises:
            ConfigurationError: see ``validate``; other ranks raise a ``CheckpointError`` that names this
                rank.
            PeerError: the ranks' states are from different steps, or the state of another part of this
                replica does not fit.

        If this raises an error, nothing has changed on any rank.
        """
        self.check_open("load_state_dict()")
        comms = self.communicators
        parsed = run(on_all_or_none(comms, lambda: self.validate(state), "load its saved state"))
        run(agree_state(self.reducer.comm, parsed, parts=self._inner))
        self._source.discard()
        keep_scale, former = self._scaler is not None, reducer_state(self.reducer)

        def take() -> None:
            take_state(self.reducer, parsed, keep_scale=keep_scale)  # the next step rescales to it

        try:
            run(on_all_or_none(comms, take, "take its saved state over"))
        except Exception:  # at this scale, a residual on some rank would overflow
            take_state(self.reducer, parse_state(self.reducer, former), keep_scale=True)
            raise
        self._steps.restart()

    def shared(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because exchanged gradients keep weights equal anyway."""
        return nullcontext()

    @outside_inference
    def finish(self) -> None:
        """With ``elastic=``, wait until all ranks have applied the last step; all ranks must call this.

        Exchanged gradients keep the weights of replicas equal.  Without DDP, this also copies the first
        replica's buffers to all replicas; DDP would do so in every forward pass.
        """
        self._steps.ranks.part()
        if not self.closed and (buffers := self._source.buffers):
            comm = self.communicators[0]
            with comm.ledger.outside_steps():
                run(equalise_(comm, buffers))

    def _before_close(self) -> None:
        """Do nothing: replicas are equal, because gradients are exchanged."""

    def step(self) -> None:
        """End the step of a pipeline; call this after ``schedule.step()`` and before the optimizer.

        This starts the remaining exchanges, waits for all exchanges, and writes the averages to
        ``parameter.grad``.

        Raises:
            ConfigurationError: there is no pipeline, so ``backward()`` has already closed the step.
            NonFiniteGradientError: a rank of some stage had NaN or Inf; no rank applied anything.
            CommunicationError: a peer has died, or took longer than the timeout.
        """
        self._source.step()
