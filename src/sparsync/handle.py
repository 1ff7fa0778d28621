"""The handle that ``attach`` returns; it owns the exchanges of one model on this rank."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, final

from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import ConfigurationError, require
from sparsync.feedback.agreed_setup import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import ParsedState
from sparsync.options import Options
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Abortable, Engine
from sparsync.transports.ledger import Traffic
from sparsync.transports.process_group import Groups
from sparsync.units import Piece

if TYPE_CHECKING:  # only sharded and pipelined replicas need it
    from sparsync.gradients.consensus import PartsConsensus

__all__ = ["CommHook", "Handle", "Hook", "Presence", "call_after_backward", "make_engine", "weakly"]


class Presence:
    """The membership of a rank that takes part in every step of a training run.

    With ``elastic=``, ranks may join and leave, and a ``Membership`` is used instead.
    """

    @property
    def left(self) -> bool:
        """Whether this rank has left; its program should then end."""
        return False

    def carry(self, **_named: Any) -> None:
        """Refuse to name states for joining ranks."""
        raise ConfigurationError("carry() is for ranks that join, with elastic=; omit it")

    def leave(self) -> None:
        """Refuse to leave, because the rank takes part in every step."""
        raise ConfigurationError(
            "leave() is for elastic=; without it, all ranks train to the end, so end them together"
        )

    def stats(self) -> dict[str, Any]:
        """Return the numbers that ``Handle.stats`` adds to the handle's own."""
        return {}


class Handle(ABC):
    """Owns the state, the thread and the process groups of one attached model.

    ``GradientSync`` and ``UpdateSync`` are the two kinds; each decides what is exchanged, and when.  All
    other differences between handles come from the objects that are passed to the constructor.

    The model keeps its handle alive, and the handle ends with the model, so nothing has to be closed.  As
    a context manager, the handle closes itself.  When the process exits, the handle is closed while the
    interpreter and the transports still work.

    Args:
        model: the plain module.
        reducer: accumulates and exchanges.
        engine: the thread of the model's exchanges (``make_engine``).
        groups: the process groups that were opened for this model.
        options: the settings of ``attach``, including those for NaN and Inf, GradScaler and sentinel.
        membership: with ``elastic=``, lets this rank leave.
        consensus: for a replica split over ranks, makes decisions together with the ranks that hold its
            other parts.
        pieces: for a replica split over ranks, this rank's pieces of the parameters.

    Attributes:
        on_close: callbacks that undo changes to the model or its wrappers; ``close`` runs them.
        decided: with "auto", the reason for exchanging gradients or updates; otherwise empty.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        engine: Engine,
        groups: Groups | ExitStack,
        options: Options,
        membership: Presence,
        consensus: PartsConsensus | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.reducer, self._engine, self._plain = reducer, engine, weakref.ref(model)
        self.membership = membership
        self._pieces = dict(pieces or {})
        self._inner = None if consensus is None else consensus.parts
        watched, self.decided = options.monitoring, options.decided
        self._scaler, self._sentinel = watched.scaler, watched.sentinel
        self._nonfinite = watched.policy
        self.on_close = ExitStack()
        # The finalizer runs when the model is collected or the process exits. Finalizers run in the
        # reverse order of their creation, so the engine ends before the transport.
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._pid, engine, reducer.comm, groups)

    @property
    def communicators(self) -> list[Communicator]:
        """The communicator to other replicas, and the one to the ranks with other parts of this replica.

        Exchanges in flight are finished first, so that both communicators are idle.
        """
        if self._engine.running:
            # the engine runs this callable after all exchanges in flight
            self._engine.submit(lambda: None).result()
        return [self.reducer.comm, *([] if self._inner is None else [self._inner])]

    @property
    def closed(self) -> bool:
        """Whether this handle is closed; a closed handle exchanges nothing, but keeps its state."""
        return not self._engine.running

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of finished local steps; a joining rank takes over the number of its peers."""

    # ---- training ----------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate; the next backward pass exchanges the sum."""

    @abstractmethod
    def step(self) -> None:
        """End a step that no hook can end: in pipelines, and for updates without an optimizer."""

    @abstractmethod
    def contribute(
        self,
        seen: float | None = None,
        /,
        *,
        tokens: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Weigh this rank's updates by the number of samples in its steps."""

    @abstractmethod
    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the weights shared by all ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Make all replicas equal."""

    # ---- ranks that join and leave, with ``elastic=`` ----------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this rank has left; its program should then end."""
        return self.membership.left

    def carry(self, **named: Any) -> None:
        """Name further objects whose states a joining rank takes over, e.g. ``scheduler=scheduler``.

        The objects need ``state_dict()`` and ``load_state_dict()``.  Their states must be small (64 MiB
        in all) and consist of plain values and tensors.

        Raises:
            ConfigurationError: an object lacks one of these methods, or there is no ``elastic=``.
        """
        self.membership.carry(**named)

    def leave(self) -> None:
        """Leave after the next two exchanges; the first of them hands this rank's residual to its peers.

        SIGTERM has the same effect, and also ends the process once this rank has ``left``.

        Raises:
            ConfigurationError: there is no ``elastic=``.
        """
        self.membership.leave()

    # ---- numbers and state -------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return plain numbers: local steps, exchanges, bytes per exchange and phase, residual norms."""

    def _numbers(self, before: tuple[int, Traffic] | None) -> dict[str, Any]:
        """Return the numbers of both kinds of handles, without the steps and bytes in ``before``."""
        stats = reducer_stats(self.reducer, self.steps, before)
        chosen = {"choices": [self.decided]} if self.decided else {}
        return {**stats, **chosen, **self.membership.stats()}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for ``load_state_dict``."""

    @abstractmethod
    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, bit for bit, from a state that this rank has saved; all ranks must call this."""

    # ---- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread and the process groups; the model then trains as if nothing had been attached.

        An exchange in flight is finished first, within the transport's timeout, because peers may
        be waiting for it.  If updates are exchanged, the handle warns when replicas still differ (call
        ``finish`` first).  Each rank then keeps its own optimizer moments, so even equal gradients would
        drive replicas apart.  Before you continue with plain DDP, give all ranks the moments of one
        rank, or new ones.

        Calling this is optional: the end of the process and the end of the model both close the handle.
        In a forked child, such as a DataLoader worker, this does nothing.
        """
        if not self.closed:
            self._before_close()
        self._close()

    def check_open(self, what: str) -> None:
        """Refuse an action that needs the other ranks if this handle is closed.

        Raises:
            ConfigurationError: the handle is closed; the message names ``what``.
        """
        require(
            not self.closed,
            f"{what} needs the other ranks, and this handle is closed; call it before close(), or within "
            "the handle's with block, or attach again",
        )

    @abstractmethod
    def _before_close(self) -> None:
        """Warn, before a regular ``close``, about work that it would leave undone."""

    def _close(self) -> None:
        if os.getpid() != self._pid:  # the parent's sockets, groups and log are still in use
            return
        self.on_close.close()
        self._engine.close(self.reducer.comm.timeout)
        self._end()
        if self.reducer.monitor is not None:
            self.reducer.monitor.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled, e.g. with the trainer that holds this handle."""
        raise ConfigurationError(
            f"{type(self).__name__}, the handle that attach returned, cannot be copied or pickled: its "
            "threads and its residuals belong to this rank; copy or save sync.state_dict(), and leave "
            "the handle out of the objects that hold it"
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._engine.end()  # do not wait: after an error, peers may never join the exchange in flight
            self._close()


def make_engine(
    reducer: Reducer, groups: Groups | ExitStack, consensus: PartsConsensus | None = None
) -> Engine:
    """Start the thread that runs a model's exchanges, and that can abort their communication."""
    comms: list[Abortable] = [reducer.comm]
    comms += [] if consensus is None else [consensus.parts]
    comms += [groups] if isinstance(groups, Groups) else []
    return Engine(reducer.algorithm.name, comms)


def _end(pid: int, engine: Engine, comm: Communicator, groups: Groups | ExitStack) -> None:
    """End the thread, then close the communicator and the groups that it used."""
    # In a forked child, such as a DataLoader worker, this runs on copies. The child has none of the
    # threads behind the groups, so destroying a group would end the child with a segmentation fault.
    if os.getpid() != pid:
        return
    engine.end()
    # A busy engine is still inside native code that uses the communicator and the groups, so they stay
    # open. This function must not wait for the engine, because the garbage collector may call it on the
    # engine's own thread.
    if not engine.busy:
        comm.close()
        groups.close()


# ---- hooks ----------------------------------------------------------------------------------------


@final
class Hook:
    """A hook on a module or parameter; its copies do nothing, because a copied model is not attached."""

    def __init__(
        self, call: Callable[..., None] | None = None, owner: Callable[[], Any] = lambda: None
    ) -> None:
        self._call, self._owner = call, owner

    @property
    def owner(self) -> Any:
        """The object whose method this hook calls, if ``weakly`` made the hook; otherwise None."""
        return self._owner()

    def __call__(self, *arguments: Any) -> None:
        """Call the function, if there is one."""
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> Any:
        return Hook, ()


def weakly(method: Callable[..., None]) -> Hook:
    """Return a hook that calls a handle's method, but does not keep the handle alive."""
    known = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (bound := known()) is not None:
            bound(*arguments)

    return Hook(call, lambda: getattr(known(), "__self__", None))


def call_after_backward(callback: Callable[[], None]) -> bool:
    """Run a callback once DDP has finished; ``backward()`` raises the callback's error, if any.

    Returns:
        Whether a backward pass is running: False on a rank that has run out of data (``join()``).
    """
    engine = Variable._execution_engine
    try:  # a callback that a callback queues runs last, after DDP's own callback
        engine.queue_callback(lambda: engine.queue_callback(callback))
    except RuntimeError:
        return False
    return True


@final
class CommHook:
    """The state of DDP's communication hook; without a handle, the hook allreduces like plain DDP.

    ``register_comm_hook`` may be called only once per DDP reducer, and no method removes a hook.
    So ``close`` leaves the hook registered without a handle, and the next ``attach`` gives it a new
    handle.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.model: Any = None if model is None else weakref.ref(model)
        self.sync: Handle | None = None
        self.on_bucket: Any = None

    @staticmethod
    def taken(
        model: DistributedDataParallel, sync: Handle, on_bucket: Callable[[Any], Any]
    ) -> CommHook:
        """Pass a model's buckets to ``on_bucket``; the model's hook keeps the handle alive."""
        hook = CommHook.closed_of(model)
        if hook is None:
            hook = CommHook(model)
            model.register_comm_hook(hook, _on_bucket)
        # replace a ``_Closed`` list with a plain one, so that copying the model is an error from now on
        model._comm_hooks = list(model._comm_hooks)
        hook.sync, hook.on_bucket = sync, on_bucket
        return hook

    def release(self) -> None:
        """Release the handle; later copies of the model have no hook."""
        self.sync = self.on_bucket = None
        if (model := self.model()) is not None:
            model._comm_hooks = _Closed(model._comm_hooks)

    @staticmethod
    def closed_of(model: Any) -> CommHook | None:
        """Return the hook that a closed handle has left on the model, for reuse, or None."""
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
        return CommHook, ()  # the copy belongs to no model


@final
class _Closed(list[Any]):
    """DDP's list of hooks after ``close``; a copy of it is empty.

    Copying a DDP module copies its attributes, including this list, but the copy builds a new reducer
    (torch 2.13: ``__getstate__``, ``__setstate__``).  A full copy of the list would name a hook that the
    new reducer does not know, and ``attach`` would reuse that hook.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


# This function has no annotations, because DDP compares a hook's annotations with classes.  Here they
# would be strings (``from __future__ import annotations``), which DDP would reject.
def _on_bucket(hook, bucket):  # type: ignore[no-untyped-def]
    if hook.sync is None:
        return allreduce_hook(hook.model().process_group, bucket)
    return hook.on_bucket(bucket)
