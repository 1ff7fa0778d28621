"""The handle that ``attach`` returns: one model's sparse synchronisation on this rank."""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d

from sparsync.errors import CommunicationError, ConfigurationError, PeerError
from sparsync.feedback.agreement import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.scaling import rescale_
from sparsync.feedback.state import ParsedState, apply_state, parse_state, reducer_state
from sparsync.feedback.step import channel_of
from sparsync.integrations.consensus import PartsConsensus
from sparsync.integrations.options import Monitoring
from sparsync.integrations.pieces import Piece, saved_pieces
from sparsync.integrations.sentinel import check_replicas
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.agree import agree, check_equal_parameters
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine, run
from sparsync.transports.rendezvous import meet, store_of
from sparsync.units import Slot, Unit, replicated_tensors

__all__ = ["Gradients", "Groups", "Sync", "call_after_backward", "write_"]

S = TypeVar("S", bound="Sync")
Gradients = Mapping[Slot, tuple[Tensor, Tensor]]  # of a unit: parameters, and their gradients


class Sync(ABC):
    """The state, the thread and the groups of one model; subclasses know when gradients arrive.

    It is a context manager, whose end closes it.

    Args:
        model: the plain module, which is not kept alive.
        reducer: of what this rank exchanges.
        groups: made for it; ``close`` ends them.
        monitoring: what is watched.
        ignored: names of parameters and buffers that may differ between ranks.
        consensus: of the ranks that hold the other shards or stages of this replica, if there are any.
        pieces: the part of each parameter that this rank exchanges; of those left out: all of it.

    Attributes:
        on_close: callbacks that undo what an integration changed; ``close`` runs them.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        groups: Groups,
        monitoring: Monitoring,
        ignored: Collection[str] = (),
        consensus: PartsConsensus | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.reducer = reducer
        self._plain, self._ignored = weakref.ref(model), frozenset(ignored)
        self._groups, self._consensus, self._pieces = groups, consensus, dict(pieces or {})
        self._inner = None if consensus is None else consensus.parts
        self._scaler, self._sentinel = monitoring.scaler, monitoring.sentinel
        self._nonfinite = monitoring.policy
        self._opened = (-1, 0)  # the last step that was opened, and the bytes sent before
        self.on_close = ExitStack()
        self._engine = Engine(reducer.algorithm.name)
        # a forgotten handle keeps neither its thread nor its sockets
        weakref.finalize(self, _release, self._engine, reducer.comm)
        ending = weakref.finalize(self, _end_groups, self._engine, groups)
        ending.atexit = False  # the end of the process ends them

    @property
    def communicators(self) -> list[Communicator]:
        """The replicas, and the parts of this replica where it is divided."""
        return [self.reducer.comm, *([] if self._inner is None else [self._inner])]

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: steps, skipped steps, bytes per step and phase, residual norms.

        "inner" has the phases between shards of one replica, whose bytes count nowhere else.
        """
        stats = reducer_stats(self.reducer)
        if self._inner is not None:
            phases = self._inner.ledger.by_phase()
            stats["inner"] = {phase: traffic.as_dict() for phase, traffic in phases.items()}
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank; see ``load_state_dict``.

        Residuals are those of this rank's pieces of parameters; "pieces" says which (``Piece``).
        After a ``backward()`` that broke off it is the state before that step.
        """
        if self._engine.running:
            self._discard()
        state = reducer_state(self.reducer)
        return {**state, "pieces": saved_pieces(self._pieces)} if self._pieces else state

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed.

        Raises:
            ConfigurationError: the state is of another set-up, or of other pieces of the parameters.
        """
        mine, saved = saved_pieces(self._pieces), state.get("pieces", {})
        if saved != mine:
            names = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
            raise ConfigurationError(
                f"the saved state has piece {saved.get(names[0])} of '{names[0]}', this rank holds "
                f"{mine.get(names[0])}; load each rank's own state into the same set-up"
            )
        return parse_state(self.reducer, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit; all ranks call it.

        The steps of a ``backward()`` that broke off are undone first.

        Raises:
            ConfigurationError: the state is of another set-up, or of other pieces of the parameters.
            PeerError: the ranks' states are of different steps, or do not fit on a rank that holds
                another part of this replica.
        """
        parsed = self.validate(state)
        self._discard()
        keep_scale = self._scaler is not None  # until the next step
        run(apply_state(self.reducer, parsed, keep_scale=keep_scale, parts=self._inner))
        self._opened = (-1, 0)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up; the next backward pass exchanges the sum."""

    def step(self) -> None:
        """Close the step of a pipeline; anywhere else ``backward()`` does.

        Raises:
            ConfigurationError: ``backward()`` has closed the step.
        """
        raise ConfigurationError(
            "backward() has closed the step already; step() is for pipelines: attach with schedule="
        )

    def close(self) -> None:
        """End the thread and the process groups; the model trains as if nothing had been attached."""
        self.on_close.close()
        self._unhook()
        self._engine.close()
        self.reducer.comm.close()
        self._groups.close()
        if self.reducer.monitor is not None:
            self.reducer.monitor.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def _unhook(self) -> None:
        """Remove all hooks from the model and its parameters."""

    def check_equal_weights(self) -> None:
        """Refuse ranks that begin with other parameters than this one.

        Raises:
            PeerError: names the first that differs, and the ranks.
        """
        model = self._plain()
        assert model is not None
        for comm in self.communicators:
            run(check_equal_parameters(comm, replicated_tensors(model, self._ignored).items()))

    # ---- of every step -------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Bring the residual to the scale of the gradients of this step.

        A step that broke off after its exchange had begun is only begun again if all ranks do: the
        messages of one that still waits for the first attempt would be taken for those of the second.

        Raises:
            CommunicationError: they do not.
        """
        reducer = self.reducer
        opened, sent = self._opened
        if opened == reducer.step and reducer.comm.ledger.total().sent > sent:
            try:
                run(agree(reducer.channel("retry"), {"the step that is begun again": reducer.step}))
            except CommunicationError as error:
                raise type(error)(
                    f"rank {dist.get_rank()} begins step {reducer.step} again, which broke off after its "
                    f"exchange had begun, but other ranks do not: {error}; when backward() raises on "
                    "some ranks only, restart all of them"
                ) from error
        self._opened = reducer.step, reducer.comm.ledger.total().sent
        if self._scaler is not None:
            rescale_(reducer, self._scaler.get_scale())

    def _wait(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for the exchanges of a step; if one failed, tell the other shards and stages."""
        try:
            for job in jobs:
                job.result()
        except BaseException:
            if self._consensus is not None:
                self._consensus.fail(self.reducer.step)
            raise

    def _end_step(self, *, alike: bool = False) -> None:
        """Compare replicas if it is time; on the training thread, when the engine has nothing to do.

        Args:
            alike: other parts hold the same parameters, as the ranks of a node do; compared as well.

        Raises:
            PeerError: some differ, and the sentinel's policy is to raise; on all ranks.
        """
        sentinel, done, model = self._sentinel, self.reducer.step - 1, self._plain()
        if sentinel is None or model is None or not sentinel.due(done):
            return
        tensors, rank = sentinel.tensors(model, self._ignored), dist.get_rank()
        units, parts = len(self.reducer.units), None
        if self._inner is not None:
            parts = channel_of(self._inner, units, "weights")

        async def compare() -> None:
            replicas = self.reducer.channel("weights")
            await check_replicas(sentinel, replicas, tensors, done, parts, rank)
            if alike and parts is not None:  # after the others: then all nodes find the same
                await check_replicas(sentinel, parts, tensors, done, None, rank)

        self._engine.submit(compare()).result()

    def _discard(self) -> None:
        """Undo what a broken backward pass has begun."""
        self._engine.submit(self.reducer.refuse).result()


def _release(engine: Engine, comm: Communicator) -> None:
    """Let the thread end, then close the sockets that it used."""
    engine.submit(comm.close) if engine.running else comm.close()
    engine.stop()


def _end_groups(engine: Engine, groups: Groups) -> None:
    """End the groups once the thread has ended; it is idle, since its jobs keep the handle alive."""
    engine.close()
    groups.close()


@final
class Groups:
    """Makes process groups among the ranks that attach a model, and ends them.

    Args:
        world: the ranks that call everything here together; None: all.
        timeout: seconds that any wait may take.
    """

    def __init__(self, world: dist.ProcessGroup | None, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self._all = dist.get_world_size(world) == dist.get_world_size()
        self._made: list[dist.ProcessGroup] = []

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank of the world, in the order of ranks.

        They meet through the store: gloo would not say which rank is missing.

        Raises:
            DeadlineError: names the ranks that have not come here in time.
        """
        rank, size = dist.get_rank(self.world), dist.get_world_size(self.world)
        card = json.dumps(list(numbers)).encode()
        cards = meet(store_of(self.world), rank, size, card, self.timeout, "attach")
        return [json.loads(card) for card in cards]

    def make(self, ranks: Sequence[int], backend: str | None = "gloo") -> dist.ProcessGroup:
        """Return a group of this rank and others; ranks of the world call it for disjoint groups.

        Args:
            ranks: global ranks, this one among them.
            backend: None for that of the default group.

        Raises:
            CommunicationError: a rank of the group is gone, or has not come here in time.
        """
        own: Any = None
        groups = sorted({tuple(theirs) for theirs in self.gathered(ranks)})
        if self._all:
            for members in groups:
                group = self._connect(members, backend)
                own = group if dist.get_rank() in members else own
        else:  # ranks that are not in the world do not call it
            own = self._connect(ranks, backend, use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        self._made.append(own)
        return own

    def close(self) -> None:
        """End the groups."""
        made, self._made = self._made, []
        for group in made:
            if not dist.is_initialized():
                continue
            names = distributed_c10d._world.pg_names
            name = names.get(group)
            dist.destroy_process_group(group)
            if not self._all and name is not None:
                # torch numbers such groups by how many there are: a name that came back would find the
                # old addresses in the store
                names[_Reserved()] = name  # type: ignore[index]

    def _connect(self, ranks: Sequence[int], backend: str | None, **options: Any) -> Any:
        """Return a group, or nothing of use on a rank that is not in it."""
        try:
            return dist.new_group(list(ranks), timedelta(seconds=self.timeout), backend, **options)
        except RuntimeError as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PeerError(
                f"rank {dist.get_rank()}, phase 'attach': ranks {list(ranks)} did not connect "
                f"within {self.timeout:g} s; one of them is gone, or cannot be reached ({reason})"
            ) from error


class _Reserved:
    """Holds the name of a group that has ended."""

    def shutdown(self) -> None:
        """Do nothing: torch calls this on every group."""


# ---- what all kinds of handles do


def write_(average: Vector, unit: Unit, gradients: Gradients) -> None:
    """Write a unit's average into its gradients, each a view of a bucket."""
    slots = unit.slots
    if isinstance(average, DenseVector):
        for slot in slots:
            view = gradients[slot][1]
            view.copy_(average.values[slot.start : slot.start + slot.size].view(view.shape))
        return
    boundaries = [*(slot.start for slot in slots), average.size]
    for slot, part in zip(slots, average.split(boundaries), strict=True):
        view = gradients[slot][1]
        if view.is_contiguous():
            part.write_to_(view.view(-1))
        else:  # channels_last and the like: a bucket keeps the parameter's strides
            view.copy_(part.to_dense().view(view.shape))


def call_after_backward(callback: Callable[[], None]) -> bool:
    """Call back when DDP has finished; what is raised then comes out of ``backward()`` itself.

    It takes a callback of a callback: DDP queues its own, later than the first.

    Returns:
        Whether there is a backward pass: not on a rank that is done and shadows others (``join()``).
    """
    engine = Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(callback))
    except RuntimeError:
        return False
    return True
