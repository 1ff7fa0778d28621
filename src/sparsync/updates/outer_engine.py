"""The engine of the outer step: it exchanges the updates of a rank's weights and applies their average.

``OuterStep`` holds the settings; ``attach`` and ``OuterAverager`` run an engine with them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.averaging.averager import mean
from sparsync.errors import DisagreementError, NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import ParsedState, reducer_state, take_state
from sparsync.feedback.step import Use
from sparsync.fields import Common, Exactly, Kind, Number
from sparsync.kernels.moves import move_
from sparsync.sparse import DenseVector, Vector, host_memory, runs
from sparsync.state import Stateful
from sparsync.transports.agree import unequal_steps
from sparsync.transports.driver import together
from sparsync.transports.ledger import Ledger
from sparsync.units import is_finite
from sparsync.updates.contributions import Contributions, Weight, shown_of
from sparsync.updates.fragments import Begin, Exchange, Layout, Scratch, Weights, rotate_
from sparsync.updates.gradient_noise import common_rate, drop_broken
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.periods import AdaptivePeriod, drift_of, followed, share_of
from sparsync.updates.saved import outer_kinds

__all__ = ["Carry", "Moves", "OuterEngine", "OuterState", "Reduce", "alone", "kinds_of"]

_FINISHED: Final = 1 << 22  # elements per allreduce in ``deliver``

Carry = Callable[[Begin], Awaitable[None] | None]
Reduce = Callable[[Exchange, list["Moves"], range], Awaitable[list[Vector] | None]]


@dataclass(frozen=True)
class OuterState:
    """The number of exchanges in a row that were refused because of NaN or Inf."""

    refused: int = 0


def _nobody(_exchange: Begin) -> None:
    """Start nothing in the background (None), so each exchange runs when its result is needed."""


def alone(_here: bool) -> bool:
    """Answer that a condition holds on no other part, because the replica is whole on this rank."""
    return False


@final
class OuterEngine(Stateful):
    """Runs an ``OuterStep`` on one rank: counts local steps, starts exchanges, and applies their results.

    Args:
        settings: the settings of the outer step.
        layout: the layout of the vector of weights, made by ``settings.plan``.
        reducer: the reducer of the layout's units.
        weights: this rank's weights, to be read and written; the caller must keep a reference to them.
        optimizers: the optimizers whose broken moments are dropped, and whose learning rate is used in
            a step by signs.
        carry: starts an exchange after earlier ones, and returns an awaitable of its end.  If it returns
            None, the exchange runs when its result is needed.
        reduce: exchanges the moves of units and returns their averages, whose memory may be
            overwritten, or None if all ranks refuse the moves.  By default, the reducer does this.
        on_any_part: returns whether a condition holds on any part of this replica.
        weighs: whether ranks weigh their updates; if None, the first exchange determines this.
        ledgers: additional ledgers whose errors name the local step.
        on_host: keep ``memory`` and the vectors of late exchanges in host memory; runs are copied to the
            weights' device and back.

    Attributes:
        steps: the number of finished local steps.
        memory: vectors, saved with the state: "shared", equal on all ranks, and "momentum".
        state: counts refused exchanges.
        period: the current period.
        drift: the last measured drift, with an ``AdaptivePeriod``.
        contributions: the count of samples that this rank has seen.
    """

    def __init__(
        self,
        settings: OuterStep,
        layout: Layout,
        reducer: Reducer,
        weights: Weights,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        carry: Carry = _nobody,
        reduce: Reduce | None = None,
        on_any_part: Callable[[bool], bool] = alone,
        weighs: bool | None = False,
        ledgers: Sequence[Ledger] = (),
        on_host: bool = False,
    ) -> None:
        self.settings, self.layout, self.reducer = settings, layout, reducer
        self.optimizers = list(optimizers)
        self.go_on_with(weights, carry)
        self._reduce = reduce or self._by_reducer
        self._on_any_part, self._ledgers = on_any_part, [*ledgers, reducer.comm.ledger]
        self.steps, self.period, self.drift = 0, settings.first_period, 0.0
        self._weights_like = weights.read(slice(0, 0))
        self._memory_like = self._weights_like.cpu() if on_host else self._weights_like
        self.memory = {"shared": self.read()}
        self.state = OuterState()
        self.contributions = Contributions(weighs=weighs)
        self.contributions.plan(len(layout.fragments))
        # for each fragment, the local step after which it was last exchanged
        self._sent = [-1] * len(layout.fragments)
        self._under_way: list[Exchange] = []
        self._interrupted = False  # whether the last wait was interrupted, e.g. by Ctrl-C
        # if a wait was interrupted: its step, and whether the step's exchanges have yet to begin
        self._left_off: tuple[int, bool] | None = None
        self._scratch = Scratch()
        self._part_of = {
            unit: part for part, one in enumerate(layout.fragments) for unit in one.units
        }
        self._note(0)

    def _note(self, step: int) -> None:
        for ledger in self._ledgers:
            ledger.within(step)

    def go_on_with(self, weights: Weights, carry: Carry) -> None:
        """Continue with these weights, e.g. with a copy if a leaving rank's program keeps the model."""
        # a weak reference: an exchange in flight keeps this engine alive, but must not keep a model
        # alive that the user has dropped
        self._kept, self._carry = weakref.ref(weights), carry

    @property
    def _weights(self) -> Weights:
        weights = self._kept()
        assert weights is not None
        return weights

    def begin_again(self, shared: Tensor) -> None:
        """Restart from weights that are equal on all ranks, without residuals or exchanges in flight."""
        self.memory, self.state = {"shared": self._at_home(shared)}, OuterState()
        self._under_way.clear()
        self._left_off = None
        for residual in self.reducer.residuals:
            residual.load(None)

    def read(self, weights: Weights | None = None) -> Tensor:
        """Return a copy of these weights, by default the engine's, on the device of ``memory``."""
        weights = weights or self._weights
        size = max((one.span.stop for one in self.layout.fragments), default=0)
        if not self._offloaded or not size:
            return weights.read(slice(0, None)).to(self._memory_like.device)
        made = self._zeros(size)
        for place in self._runs(slice(0, size)):
            made[place] = weights.read(place)
        return made

    @property
    def _offloaded(self) -> bool:
        """Whether ``memory`` is in host memory, and the weights are not."""
        return self._memory_like.device != self._weights_like.device

    def _zeros(self, size: int) -> Tensor:
        """Return zeros on the device of ``memory``."""
        if self._offloaded:
            return host_memory(size, self._weights_like.dtype, self._weights_like.device)
        return self._memory_like.new_zeros(size)

    def _at_home(self, vector: Tensor, *, copy: bool = False) -> Tensor:
        """Return a vector on the device of ``memory``; with ``copy``, always return a copy."""
        if self._offloaded:
            return self._zeros(vector.numel()).copy_(vector)
        return vector.to(self._memory_like.device, copy=copy)

    def differs(self) -> bool:
        """Return whether this rank's trained weights differ from the shared ones."""
        return not all(
            self._weights.read(place).equal(self.layout.rounded(place, self._shared(place)))
            for place in self._runs(slice(0, self.layout.end))
        )

    def write(self, weights: Weights, values: Tensor) -> None:
        """Replace weights with values that are on the device of ``memory``."""
        # Inside a node, every call of ``write`` is collective.  So make only one, unless values must be
        # copied to another device, which is done in runs.
        most = values.numel() if values.device == self._weights_like.device else None
        for place in self._runs(slice(0, values.numel()), most):
            weights.write(place, values[place])

    def begins(self, step: int) -> bool:
        """Return whether a fragment is sent after local step ``step``."""
        return bool(self._due(step))

    def begins_last(self, step: int) -> bool:
        """Return whether the last fragment, with the buffers, is sent after local step ``step``."""
        return (len(self.layout.fragments) or 1) - 1 in self._due(step)

    def is_due(self, step: int) -> bool:
        """Return whether a fragment is sent or applied after local step ``step``."""
        return bool(self._due(step)) or any(one.lands <= step for one in self._under_way)

    def _due(self, step: int) -> list[int]:
        """Return the fragments whose period ends with local step ``step``."""
        # The result depends only on the step and on the last exchange, which all ranks made together.
        # So all ranks start the same exchanges after the same step, without a message.
        if step < self.settings.warmup_steps:
            return (
                list(range(len(self.layout.fragments) or 1)) if step in self.settings.warm else []
            )
        if self.settings.rule is not None:
            return [0] if step - self._sent[0] >= self.period else []
        # periods count from the last exchange of the warm-up; fragments take turns within a period
        since = step - max(self.settings.warm, default=-1)
        count = len(self.layout.fragments) or 1
        offsets = [part * self.period // count for part in range(count)]
        return [part for part, at in enumerate(offsets) if (since - at) % self.period == 0]

    async def advance(self, step: int) -> None:
        """Apply the exchanges that end after local step ``step``, and start those that are due.

        Raises:
            NonFiniteGradientError: NaN or Inf was exchanged twice in a row.
        """
        await self.resume()
        await self._advance(step, begins=True)

    async def resume(self) -> None:
        """Complete a step whose wait was interrupted, e.g. by ``KeyboardInterrupt``.

        The exchange has continued meanwhile, and the other ranks apply it.  Call this before the weights
        change.
        """
        if self._left_off is not None:
            (step, begins), self._left_off = self._left_off, None
            await self._advance(step, begins=begins)

    async def _advance(self, step: int, *, begins: bool) -> None:
        # The first call of ``land`` applies late exchanges, because the next exchanges must start from
        # weights that contain them.  The second call applies exchanges without delay, which have just
        # started.
        try:
            await self.land(step)
            for part in self._due(step) if begins else ():
                self._begin(
                    part, step, 0 if step < self.settings.warmup_steps else self.settings.delay
                )
            begins = False
            await self.land(step)
        except BaseException:
            self._left_off = (step, begins) if self._interrupted else None
            raise

    def _begin(self, part: int, step: int, delay: int = 0, *, last: bool = False) -> None:
        """Start the exchange of a fragment."""
        lr, seen, self._sent[part] = self.lr(), self.contributions.take(part), step
        exchange = Exchange(part, step + delay, delay > 0, lr=lr, last=last, seen=seen)
        if exchange.late:  # copy the weights, because local steps continue to change them
            began, span = self._row(exchange, 0), self.layout.fragments[part].span
            for place in self._runs(span):
                began[_within(span, place)] = self._weights.read(place)
            exchange.begin_with(began)
        exchange.carry(self._carry(partial(self._exchange, exchange)))
        self._under_way.append(exchange)

    async def conclude_with(self) -> None:
        """Exchange the only fragment a last time, without momentum.

        Whether this delivers everything depends on the plan of the reducer, which the caller sets.
        """
        await self.land()
        self._begin(0, self.steps, last=True)
        await self.land()

    def go_on_from(self, step: int) -> None:
        """Continue from the step count of the other ranks, which have just exchanged."""
        self.steps, self._sent = step, [step - 1] * len(self._sent)

    def catch_up(
        self, memory: Mapping[str, Tensor], applied: Iterable[tuple[Sequence[Tensor], float]] = ()
    ) -> None:
        """Adopt a peer's memory, then apply the averages that peers have applied, with their momentum.

        The model must consist of a single fragment.
        """
        self.memory, units = dict(memory), self.layout.fragments[0].units
        for averages, momentum in applied:
            exchange = Exchange(0, self.steps, late=False)
            for unit, average in zip(units, averages, strict=True):
                self._apply(exchange, unit, DenseVector(average), momentum)

    def count(self) -> None:
        """Count a local step."""
        self.steps += 1

    async def land(self, step: float = math.inf) -> None:
        """Apply the exchanges in flight that are due by local step ``step``, in order."""
        refused = False
        while self._under_way and (refused or self._under_way[0].lands <= step):
            exchange = self._under_way[0]
            try:
                await self._settle(exchange)
            finally:
                if not self._interrupted:
                    self._under_way.pop(0)
            # a refusal also drops all later exchanges, because they started from weights that are about
            # to be undone
            refused |= exchange.refused
            if not exchange.refused:
                self.state, span = OuterState(), self.layout.fragments[exchange.part].span
                seen = self.contributions.applied(exchange)
                self._weights.reshard()
                # A late exchange is applied after a fixed step, because it ends at different times on
                # different ranks.  Its change is added to the weights, which keeps the local steps that
                # were made meanwhile.
                if exchange.shared is not None and exchange.weights is not None:
                    self.memory["shared"][span] = exchange.shared
                    for place in self._runs(span):
                        change = exchange.weights[_within(span, place)]
                        self._weights.write(place, change, add=True)
                else:
                    self._return(exchange.part)
                if seen:
                    self._weights.landed(span, self.memory["shared"])
                if self.settings.rule is not None:
                    self._follow_drift(self.settings.rule, exchange)
            self._scratch.keep(exchange.scratch)
        if not refused:
            return
        # After a refusal, all ranks return to the weights that they had after the last exchange, and
        # drop broken moments.  If the next exchange is also refused, the return has not helped, so the
        # error is raised; otherwise, ranks might return forever.
        self.state = OuterState(self.state.refused + 1)
        drop_broken(self.optimizers, self._on_any_part)
        if self.state.refused > 1:
            raise self._weights.refused(self.reducer.comm.ledger.local_step)
        self.restart()

    def _follow_drift(self, rule: AdaptivePeriod, exchange: Exchange) -> None:
        """Choose the next period, equal on all ranks and all parts of a replica."""
        self.drift = exchange.drift
        period = followed(rule, self.period, self.drift, self._on_any_part)
        if exchange.lands >= self.settings.warmup_steps:
            self.period = period

    def restart(self) -> None:
        """Reset the weights to their values after this rank's last exchange."""
        self.contributions.drop()
        self._weights.reshard()
        for part in range(len(self.layout.fragments)):
            self._return(part)

    def _return(self, part: int) -> None:
        """Reset the weights of a fragment to their values after its last exchange."""
        for place in self._runs(self.layout.fragments[part].span):
            self._weights.write(place, self._base(place))

    async def deliver(self, step: int | None = None) -> None:
        """Finish the exchanges in flight, then deliver everything that is left, uncompressed.

        Args:
            step: the number of this rank's finished local steps; by default ``steps``.

        Raises:
            DisagreementError: ranks have finished different numbers of local steps, and nothing more
                was exchanged.
            PeerError: another part of this replica failed, and this part's changes were delivered.
        """
        await self.resume()
        await self.land()
        finite = await self._meet(self.steps if step is None else step)
        reducer, shared = self.reducer, self.memory["shared"]
        try:
            with reducer.exchanging():
                weights = await self.contributions.weigh_all(reducer)
        except BaseException:
            reducer.fail()
            raise
        # If the weights of any rank, or of any part of this replica, contain NaN or Inf, nothing is
        # delivered, and residuals keep their values.  Every part takes part in the vote.
        finite = not self._on_any_part(not finite) and finite
        # the cosine transform needs whole units
        most = shared.numel() if self.settings.dct else _FINISHED
        kept = set() if finite else set(self._part_of.values())
        for place in self._runs(slice(0, shared.numel()), most) if finite else ():
            missing = self._missing(place, weights)
            try:
                with reducer.exchanging():
                    average = await mean(reducer.comm, missing)
            except BaseException:
                reducer.fail()
                raise
            units = list(self.layout.units_at(place))
            if not is_finite(average):  # the sum has overflowed, on all ranks alike
                kept |= {self._part_of[unit] for unit, *_ in units}
                continue
            shared[place] = self._stepped(average, place, 0.0, self.lr())
            for unit, at, _ in units:
                reducer.residuals[unit].clear(at)
        self.hide_residuals(kept)
        self._weights.reshard()
        for place in self._runs(slice(0, shared.numel())):
            self._weights.write(place, shared[place])
        # In this vote, a part that has failed half way informs the others.  The failed part has removed
        # the delivered changes from its residuals, so it may deliver the rest later.  This part has
        # succeeded, and keeps the changes that were delivered to it.
        if finite:
            self._on_any_part(False)

    def hide_residuals(self, parts: Iterable[int]) -> None:
        """Record that these fragments' weights equal the shared ones, although residuals may be left."""
        for part in parts if self.settings.residual == "weights" else ():
            self.contributions.shown[part] = 0.0

    def _missing(self, place: slice, weights: Sequence[Weight]) -> Tensor:
        """Return this rank's changes that no exchange has delivered yet, for a part of the vector."""
        # If the weights include the residual, the undelivered changes are the shared weights minus this
        # rank's weights.  Otherwise they are the change since the last exchange plus the residual.  If
        # ranks weigh their updates, the second form is needed, because the weight applies only to the
        # change.
        whole = self.settings.residual == "weights" and set(self.contributions.shown) == {1.0}
        if whole and not self.contributions.weighs:
            return self._shared(place).sub_(self._weights.read(place))
        moved = self._began(place).sub_(self._weights.read(place))
        for unit, _, here in self.layout.units_at(place):
            moved[here].mul_(weights[self._part_of[unit]].weight)
        return moved.add_(self._withheld(place))

    async def _meet(self, step: int) -> bool:
        """Refuse to finish if local step counts differ; return whether all weights are finite.

        Ranks compare the counts on every channel, because a rank with a different count may be waiting in
        an exchange on any of them.  That rank then gets its error immediately.
        """
        self._note(step)
        reducer = self.reducer
        uses: list[int | Use] = [part.units[0] for part in self.layout.fragments if part.units]
        if self.contributions.weighs is not False:
            uses.append("contributions")
        # the sign encodes whether there is NaN or Inf, which saves a second message
        done = torch.tensor([step if self._weights.finite() else -1 - step], device="cpu")
        try:
            with reducer.exchanging():
                asked = [reducer.channel(use).allgather(done, "finish") for use in uses]
                everyone, *_ = await together(asked) or [[done]]
        except BaseException:
            reducer.fail()
            raise
        told = [int(theirs) for theirs in everyone]
        counts = [max(count, -1 - count) for count in told]
        if len(set(counts)) > 1:
            reducer.fail()
            raise DisagreementError(f"finish(): {unequal_steps(min(counts), max(counts), step)}")
        return min(told) >= 0

    # ---- numbers and state -------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return the settings as plain values, with the current period."""
        return {**self.settings.described(), "period": self.period}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; every rank saves its own, with its own model and optimizer."""
        memory = {name: vector.clone() for name, vector in self.memory.items()}
        saved = {
            **self.settings.place(self.period),
            "steps": self.steps,
            "state": super().state_dict(),
            "memory": memory,
            "reducer": reducer_state(self.reducer),
            "under_way": [exchange.state_dict() for exchange in self._under_way],
            "sent": list(self._sent),
            "contributions": self.contributions.state_dict(),
        }
        return saved if self.settings.rule is None else {**saved, "present_period": self.period}

    def place(self) -> dict[str, Kind]:
        """Return the kinds of the fields that hold the settings on which a saved state depends."""
        place = self.settings.place(self.period)
        return {name: Exactly(value) for name, value in place.items()}

    def kinds(self, state: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kind of every field of a saved state."""
        return {**self.place(), **kinds_of(self.settings, state, self.layout, self.memory)}

    def restore(self, state: Mapping[str, Any], parsed: ParsedState | None) -> None:
        """Adopt a saved state and, if given, the reducer's state, as ``parse_state`` returned it."""
        super().load_state_dict(state["state"])
        if parsed is not None:
            take_state(self.reducer, parsed)
        self.steps = int(state["steps"])
        self.memory = {n: self._at_home(one, copy=True) for n, one in state["memory"].items()}
        self._under_way = [Exchange(**saved) for saved in state["under_way"]]
        self._left_off = None
        self._sent = list(state["sent"])
        self.contributions.load_state_dict(state["contributions"])
        self.period = state.get("present_period", self.period)
        self._note(self.steps)

    # ---- the exchange -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the exchanges in flight without applying them."""
        await self.resume()
        for exchange in self._under_way:
            await self._settle(exchange)

    async def _settle(self, exchange: Exchange) -> None:
        self._interrupted = False
        if (carried := exchange.carried) is None:
            if not exchange.done:
                await self._exchange(exchange)
            return
        try:
            await carried
        except BaseException:
            self._interrupted = getattr(carried, "goes_on", False)
            if not self._interrupted:
                exchange.carry(None)
            raise
        exchange.carry(None)

    async def _exchange(self, exchange: Exchange) -> None:
        """Exchange how far a fragment's weights have moved; the model does not change yet."""
        part, reducer = exchange.part, self.reducer
        fragment = self.layout.fragments[part]
        self._note(exchange.lands - self.settings.delay if exchange.late else exchange.lands)
        # measure the distance before weighing, because the drift is how far this rank really moved
        distance = None
        if self.settings.rule is not None:
            distance = self._distance()
        try:
            with reducer.exchanging():
                await self.contributions.weigh_(exchange, reducer)
                moves = [Moves(self, exchange, unit) for unit in fragment.units]
                drift = 0.0 if distance is None else await drift_of(distance, reducer)
                averages = await self._reduce(exchange, moves, fragment.units)
        except BaseException:
            reducer.refuse()
            raise
        if averages is None:
            exchange.refuse()
            return
        momentum = self.momentum_of(exchange)
        if exchange.late:
            exchange.step_to(self._row(exchange, 1))
        for unit, average in zip(fragment.units, averages, strict=True):
            self._apply(exchange, unit, average, momentum)
        exchange.end(self._change(exchange) if exchange.late else None, drift)

    def moved(
        self, exchange: Exchange, unit: int, start: int, stop: int, kept: Tensor | None
    ) -> Tensor:
        """Return this rank's move on a run of a unit, multiplied by the weight of the exchange.

        ``kept`` is the unit's residual on the run, on the device of the weights; None means zeros.

        With ``residual="weights"``, ``moved = shared - residual - weights``, otherwise
        ``shared - weights``.  Like a gradient, it is positive where weights have decreased.  The reducer
        adds its residual: ``accumulated = residual + moved``.
        """
        made = self._weights_like.new_empty(stop - start)
        withheld, shown = self._seen(unit, kept)
        for place, here in self.layout.places(unit, start, stop):
            rest = None if withheld is None else withheld[here]
            shared = self.memory["shared"][place].to(made.device)
            for part, dtype in self.layout.dtypes(place):
                at = part.start - place.start
                for inside, values in self._pieces(exchange, part):
                    there = slice(at + inside.start, at + inside.stop)
                    seen = None if rest is None else rest[there]
                    given = shared[there], seen, values
                    move_(made[here][there], *given, shown=shown, dtype=dtype)
        if exchange.weight != 1:  # usually it is 1, because no rank counts samples
            made.mul_(exchange.weight)
        rotate_(made, self.settings.dct)
        if kept is not None and self.settings.residual_decay < 1:
            # The result must be accumulated = decay residual + moved, but the reducer computes residual +
            # moved, so (1 - decay) residual is subtracted here.  The residual itself must not change,
            # because the exchange may be refused.
            made.sub_(kept, alpha=1 - self.settings.residual_decay)
        return made

    def _distance(self) -> float:
        """Return ``|moved|^2 / |shared|^2`` of this rank over all parameters."""
        # measure only parameters: buffers and moments have other magnitudes, and are averaged anyway
        whole = slice(0, self.layout.end)
        norms = [
            torch.linalg.vector_norm(vector)
            # runs avoid two copies of the whole model, but the cosine transform needs whole units
            for place in ([whole] if self.settings.dct else self._runs(whole))
            for vector in (
                self._began(place).sub_(self._weights.read(place)),
                self.memory["shared"][place].to(self._weights_like.device),
            )
        ]
        return share_of(*(torch.stack(these) for these in (norms[::2], norms[1::2])))

    def _pieces(self, exchange: Exchange, place: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield the tensors that form a part of the weights at the start of an exchange.

        Each is yielded after its position, as in ``Weights.pieces``.
        """
        if exchange.weights is None:
            return self._weights.pieces(place)
        began = exchange.weights[_within(self.layout.fragments[exchange.part].span, place)]
        return iter([(slice(0, len(began)), began.to(self._weights_like.device))])

    def _seen(self, unit: int, kept: Tensor | None) -> tuple[Tensor | None, float]:
        """Return the residual that this rank's own weights include, or None, and the residual's factor.

        ``kept`` is a unit's residual or, without a cosine transform, a run of it.
        """
        if kept is None or self.settings.residual != "weights":
            return None, 1.0
        if self.settings.dct:
            kept = rotate_(kept.clone(), self.settings.dct, back=True)
        return kept, self.contributions.shown[self._part_of[unit]]

    async def _by_reducer(
        self, exchange: Exchange, moves: list[Moves], units: range
    ) -> list[Vector] | None:
        """Exchange the moves; compute them in runs where possible, to save memory."""
        reducer, whole = self.reducer, dict[int, Tensor]()
        for unit, its in zip(units, moves, strict=True):
            # the cosine transform needs whole units
            if reducer.accumulates_later(unit) and not self.settings.dct:
                reducer.accumulate_later(unit, its.run)
            else:
                # the unit is exchanged on the device of its residual, which may be the host
                whole[unit] = its.whole().to(reducer.residuals[unit].accumulated.device)
                reducer.accumulate(unit, 0, whole[unit])
        try:
            averages = await reducer.exchange_all(units)
        except NonFiniteGradientError:
            reducer.skip()
            return None
        for at, unit in enumerate(units):
            if unit in whole:
                averages[at].write_to_(whole[unit])
                averages[at] = DenseVector(whole[unit])
        return averages

    def _apply(self, exchange: Exchange, unit: int, average: Vector, momentum: float) -> None:
        """Apply a unit's average to the shared weights; a late exchange keeps its result separately."""
        assert isinstance(average, DenseVector)
        span, like = self.layout.fragments[exchange.part].span, average.run(0, 0)
        shared, late, size = self.memory["shared"], exchange.shared, self.layout.units[unit].size
        settings = self.settings
        if settings.dct:
            rotate_(average.values, settings.dct, back=True)
        plain = not (momentum or settings.dct or settings.sign) and settings.outer_lr == 1
        direct = plain and like.device == shared.device
        for start, stop in runs(size, like):
            values = None if direct else average.run(start, stop).to(self._weights_like.device)
            for place, here in self.layout.places(unit, start, stop):
                into = shared[place] if late is None else late[_within(span, place)]
                if values is not None:
                    into.copy_(self._stepped(values[here], place, momentum, exchange.lr))
                    continue
                if late is not None:
                    into.copy_(shared[place])
                # a single pass, even if the average still has to be decoded from messages
                average.subtract_from_(into, start + here.start)

    def _change(self, exchange: Exchange) -> Tensor:
        """Return the change that a late exchange adds to this rank's weights."""
        began, shared = exchange.weights, exchange.shared
        assert began is not None and shared is not None
        span, change = self.layout.fragments[exchange.part].span, self._row(exchange, 2)
        for place in self._runs(span):
            here = _within(span, place)
            base = shared[here]
            if self.settings.residual == "weights":
                withheld = self._withheld(place).to(base.device)
                base = base.sub(withheld, alpha=shown_of(exchange.weight))
            torch.sub(base, began[here], out=change[here])
        return change

    def momentum_of(self, exchange: Exchange) -> float:
        """Return the outer momentum for an exchange."""
        if exchange.last:
            return 0.0
        return (
            1 - 1 / self.reducer.comm.world_size
            if self.settings.momentum is None
            else self.settings.momentum
        )

    # ---- parts of the vector, on the device of the weights ------------------------------------------

    def _runs(self, span: slice, most: int | None = None) -> Iterator[slice]:
        """Split a span into runs, to be processed one at a time."""
        for start, stop in runs(span.stop - span.start, self._weights_like, most):
            yield slice(span.start + start, span.start + stop)

    def _row(self, exchange: Exchange, number: int) -> Tensor:
        """Return scratch memory of a fragment's size, which later exchanges reuse."""
        sizes = [fragment.span.stop - fragment.span.start for fragment in self.layout.fragments]
        if exchange.scratch is None:
            exchange.hold(self._scratch.take(self._memory_like, max(sizes)))
        assert exchange.scratch is not None
        return exchange.scratch[number, : sizes[exchange.part]]

    def _shared(self, place: slice) -> Tensor:
        """Return a copy of the shared weights, for a part of the vector."""
        return self.memory["shared"][place].to(self._weights_like.device, copy=True)

    def _base(self, place: slice) -> Tensor:
        """Return this rank's weights as they were after the last exchange, for a part of the vector."""
        if self.settings.residual != "weights":
            return self._shared(place)
        made = self._weights_like.new_empty(place.stop - place.start)
        shared = self.memory["shared"][place].to(made.device)
        for unit, at, here in self.layout.units_at(place):
            withheld, shown = self._seen(unit, self.reducer.residuals[unit].value)
            rest = None if withheld is None else withheld[at].to(made.device)
            move_(made[here], shared[here], rest, None, shown=shown)
        return made

    def _began(self, place: slice) -> Tensor:
        """Return a copy of this rank's weights after the last exchange, rounded as the model stores them.

        A 16-bit model starts from rounded weights.  This rounding is not part of its move, so it must not
        be added to the residual at every exchange.
        """
        return self.layout.rounded(place, self._base(place))

    def _withheld(self, place: slice) -> Tensor:
        """Return the residuals in the order of the vector, for a part of it."""
        made = self._weights_like.new_empty(place.stop - place.start)
        for unit, at, here in self.layout.units_at(place):
            value = self.reducer.residuals[unit].value
            if value is not None and self.settings.dct:
                value = rotate_(value.clone(), self.settings.dct, back=True)
            made[here] = 0 if value is None else value[at]
        return made

    def lr(self) -> float:
        """Return the optimizers' learning rate if the outer step goes by signs, otherwise 1."""
        return common_rate(self.optimizers) if self.settings.sign and self.optimizers else 1.0

    def _stepped(self, average: Tensor, place: slice, momentum: float, lr: float) -> Tensor:
        """Return the shared weights after an outer step; the average is overwritten.

        Buffers and moments are averaged without momentum or learning rate.
        """
        # as in torch.optim.SGD on the shared weights, with the average as their gradient:
        #   v = momentum v + g;  g = g + momentum v (Nesterov) or v;  shared -= outer_lr g
        gradient = average[: max(self.layout.end - place.start, 0)]
        if momentum:
            if "momentum" not in self.memory:
                self.memory["momentum"] = self._zeros(self.layout.end)
            velocity = self.memory["momentum"][place]
            moving = velocity.to(gradient.device)
            velocity.copy_(torch.add(gradient, moving, alpha=momentum, out=moving))
            if self.settings.nesterov:
                gradient.add_(moving, alpha=momentum)
            else:
                gradient.copy_(moving)
        if self.settings.sign:
            gradient.sign_().mul_(lr)
        if self.settings.outer_lr != 1:
            gradient.mul_(self.settings.outer_lr)
        return self._shared(place).sub_(average)


@final
class Moves:
    """A rank's moves in one unit, i.e. the changes of its weights to exchange; computed on access."""

    def __init__(self, engine: OuterEngine, exchange: Exchange, unit: int) -> None:
        self._engine, self._exchange, self._unit = engine, exchange, unit

    def run(self, start: int, stop: int, kept: Tensor | None) -> Tensor:
        """Return elements ``[start, stop)``, given the residual there, on the device of the weights."""
        return self._engine.moved(self._exchange, self._unit, start, stop, kept)

    def whole(self) -> Tensor:
        """Return all elements."""
        unit = self._engine.layout.units[self._unit]
        kept = self._engine.reducer.residuals[self._unit].value
        return self.run(0, unit.size, None if kept is None else kept.to(unit.device))


def _within(span: slice, place: slice) -> slice:
    """Return the position of a part of the vector relative to a span."""
    return slice(place.start - span.start, place.stop - span.start)


def kinds_of(
    settings: OuterStep,
    state: Mapping[str, Any],
    layout: Layout,
    memory: Mapping[str, Tensor],
) -> dict[str, Kind]:
    """Return the kind of every field of a saved state, except the settings (``place``)."""
    own = outer_kinds(
        state,
        layout,
        memory,
        fragments=settings.fragments,
        momentum=settings.momentum != 0,
        rule=settings.rule,
    )
    return {"steps": Common(Number(0, whole=True)), **own}
