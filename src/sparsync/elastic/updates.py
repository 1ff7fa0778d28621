"""``attach(model, optimizer, elastic=manager)``: updates exchanged by the ranks that are there.

Before every exchange torchft's manager is asked for a quorum; between exchanges ranks need nobody.  A
rank that joins takes part in the exchange that the others are in, with no changes of its own, and goes on
with their number of local steps; once it has caught up with the shared weights, it trains from these.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sparsync.elastic import handles
from sparsync.elastic.attendance import Attendance, check_options, summing
from sparsync.elastic.catch_up import Rates, rates_of
from sparsync.elastic.group import group_of
from sparsync.elastic.membership import Membership
from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    NonFiniteGradientError,
    PeerError,
    require,
)
from sparsync.feedback.agreed_setup import weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.fields import Each, Fields, like, opened, sealed
from sparsync.handle import weakly
from sparsync.monitoring import sink_of
from sparsync.options import Options
from sparsync.sparse import DenseVector, Vector
from sparsync.state import packed, unpacked
from sparsync.transports.driver import run, together
from sparsync.units import output_parameters
from sparsync.updates.fragments import Begin, Exchange, Layout, Weights
from sparsync.updates.gradient_noise import noise_of
from sparsync.updates.outer_engine import Moves
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.sync import UpdateSync
from sparsync.updates.weights import ModelWeights, trained_of

__all__ = ["ElasticUpdates", "attach_elastic_updates"]

# Where a rank is, as one number for the roll: clock = 3 * local steps + phase.  Phases: an exchange
# after a local step; the one of ``finish``, which delivers all; after it, when there is none any more.
_PHASES: Final = 3
_LOCAL, _LAST, _OVER = range(_PHASES)
_EVERYTHING: Final = slice(0, None)


def attach_elastic_updates(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep,
    options: Options,
    manager: Any,
) -> ElasticUpdates:
    """Exchange updates with the ranks of the present quorum; see ``attach``."""
    check_options(options, optimizers)
    for what, there in {
        "DistributedDataParallel": isinstance(model, nn.parallel.DistributedDataParallel),
        "an AdaptivePeriod": outer.rule is not None,
        f"fragments={outer.fragments}": outer.fragments > 1,
        "sign=True": outer.sign,
        "a model of shards": any(hasattr(p, "to_local") for p in model.parameters()),
    }.items():
        if there:
            raise ConfigurationError(
                f"{what} is not for elastic=, where a plain module, whole on every rank, is exchanged at "
                "once and after equal numbers of steps; omit one of them"
            )
    group, trained = group_of(manager), trained_of(model)
    noise = noise_of(optimizers if outer.noise_correction else (), trained)
    weights = ModelWeights(model, trained, buffers=True, noise=noise)
    output = output_parameters(model) if outer.chosen.output else ()
    layout = outer.plan(weights.read(_EVERYTHING), trained, output, rest=weights.rest)
    log, warmup = options.monitoring.log, options.compression.warmup() or Warmup()
    densities = _Densities(warmup.steps, warmup.densities)
    reducer = Reducer(
        group.comm,
        layout.units,
        summing(run(options.algorithm.on(group.comm))),
        outer.density,
        densities,
        xi_period=options.monitoring.xi_period,
        sink=None if log is None else sink_of(log, 0),
        changing=True,
    )
    # no comparison of weights here, as ``attach_updates`` makes it: the first roll compares their digests
    sync = ElasticUpdates(
        model, weights, outer, layout, reducer, densities, optimizers, options, manager
    )
    sync.watch(None)
    return sync


@dataclass(frozen=True)
class _Densities(Warmup):
    """The densities of exchanges: that of ``finish`` is dense, and delivers everything."""

    everything: Event = field(default_factory=Event, repr=False)  # it is set for that exchange

    def density(self, step: int, final: float) -> float | None:
        """Return the density of a step; None: dense."""
        return None if self.everything.is_set() else super().density(step, final)

    def deliver(self, everything: bool) -> bool:
        """Let the next exchange deliver everything, or select; return whether that is a change."""
        changes = self.everything.is_set() != everything
        (self.everything.set if everything else self.everything.clear)()
        return changes


@final
class ElasticUpdates(UpdateSync):
    """The handle of a model whose ranks take local steps, and come and go.

    ``membership`` does what is elastic about it, and ``attendance`` is this rank's part in quorums.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: ModelWeights,
        settings: OuterStep,
        layout: Layout,
        reducer: Reducer,
        densities: _Densities,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
        manager: Any,
    ) -> None:
        # this handle keeps the outer engine, which keeps ``reduce``: weakly, so that no cycle delays the
        # end of a dropped model
        me = weakref.ref(self)

        def reduce(
            exchange: Exchange, moves: list[Moves], units: range
        ) -> Awaitable[list[Vector] | None]:
            sync = me()
            assert sync is not None
            return sync._reduce(exchange, [its.whole() for its in moves], units)

        super().__init__(
            model,
            weights,
            settings,
            layout,
            reducer,
            optimizers,
            ExitStack(),
            options,
            None,
            {},
            reduce=reduce,
            weighs=False,
        )
        outer = self.outer
        # of the begin of an exchange: with ``delay`` schedulers go on meanwhile, on the training thread
        self._rates = rates_of(outer.optimizers)

        def rates() -> Rates:
            sync = me()
            assert sync is not None
            return sync._rates

        self.attendance = Attendance(
            manager,
            reducer,
            lambda: weights_digest([outer.memory["shared"]]),
            rates,
            average=True,
            nonfinite=self._nonfinite,
            buffers_that_hold_nan_or_inf=sorted(weights.left_out),
            **outer.described(),
        )
        self.membership = Membership(self.attendance, self._engine, weakly(self._take_part))
        self.on_close.callback(self.membership.close)
        self._densities = densities
        self._phase, self._began_at = _LOCAL, 0
        # the weights to leave with, while the program has the model; the engine refers to them weakly
        self._copied: Weights | None = None
        self._knows = False  # the program was told that this rank has left
        # when this rank has caught up: the donor's further states, and those of its optimizers
        self._arrival: tuple[dict[str, Any], list[Any]] | None = None

    # ---- for the user ------------------------------------------------------------------------------

    left, last_step = property(handles.left), property(handles.last_step)
    carry, leave = handles.carry, handles.leave

    def stats(self) -> dict[str, Any]:
        """Return plain numbers; "elastic" has the present members, changes, and lost residuals."""
        return {**super().stats(), "elastic": self.attendance.members.state()}

    def contribute(self, *_seen: Any, **_named: Any) -> None:
        """Refuse to weigh updates: all present ranks weigh the same."""
        raise ConfigurationError(
            "contribute() is not for elastic=, where all ranks that are there weigh the same; omit it"
        )

    # ---- on the training thread --------------------------------------------------------------------

    def _before_forward(self) -> None:
        self.membership.watch()
        super()._before_forward()
        if not self.attendance.members.attempt:
            with self.membership.turns.step():
                self._join()
        # the quorum is formed while the forward pass runs
        elif self.outer.is_due(self.outer.steps):
            self.membership.ask()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        # the optimizer writes to the weights, which a leaving would read; ``step`` ends the turn
        self.membership.turns.take()
        super()._before_step(optimizer)

    def _join(self) -> None:
        """Meet the others; if they are ahead, take part in the exchange that they are in."""
        attendance = self.attendance
        self._engine.submit(attendance.join).result()
        if not attendance.members.behind:
            return
        # the others wait in an exchange for all members of the quorum, so this rank begins it at once,
        # not when its own first local step is done
        steps, phase = divmod(attendance.members.clock, _PHASES)
        self.outer.go_on_from(steps)
        self._began_at = steps
        if phase == _LOCAL:
            with attendance.outside_steps():
                self.step()
        elif phase == _LAST:
            self._conclude()
        self._phase = phase

    def _begin_together(self, loaded: bool, own: Tensor) -> bool:
        # ranks do not attach together here, so they cannot agree on new weights together
        require(
            not loaded,
            "weights were loaded after attach; load them before, so that ranks that join meet the same",
        )
        return False

    def step(self) -> None:
        """Count a local step; begin and end exchanges.  The optimizer's hook calls it.

        Raises:
            NonFiniteGradientError: NaN or Inf on some rank, twice in a row.
            PeerError: this rank has left.
        """
        with self.membership.turns.step():
            # The rank has left while the program had no turn, and the program could not know: this step
            # is not exchanged.  The next one is refused.
            if self.membership.gone and not self._knows:
                self._knows = True
                return
            self.membership.check_here()
            self._phase = _LOCAL
            super().step()
            self._after_exchange()

    def finish(self) -> None:
        """Exchange all that is left, make replicas equal, and wait until all have done so."""
        self._check_own("finish()")
        with self.membership.turns.step():
            self._finish_all()

    def _finish_all(self) -> None:
        run(self.outer.land())
        self._after_exchange()
        with self.reducer.comm.ledger.outside_steps():
            if not self.left and self._phase == _LOCAL:
                self._conclude()
            # from here on, a rank that comes back from a stall is told that there is nothing to join
            self.attendance.members.tell_clock(self.outer.steps * _PHASES + _OVER)
            taken = self._engine.submit(lambda: self.attendance.end(self._copy)).result()
        if taken is not None:
            state = self._opened(taken)
            self.outer.catch_up(state["memory"])
            for one, its in zip(self.outer.optimizers, state["optimizers"], strict=True):
                one.load_state_dict(its)
        if not self.left:
            self._weights.write(_EVERYTHING, self.outer.memory["shared"])
        self._changes.remember()

    def _conclude(self) -> None:
        """Exchange all that is left."""
        self._phase = _LAST
        run(self.outer.conclude_with())
        self._after_exchange()

    def _carry(self, exchange: Begin) -> Awaitable[None]:
        # On the training thread, before the exchange is queued: rates and copy are those of one moment,
        # while no optimizer steps.
        self._rates = rates_of(self.outer.optimizers)
        self._note_begin()
        self.attendance.offer(self._copy)
        return super()._carry(exchange)

    def _noting(self) -> Callable[[Begin], None]:
        """Return a carrier that notes where this rank is, and leaves the exchange to be awaited."""
        me = weakref.ref(self)  # the engine keeps it, and must not keep its handle

        def note(_exchange: Begin) -> None:
            sync = me()
            assert sync is not None
            sync._note_begin()

        return note

    def _note_begin(self) -> None:
        """Note this rank's position, local step and phase, at the begin of an exchange."""
        self._began_at = self.outer.steps
        self.attendance.members.tell_clock(self._began_at * _PHASES + self._phase)

    def _go_on(self) -> None:
        """Go on from the others' position, if this rank was stale."""
        # by the difference: with ``delay`` local steps were made since the exchange began
        steps, phase = divmod(self.attendance.members.clock, _PHASES)
        if steps != self._began_at:
            self.outer.go_on_from(self.outer.steps + steps - self._began_at)
            self._began_at, self._phase = steps, phase

    def _after_exchange(self) -> None:
        """Go on with the present ranks, and from their position."""
        # noise is corrected for as many ranks as are averaged
        members, outer = self.attendance.members, self.outer
        self._weights.average_over(max(members.contributors, 1))
        self._go_on()
        # here and not in ``_arrive``: optimizers belong to the training thread
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            extras, states = arrival
            for one, state in zip(outer.optimizers, states, strict=True):
                one.load_state_dict(state)
            self.membership.take_over(extras, outer.optimizers)
        self.membership.end_of_leaving()

    # ---- leaving between steps, on the engine's thread ---------------------------------------------

    def _take_part(self) -> None:
        """Do the others' exchanges without training until this rank has left."""
        weights, noise, outer = self._go_apart(), self._weights.noise, self.outer
        # once: after those of the last local step no further gradients are made here
        sampled = noise is None
        while not self.left:
            step, self._phase = outer.steps, _LOCAL
            if noise is not None and not sampled and outer.begins_last(step):
                noise.sample(step)
                weights.write(slice(-noise.values.numel(), None), noise.values.flatten())
                sampled = True
            run(outer.advance(step))
            outer.count()
            self._go_on()

    def _go_apart(self) -> Weights:
        """Go on with a copy of this rank's weights, after exchanges under way: the program has the model.

        Where the program has written to the model since the last step, as to show averaged weights, these
        are not this rank's, and its local steps since the last exchange are lost.
        """
        # kernels of the training thread may still write to the weights, on a stream that is not this
        # one's
        device = self._weights.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with self._swap:
            own, lost = self._own, self._own is None and self._changes.written()
            weights = Weights(self._weights.read(_EVERYTHING) if own is None else own)
        # This is the engine's thread already, where a queued exchange would wait for the present job:
        # so it is only noted, and runs when its result is needed.
        self._copied = weights
        self.outer.go_on_with(weights, self._noting())
        run(self.outer.land())
        if lost:
            self.outer.restart()
        return weights

    # ---- an exchange, on the engine's thread -------------------------------------------------------

    async def _reduce(
        self, exchange: Exchange, deltas: list[Tensor], units: range
    ) -> list[Vector] | None:
        """Exchange until a group has all of it, and return the averages; None: all refuse it."""
        attendance, reducer, members = self.attendance, self.reducer, self.attendance.members
        attendance.ready()
        self._accumulate_all(deltas)

        async def attempt() -> None:
            await together([reducer.exchange(unit) for unit in units])
            await attendance.agree(self._told)

        def missed() -> bool:
            # of a stale rank these are zeros now: its own changes are in the residual since the roll
            self._accumulate_all(deltas)
            return True

        try:
            await attempt()
        except CommunicationError as error:
            attendance.persist(error, attempt, missed)
        step = reducer.step
        self._densities.deliver(everything=False)  # before the commit, which plans the next step
        try:
            averages = attendance.commit()
        except NonFiniteGradientError:
            reducer.skip()
            attendance.close(step, applied=False)
            return None
        for average, delta in zip(averages, deltas, strict=True):
            average.write_to_(delta)
        if members.behind and attendance.catch_up is not None:
            # clones: the outer step uses the averages' memory up
            kept = [delta.clone() for delta in deltas]
            attendance.catch_up.log[step] = kept, self.outer.momentum_of(exchange)
        if attendance.close(step, applied=True):
            self._arrive(step)
            # the new shared weights replace this rank's own: its local steps were from other weights
            exchange.replace()
        return [DenseVector(delta) for delta in deltas]

    def _accumulate_all(self, deltas: Sequence[Tensor]) -> None:
        """Accumulate this rank's changes, or nothing where its weights are not the others'."""
        members, reducer = self.attendance.members, self.reducer
        phase = members.clock % _PHASES
        if phase == _OVER:
            raise PeerError(
                f"{reducer.place}: the others have ended while this rank was away; end it as well"
            )
        # the others' phase after a roll: all ranks deliver everything, or all select
        if self._densities.deliver(everything=phase == _LAST):
            reducer.open()
        for unit, delta in enumerate(deltas):
            if not members.counts:
                delta.zero_()
            reducer.accumulate(unit, 0, delta)

    def _arrive(self, step: int) -> None:
        """Bring the shared weights to their state before the averages of ``step`` are applied."""
        arrival = self.attendance.arrival()
        assert arrival is not None
        extras, catch_up = arrival
        assert catch_up.copy is not None
        begin, raw = catch_up.copy
        state = self._opened(raw)
        # the same operations in the same order as on the others, so the same bits; exchanges that are not
        # in the log were refused by all
        logged = [catch_up.log[done] for done in range(begin, step) if done in catch_up.log]
        self.outer.catch_up(state["memory"], logged)
        if self._shared_weights() != extras["weights"]:
            place = self.reducer.comm.ledger.place(step)
            raise PeerError(
                f"{place}: this rank has repeated the others' exchanges, and its shared weights are not "
                "theirs; run all ranks on the same kind of processor, and the same build of torch"
            )
        if (noise := self._weights.noise) is not None:  # its random signs must be the others'
            noise.load_state_dict(extras["noise"])
        self._arrival = extras, state["optimizers"]

    def _copy(self) -> memoryview:
        """Return the shared weights before the open exchange, and this rank's moments in 16 bits."""
        states = [_narrow(one.state_dict()) for one in self.outer.optimizers]
        content = {"memory": self.outer.memory, "optimizers": states}
        return memoryview(packed(sealed("elastic updates", content)))

    def _opened(self, raw: bytearray) -> dict[str, Any]:
        """Return the content of a copy that another rank has made."""
        optimizers = Each((Mapping,) * len(self.outer.optimizers))
        # there is no momentum before the first exchange, so a donor may have one that this rank lacks
        memory = Fields({"shared": like(self.outer.memory["shared"])}, {"momentum": Tensor})
        content = Fields({"memory": memory, "optimizers": optimizers})
        return opened(unpacked(raw), "elastic updates", content)

    def _told(self) -> dict[str, Any]:
        present = rates_of(self.outer.optimizers)
        noise = None if self._weights.noise is None else self._weights.noise.state_dict()
        told = {"present": present, "weights": self._shared_weights(), "noise": noise}
        return {**self.membership.told(), **told}

    def _shared_weights(self) -> str:
        return weights_digest([self.outer.memory["shared"]])


def _narrow(state: Any) -> Any:
    """Return a state whose vectors have 16 bits: moments are each rank's own, and equal nowhere."""
    # scalars, such as Adam's count of steps, stay as they are: bfloat16 counts to 256
    if isinstance(state, Tensor):
        wide = state.dtype in (torch.float32, torch.float64) and state.numel() > 1
        return state.to(torch.bfloat16) if wide else state
    if isinstance(state, Mapping):
        return {key: _narrow(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_narrow, state))
    return state
