"""Exchange updates among the ranks present, for ``attach(model, optimizer, elastic=manager)``.

Before every exchange, the ranks ask torchft's manager for a quorum; between exchanges, they are
independent.  A joining rank takes part in its peers' current exchange, without contributing changes, and
adopts their count of local steps.  Once it has caught up with the shared weights, it trains from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sparsync.elastic.attendance import Attendance, check_options, summing
from sparsync.elastic.catch_up import rates_of
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
from sparsync.handle import make_engine, weakly
from sparsync.monitoring import sink_of
from sparsync.options import Options
from sparsync.sparse import DenseVector, Vector
from sparsync.state import packed, unpacked
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run, together
from sparsync.units import output_parameters
from sparsync.updates.carrier import Carrier
from sparsync.updates.fragments import Begin, Exchange, Layout, Weights
from sparsync.updates.gradient_noise import drop_broken, noise_of
from sparsync.updates.outer_engine import OuterEngine, alone
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.ranks import UpdateRanks
from sparsync.updates.sync import UpdateSync
from sparsync.updates.weights import ModelWeights, OwnWeights, trained_of

__all__ = ["PresentUpdateRanks", "attach_elastic_updates"]

# In the roll, a rank's position is one number: clock = 3 * local steps + phase.  There are three phases:
# an exchange after a local step; the exchange of ``finish``, which delivers everything; and the time
# after that exchange.
_PHASES: Final = 3
_LOCAL, _LAST, _OVER = range(_PHASES)
_EVERYTHING: Final = slice(0, None)
_EQUAL: Final = (
    "contribute() is not for elastic=, where all present ranks have equal weight; omit it"
)


def attach_elastic_updates(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep,
    options: Options,
    manager: Any,
) -> UpdateSync:
    """Exchange updates with the ranks of the current quorum; see ``attach``."""
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
    corrected = optimizers if outer.noise_correction else ()
    noise = noise_of(corrected, trained, model)
    weights = ModelWeights(model, trained, buffers=True, noise=noise)
    apart = output_parameters(model, options.compression.output_layer)
    output = apart if outer.chosen.output else ()
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
    # unlike ``attach_updates``, do not compare weights here: the first roll compares their digests
    carrier = Carrier(make_engine(reducer, ExitStack()), weights.device)
    ranks = PresentUpdateRanks(
        manager, weights, outer, layout, reducer, densities, carrier, optimizers, options
    )
    sync = UpdateSync(model, ranks.own, carrier, ranks, ExitStack(), options, unweighed=_EQUAL)
    sync.on_close.callback(ranks.membership.close)
    sync.watch(None)
    return sync


@dataclass(frozen=True)
class _Densities(Warmup):
    """The densities of the exchanges; the exchange of ``finish`` is dense, so it delivers everything."""

    # set for the exchange of ``finish``
    everything: Event = field(default_factory=Event, repr=False)

    def density(self, step: int, final: float) -> float | None:
        """Return the density of a step, or None for a dense step."""
        return None if self.everything.is_set() else super().density(step, final)

    def deliver(self, everything: bool) -> bool:
        """Make the next exchange deliver everything or select entries; return whether this changed."""
        changes = self.everything.is_set() != everything
        (self.everything.set if everything else self.everything.clear)()
        return changes


@final
class PresentUpdateRanks(UpdateRanks):
    """The ranks of the current quorum, which train independently between their exchanges.

    Args:
        manager: torchft's manager.
        weights: the weights of the model.
        settings: the settings of the outer step.
        layout: the layout of the vector of weights.
        reducer: a ``changing`` reducer with a ``summing`` algorithm.
        densities: the densities of the reducer.
        carrier: runs the exchanges.
        optimizers: the optimizers of the local steps; a joining rank takes over their states.
        options: the options of ``attach``.

    Attributes:
        attendance: represents this rank in quorums.
        membership: lets this rank leave.
        outer: the engine of the outer step, which exchanges with the ranks that are present.
        own: this rank's own weights.
    """

    membership: Membership
    asked = False

    def __init__(
        self,
        manager: Any,
        weights: ModelWeights,
        settings: OuterStep,
        layout: Layout,
        reducer: Reducer,
        densities: _Densities,
        carrier: Carrier,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
    ) -> None:
        me = weakref.ref(self)

        # the outer engine must not refer to its owner, because the reference cycle would keep a dropped
        # model alive
        def here() -> PresentUpdateRanks:
            ranks = me()
            assert ranks is not None
            return ranks

        self.outer = outer = OuterEngine(
            settings,
            layout,
            reducer,
            weights,
            optimizers=optimizers,
            carry=lambda exchange: here()._carry(exchange),
            reduce=lambda exchange, moves, units: here()._reduce(
                exchange, [its.whole() for its in moves], units
            ),
        )
        self.own, self._weights, self._reducer = OwnWeights(weights, outer), weights, reducer
        self._carrier, self._engine, self._densities = carrier, carrier.engine, densities
        # the rates are recorded at the start of an exchange, because with ``delay``, schedulers on the
        # training thread change the rates while the exchange runs
        self._rates = rates_of(outer.optimizers)
        self.attendance = Attendance(
            manager,
            reducer,
            lambda: weights_digest([outer.memory["shared"]]),
            weights.frozen().values(),
            lambda: here()._rates,
            average=True,
            nonfinite=options.monitoring.policy,
            buffers_that_hold_nan_or_inf=sorted(weights.left_out),
            **outer.described(),
        )
        self.membership = Membership(self.attendance, self._engine, weakly(self._take_part))
        self._phase, self._began_at = _LOCAL, 0
        # When this rank leaves, it continues with this copy of the weights, because the program keeps the
        # model.  The copy is held here, because the engine's reference is weak
        self._copied: Weights | None = None
        self._knows = False  # whether the program was told that this rank has left
        # set once this rank has caught up: the donor's further states, and its copy
        self._arrival: tuple[dict[str, Any], Mapping[str, Any]] | None = None

    # ---- on the training thread --------------------------------------------------------------------

    def before_forward(self, step: Callable[[], None]) -> None:
        """Join at the first forward pass; before an exchange, ask for its quorum."""
        self.membership.watch()
        if not self.attendance.members.attempt:
            with self.membership.turns.step():
                self._join(step)
        # the quorum forms while the forward pass runs
        elif self.outer.is_due(self.outer.steps):
            self.membership.ask()

    def before_step(self) -> None:
        """Until ``step`` ends, block a departure, which would read weights that the optimizer writes."""
        self.membership.turns.take()

    def _join(self, step: Callable[[], None]) -> None:
        """Join the other ranks; if they are ahead, take part in their current exchange."""
        attendance = self.attendance
        self._engine.submit(attendance.join).result()
        if not attendance.members.behind:
            return
        # the peers' exchange waits for all members of the quorum, so this rank joins it now, not after
        # its own first local step
        steps, phase = divmod(attendance.members.clock, _PHASES)
        self.outer.go_on_from(steps)
        self._began_at = steps
        if phase == _LOCAL:
            with attendance.outside_steps():
                step()
        elif phase == _LAST:
            self._conclude()
        self._phase = phase

    def check_together(self, comms: Sequence[Communicator], check: Callable[[], None]) -> None:
        """Run the check on this rank alone, because ranks that join later cannot take part in it."""
        check()

    def begin_together(
        self, comms: Sequence[Communicator], loaded: bool, own: Tensor, since: str
    ) -> bool:
        """Refuse weights loaded after ``attach``, because ranks that join could not agree on them."""
        require(
            not loaded,
            "weights were loaded after attach; load them before, so that joining ranks start from "
            "the same ones",
        )
        return False

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Run one step, during which this rank cannot leave; then continue with the current ranks.

        Raises:
            PeerError: this rank has left.
        """
        with self.membership.turns.step():
            # If this rank left between two steps, the program does not know yet.  So skip the exchange
            # of this step, and refuse only the next step.
            if self.membership.gone and not self._knows:
                self._knows = True
                yield False
                return
            self.membership.check_here()
            self._phase = _LOCAL
            yield True
            self._after_exchange()

    def finish(self) -> None:
        """Exchange everything that is left, and wait until all ranks have done so."""
        with self.membership.turns.step():
            self._finish_all()

    def _finish_all(self) -> None:
        run(self.outer.land())
        self._after_exchange()
        with self._reducer.comm.ledger.outside_steps():
            if not self.membership.left and self._phase == _LOCAL:
                self._conclude()
            # from here on, a rank that resumes after a stall learns from the roll that training is over
            self.attendance.members.tell_clock(self.outer.steps * _PHASES + _OVER)
            parts = self._copy, self._take, self._others
            self._engine.submit(lambda: self.attendance.end(*parts)).result()
        if not self.membership.left:
            self._weights.write(_EVERYTHING, self.outer.memory["shared"])
            self.outer.hide_residuals(range(1))

    def _take(self, copy: bytearray) -> None:
        """Load a copy of a peer's state, after the last exchange."""
        state = self._opened(copy)
        self.outer.catch_up(state["memory"])
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load the parts of a copy that are not exchanged."""
        for one, its in zip(self.outer.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(its)
        with torch.no_grad():
            for name, tensor in self._others().items():
                # names contain shapes, so the names differ if a buffer has grown on only one of the ranks
                if name in state["others"]:
                    tensor.copy_(state["others"][name])

    def _others(self) -> dict[str, Tensor]:
        # include all frozen parameters, because a joining rank may have different ones
        return self._weights.others(unwritten=True)

    def _conclude(self) -> None:
        """Exchange everything that has not been delivered yet."""
        self._phase = _LAST
        run(self.outer.conclude_with())
        self._after_exchange()

    def _carry(self, exchange: Begin) -> Awaitable[None]:
        # read rates and make the copy here, on the training thread and before the exchange is queued: no
        # optimizer steps at this moment, so both describe the same state
        self._rates = rates_of(self.outer.optimizers)
        self._note_begin()
        self.attendance.offer(self._copy)
        return self._carrier.carry(exchange)

    def _noting(self) -> Callable[[Begin], None]:
        """Return a ``carry`` that only records this rank's position when an exchange begins."""
        me = weakref.ref(self)  # the engine keeps the function, which must not keep its owner

        def note(_exchange: Begin) -> None:
            ranks = me()
            assert ranks is not None
            ranks._note_begin()

        return note

    def _note_begin(self) -> None:
        """Record this rank's position, local step and phase, at the start of an exchange."""
        self._began_at = self.outer.steps
        self.attendance.members.tell_clock(self._began_at * _PHASES + self._phase)

    def _go_on(self) -> None:
        """Continue from the peers' position if this rank was stale."""
        # add the difference to the current count, because with ``delay`` this rank has made local steps
        # since the exchange started
        steps, phase = divmod(self.attendance.members.clock, _PHASES)
        if steps != self._began_at:
            self.outer.go_on_from(self.outer.steps + steps - self._began_at)
            self._began_at, self._phase = steps, phase

    def _after_exchange(self) -> None:
        """Continue with the current ranks, and from their position."""
        # steps are lengthened to make up for averaging, which depends on the number of ranks
        members, outer = self.attendance.members, self.outer
        self._weights.average_over(max(members.contributors, 1))
        self._go_on()
        # load the state here rather than in ``_arrive``, because optimizers and model belong to the
        # training thread
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            extras, state = arrival
            self._load(state)
            # the donor may have copied moments with NaN or Inf, in a step that was refused afterwards
            drop_broken(outer.optimizers, alone)
            self.membership.take_over(extras, outer.optimizers)
        self.membership.end_of_leaving()

    # ---- leaving between steps, on the engine's thread ---------------------------------------------

    def _take_part(self) -> None:
        """Take part in the other ranks' exchanges, without training, until this rank has left."""
        weights, noise, outer = self._go_apart(), self._weights.noise, self.outer
        # sample gradients only once, because this rank computes no new ones
        sampled = noise is None
        while not self.membership.left:
            step, self._phase = outer.steps, _LOCAL
            if noise is not None and not sampled and outer.begins_last(step):
                noise.sample(step)
                weights.write(slice(-noise.values.numel(), None), noise.values.flatten())
                sampled = True
            run(outer.advance(step))
            outer.count()
            self._go_on()

    def _go_apart(self) -> Weights:
        """Continue with a copy of this rank's weights, because the program keeps the model.

        If the program has written to the model since the last step, e.g. to evaluate averaged weights,
        the model no longer holds this rank's weights.  The local steps since the last exchange are then
        lost.
        """
        # kernels of the training thread may still be writing to the weights, on a different stream
        device = self._weights.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        own, lost = self.own.copied()
        weights = Weights(own)
        # This is the engine's thread, so a queued exchange would wait for the current job forever.
        # Instead, the exchange is only recorded, and runs when its result is needed.
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
        """Exchange until a whole group has succeeded; return the averages, or None if all refuse."""
        attendance, reducer, members = self.attendance, self._reducer, self.attendance.members
        attendance.ready()
        self._accumulate_all(deltas)

        async def attempt() -> None:
            await together([reducer.exchange(unit) for unit in units])
            await attendance.agree(self._told)

        def missed() -> bool:
            # a stale rank accumulates zeros here: the roll has already put its changes into the residual
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
            # after a refusal, all ranks return to the shared weights; a rank that has just caught up
            # first gets these weights here
            if attendance.close(step, applied=False):
                self._arrive(step)
            return None
        for average, delta in zip(averages, deltas, strict=True):
            average.write_to_(delta)
        if members.behind and attendance.catch_up is not None:
            # clone the averages, because the outer step overwrites them
            kept = [delta.clone() for delta in deltas]
            attendance.catch_up.log[step] = kept, self.outer.momentum_of(exchange)
        if attendance.close(step, applied=True):
            self._arrive(step)
            # the new shared weights replace this rank's own weights, which began from different weights
            exchange.replace()
        return [DenseVector(delta) for delta in deltas]

    def _accumulate_all(self, deltas: Sequence[Tensor]) -> None:
        """Accumulate this rank's changes, or zeros if its weights are not those of its peers."""
        members, reducer = self.attendance.members, self._reducer
        phase = members.clock % _PHASES
        if phase == _OVER:
            raise PeerError(
                f"{reducer.place}: the others ended training while this rank was away; end this rank too"
            )
        # after a roll, this rank follows its peers' phase: deliver everything, or select entries
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
        # Repeating the peers' operations in the same order gives the same bits.  All ranks refused the
        # exchanges that are missing from the log
        logged = [catch_up.log[done] for done in range(begin, step) if done in catch_up.log]
        self.outer.catch_up(state["memory"], logged)
        if self._shared_weights() != extras["weights"]:
            place = self._reducer.comm.ledger.place(step)
            raise PeerError(
                f"{place}: this rank has repeated the other ranks' exchanges, but its shared weights "
                "differ from theirs; run all ranks on the same kind of processor, and the same "
                "build of torch"
            )
        # the random signs of ``noise`` must match the peers' signs
        if (noise := self._weights.noise) is not None:
            noise.load_state_dict(extras["noise"])
        self._arrival = extras, state

    def _copy(self) -> memoryview:
        """Return a copy of this rank's state before the open exchange, with moments in 16 bits."""
        states = [_narrow(one.state_dict()) for one in self.outer.optimizers]
        others = {name: tensor.detach() for name, tensor in self._others().items()}
        content = {"memory": self.outer.memory, "optimizers": states, "others": others}
        return memoryview(packed(sealed("elastic updates", content)))

    def _opened(self, raw: bytearray) -> dict[str, Any]:
        """Return the content of a copy that a peer has made."""
        optimizers = Each((Mapping,) * len(self.outer.optimizers))
        # momentum exists only after the first exchange, so the donor may have it even if this rank does
        # not
        memory = Fields({"shared": like(self.outer.memory["shared"])}, {"momentum": Tensor})
        content = Fields({"memory": memory, "optimizers": optimizers, "others": Mapping})
        return opened(unpacked(raw), "elastic updates", content)

    def _told(self) -> dict[str, Any]:
        present = rates_of(self.outer.optimizers)
        noise = None if self._weights.noise is None else self._weights.noise.state_dict()
        told = {"present": present, "weights": self._shared_weights(), "noise": noise}
        return {**self.membership.told(), **told}

    def _shared_weights(self) -> str:
        return weights_digest([self.outer.memory["shared"]])


def _narrow(state: Any) -> Any:
    """Return a state with its vectors in bfloat16: moments differ between ranks anyway."""
    # scalars, such as Adam's step count, keep their dtype: bfloat16 can only count to 256
    if isinstance(state, Tensor):
        wide = state.dtype in (torch.float32, torch.float64) and state.numel() > 1
        return state.to(torch.bfloat16) if wide else state
    if isinstance(state, Mapping):
        return {key: _narrow(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_narrow, state))
    return state
