"""The outer step as it runs: it exchanges the moves of a rank's weights, and applies their average.

``OuterStep`` has the settings; ``attach`` and ``OuterAverager`` run an engine with them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from sparsync.averaging.averager import mean
from sparsync.errors import NonFiniteGradientError, PeerError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import ParsedState, reducer_state, take_state
from sparsync.feedback.step import Proposal, Use
from sparsync.fields import Common, Exactly, Kind, Number
from sparsync.sparse import DenseVector
from sparsync.state import Stateful
from sparsync.transports.agree import unequal_steps
from sparsync.transports.driver import together
from sparsync.transports.ledger import Ledger
from sparsync.units import Slot, Unit
from sparsync.updates.contributions import Contributions, shown_of
from sparsync.updates.fragments import Begin, Exchange, Layout, Scratch, Weights, rotate_
from sparsync.updates.gradient_noise import common_rate, drop_broken
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.periods import AdaptivePeriod, drift_of, followed, share_of
from sparsync.updates.saved import outer_kinds

__all__ = ["Carry", "OuterEngine", "OuterState", "Reduce", "alone", "kinds_of"]

Carry = Callable[[Begin], Awaitable[None] | None]
Reduce = Callable[[Exchange, list[Tensor], range], Awaitable[bool]]


@dataclass(frozen=True)
class OuterState:
    """Exchanges in a row that were refused because of NaN or Inf."""

    refused: int = 0


def _nobody(_exchange: Begin) -> None:
    """Carry no exchange: it runs when its result is needed."""


def alone(_here: bool) -> bool:
    """Return False: a replica of one rank has no other part on which something could be so."""
    return False


@final
class OuterEngine(Stateful):
    """Runs an ``OuterStep`` on one rank: counts local steps, begins exchanges, applies those that arrive.

    Args:
        settings: of the outer step.
        layout: of the vector of weights, as ``settings.plan`` has made it.
        reducer: with the layout's units.
        weights: this rank's, which are read and written; the caller keeps a reference to them.
        optimizers: their broken moments are dropped, and a step by signs has their learning rate.
        carry: begins an exchange, after those before, and returns an awaitable of its end; None: it runs
            when its result is needed.
        reduce: exchanges changes, which become averages; False: all ranks refuse them.  None: by the
            reducer.
        on_any_part: tells whether something is so on another part of this replica.
        weighs: whether ranks weigh their updates; None: it turns out in the first exchange.
        ledgers: further ones whose errors name the local step.

    Attributes:
        steps: local steps done.
        memory: vectors, saved with the state: "shared", equal on all ranks, and "momentum".
        state: of refused exchanges.
        period: the present one.
        drift: measured last, with an ``AdaptivePeriod``.
        contributions: the numbers of samples that ranks have seen.
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
    ) -> None:
        self.settings, self.layout, self.reducer = settings, layout, reducer
        self.optimizers = list(optimizers)
        self.go_on_with(weights, carry)
        self._reduce = reduce or self._by_reducer
        self._on_any_part, self._ledgers = on_any_part, [*ledgers, reducer.comm.ledger]
        self.steps, self.period, self.drift = 0, settings.first_period, 0.0
        self.memory = {"shared": weights.read(slice(0, None))}
        self.state = OuterState()
        self.contributions = Contributions(weighs=weighs)
        self.contributions.plan(len(layout.fragments))
        self._sent = [-1] * len(layout.fragments)  # the last step after which each was exchanged
        self._under_way: list[Exchange] = []
        self._scratch = Scratch()
        self._note(0)

    def _note(self, step: int) -> None:
        """Let errors and the headers of messages name the local step next to the exchange."""
        for ledger in self._ledgers:
            ledger.local_step = step

    def go_on_with(self, weights: Weights, carry: Carry) -> None:
        """Go on with other weights, as with a copy when a rank leaves while its program has the model."""
        # an exchange under way keeps this engine alive, and must not keep a model that was dropped
        self._kept, self._carry = weakref.ref(weights), carry

    @property
    def _weights(self) -> Weights:
        weights = self._kept()
        assert weights is not None
        return weights

    def begin_again(self, shared: Tensor) -> None:
        """Begin from other weights, equal on all ranks: nothing waits, and nothing is under way."""
        self.memory, self.state = {"shared": shared}, OuterState()
        self._under_way.clear()
        for residual in self.reducer.residuals:
            residual.load(None)

    def begins_last(self, step: int) -> bool:
        """Tell whether the last fragment, which has the buffers, is sent after local step ``step``."""
        return (len(self.layout.fragments) or 1) - 1 in self._due(step)

    def is_due(self, step: int) -> bool:
        """Tell whether something is sent or applied after local step ``step``."""
        return bool(self._due(step)) or any(one.lands <= step for one in self._under_way)

    def _due(self, step: int) -> list[int]:
        """Return the fragments whose period closes with local step ``step``."""
        # A function of the step alone (and of the last exchange, which all ranks had together), so all
        # ranks begin the same exchanges after the same step without a message.
        if step < self.settings.warmup_steps:
            return (
                list(range(len(self.layout.fragments) or 1)) if step in self.settings.warm else []
            )
        if self.settings.rule is not None:
            return [0] if step - self._sent[0] >= self.period else []
        # periods are counted from the warm-up's last exchange; fragments take turns within a period
        since = step - max(self.settings.warm, default=-1)
        count = len(self.layout.fragments) or 1
        offsets = [part * self.period // count for part in range(count)]
        return [part for part, at in enumerate(offsets) if (since - at) % self.period == 0]

    async def advance(self, step: int) -> None:
        """Apply the exchanges that end after local step ``step``, and begin those that are due.

        Raises:
            NonFiniteGradientError: NaN or Inf was exchanged twice in a row.
        """
        # Late exchanges land first: the next ones begin from weights that contain them.  The second call
        # applies the exchanges without delay that have just begun.
        await self.land(step)
        for part in self._due(step):
            self._begin(part, step, 0 if step < self.settings.warmup_steps else self.settings.delay)
        await self.land(step)

    def _begin(self, part: int, step: int, delay: int = 0, *, last: bool = False) -> None:
        """Begin the exchange of a fragment."""
        # row 0: this rank's weights; 1: how far they have moved, then the average, then the new shared
        # weights; 2: the change for a late exchange (``_exchange``)
        scratch, rows = self._scratch_of(part)
        began = self._weights.read(self.layout.fragments[part].span, rows[0])
        exchange = Exchange(part, step + delay, delay > 0, began)
        exchange.scratch, exchange.lr, self._sent[part] = scratch, self.lr(), step
        exchange.last, exchange.seen = last, self.contributions.take(part)
        exchange.carried = self._carry(partial(self._exchange, exchange))
        self._under_way.append(exchange)

    async def conclude_with(self) -> None:
        """Exchange the one fragment by the reducer, as that has planned it, and without momentum."""
        await self.land()
        self._begin(0, self.steps, last=True)
        await self.land()

    def go_on_from(self, step: int) -> None:
        """Count on from the others' local step, before which they have exchanged."""
        self.steps, self._sent = step, [step - 1] * len(self._sent)

    def repeat(self, deltas: Sequence[Tensor], momentum: float) -> None:
        """Apply averages to the shared weights as others have; there is one fragment."""
        average, span = self._whole(0, deltas), self.layout.fragments[0].span
        self.memory["shared"] = self._stepped(average, span, momentum, 1.0, average)

    async def land(self, step: float = math.inf) -> None:
        """Apply the exchanges under way that end by local step ``step``, in order."""
        refused = False
        while self._under_way and (refused or self._under_way[0].lands <= step):
            exchange = self._under_way.pop(0)
            await self._settle(exchange)
            # a refusal ends all others under way: they began from weights that are about to be undone
            refused |= exchange.refused
            if exchange.shared is not None:
                self.state, span = OuterState(), self.layout.fragments[exchange.part].span
                # A late exchange is applied when it lands and not when it ends, which differs between
                # ranks.  The steps made meanwhile stay: its change is added to the weights.
                if exchange.late:
                    self.memory["shared"][span] = exchange.shared
                (self._weights.add if exchange.late else self._weights.write)(
                    span, exchange.weights
                )
                if self.contributions.applied(exchange):
                    self._weights.landed(span, self.memory["shared"])
                if self.settings.rule is not None:
                    self._follow_drift(self.settings.rule, exchange)
            self._scratch.keep(exchange.scratch)
        if not refused:
            return
        # The first time, all go back to their weights after the last exchange, without broken moments.
        # If the next exchange is broken as well, that did not help, and would be repeated for ever.
        self.state = OuterState(self.state.refused + 1)
        drop_broken(self.optimizers, self._on_any_part)
        if self.state.refused > 1:
            raise self._weights.refused(self.reducer.comm.ledger.local_step)
        self.restart()

    def _follow_drift(self, rule: AdaptivePeriod, exchange: Exchange) -> None:
        """Choose the next period, on all ranks and all parts of a replica alike."""
        self.drift = exchange.drift
        period = followed(rule, self.period, self.drift, self._on_any_part)
        if exchange.lands >= self.settings.warmup_steps:
            self.period = period

    def restart(self) -> None:
        """Set the weights back to this rank's weights after its last exchange."""
        self.contributions.drop()
        for part, whole in enumerate(self.layout.fragments):
            self._weights.write(whole.span, self._base(part))

    async def deliver(self, step: int | None = None) -> None:
        """Finish the exchanges under way, then deliver all that is left, uncompressed.

        Args:
            step: local steps that this rank has done; None: ``steps``.

        Raises:
            PeerError: ranks have not done the same number of local steps; nothing more was exchanged.
        """
        await self.land()
        await self._meet(self.steps if step is None else step)
        missing, reducer = [torch.zeros_like(self.memory["shared"][:0])], self.reducer
        # Missing on this rank is all that the shared weights lack of its own: with the residual in the
        # weights it is their difference, else the moves since the last exchange plus the residual.  The
        # two differ once updates are weighed, for only the moves are to be.
        for part, its in enumerate(await self.contributions.weigh_all(reducer)):
            span = self.layout.fragments[part].span
            if self.settings.residual == "weights" and not self.contributions.weighs:
                missing.append(self.memory["shared"][span] - self._weights.read(span))
            else:
                moved = self._began(part).sub_(self._weights.read(span)).mul_(its.weight)
                missing.append(moved + self._withheld(part))
        try:
            average = await mean(reducer.comm, torch.cat(missing))
        except BaseException:
            reducer.fail()
            raise
        whole = Unit((Slot("the model", 0, average.numel()),), average.dtype, average.device)
        proposal = Proposal(
            reducer.comm.rank, reducer.step, reducer.place, [whole], [DenseVector(average)]
        )
        # all ranks have the same average, and other parts are asked, so all decide alike; residuals are
        # cleared and the shared weights moved together, or neither
        if reducer.consensus(proposal) is None:
            for residual in reducer.residuals:
                residual.load(None)
            self.memory["shared"] = self._stepped(average, slice(0, None), 0.0, self.lr(), average)
        for fragment in self.layout.fragments:
            self._weights.write(fragment.span, self.memory["shared"][fragment.span].clone())

    async def _meet(self, step: int) -> None:
        """Refuse to finish after different numbers of local steps.

        Asked on every channel on which a rank that is in an exchange instead may wait, so that such a
        rank is told at once.
        """
        self._note(step)
        reducer = self.reducer
        uses: list[int | Use] = [part.units[0] for part in self.layout.fragments if part.units]
        if self.contributions.weighs is not False:
            uses.append("contributions")
        done = torch.tensor([step])
        try:
            asked = [reducer.channel(use).allgather(done, "finish") for use in uses]
            everyone, *_ = await together(asked) or [[done]]
        except BaseException:
            reducer.fail()
            raise
        counts = [int(theirs) for theirs in everyone]
        if len(set(counts)) > 1:
            reducer.fail()
            raise PeerError(f"finish(): {unequal_steps(min(counts), max(counts), step)}")

    # ---- numbers and state -------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return the settings as plain values, with the present period."""
        return {**self.settings.described(), "period": self.period}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank with its own model and optimizer."""
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
        """Return the kinds of the fields with the settings on which a saved state depends."""
        place = self.settings.place(self.period)
        return {name: Exactly(value) for name, value in place.items()}

    def kinds(self, state: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kind of every field of a saved state."""
        return {**self.place(), **kinds_of(self.settings, state, self.layout, self.memory)}

    def restore(self, state: Mapping[str, Any], parsed: ParsedState | None) -> None:
        """Take over a saved state, with its reducer's, ``parsed`` by ``validate``, if it has one."""
        super().load_state_dict(state["state"])
        if parsed is not None:
            take_state(self.reducer, parsed)
        self.steps = int(state["steps"])
        self.memory = {name: vector.clone() for name, vector in state["memory"].items()}
        self._under_way = [Exchange(**saved) for saved in state["under_way"]]
        self._sent = list(state["sent"])
        self.contributions.load_state_dict(state["contributions"])
        self.period = state.get("present_period", self.period)
        self._note(self.steps)

    # ---- the exchange -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the exchanges under way, and apply nothing."""
        for exchange in self._under_way:
            await self._settle(exchange)

    async def _settle(self, exchange: Exchange) -> None:
        carried, exchange.carried = exchange.carried, None
        if carried is not None:
            await carried
        elif not exchange.done:
            await self._exchange(exchange)

    async def _exchange(self, exchange: Exchange) -> None:
        """Exchange how far a fragment has moved; the model itself is not changed yet."""
        part, reducer = exchange.part, self.reducer
        fragment = self.layout.fragments[part]
        self._note(exchange.lands - self.settings.delay if exchange.late else exchange.lands)
        rows = self._scratch_of(part, exchange.scratch)[1]
        # moved = shared - residual - weights, or shared - weights: positive where weights have fallen, as
        # a gradient is.  The reducer adds its residual: accumulated = residual + moved.
        moved = self._began(part, rows[1]).sub_(exchange.weights)
        # before it is weighed: the drift is a distance of real steps
        distance = (
            None
            if self.settings.rule is None
            else share_of(moved, self.memory["shared"], self.layout.end)
        )
        await self.contributions.weigh_(exchange, moved, reducer)
        deltas = self.layout.by_units(part, moved)
        for delta, unit in zip(deltas, fragment.units, strict=True):
            rotate_(delta, self.settings.dct)
            kept = reducer.residuals[unit].value
            if kept is not None and self.settings.residual_decay < 1:
                # accumulated = residual + delta is to be decay residual + moved, so delta gives up
                # (1 - decay) residual.  The residual itself a refused exchange must leave as it is.
                delta.sub_(kept, alpha=1 - self.settings.residual_decay)
        try:
            if distance is not None:
                exchange.drift = await drift_of(distance, reducer)
            applied = await self._reduce(exchange, deltas, fragment.units)
        except BaseException:
            reducer.refuse()
            raise
        if not applied:
            exchange.done = exchange.refused = True
            return
        average = self._whole(part, deltas)
        # without delay the new shared weights overwrite the old ones at once; a late exchange keeps them
        # in the average's memory until it lands
        here = average if exchange.late else self.memory["shared"][fragment.span]
        momentum = self.momentum_of(exchange)
        exchange.shared = self._stepped(average, fragment.span, momentum, exchange.lr, here)
        # row 0 holds the weights at the begin, which a late exchange still has to subtract
        base, free = exchange.shared, rows[2 if exchange.late else 0]
        if self.settings.residual == "weights":
            base = torch.sub(base, self._withheld(part), alpha=shown_of(exchange.weight), out=free)
        exchange.weights = torch.sub(base, exchange.weights, out=free) if exchange.late else base
        exchange.done = True

    async def _by_reducer(self, _exchange: Exchange, deltas: list[Tensor], units: range) -> bool:
        """Exchange and apply changes, which become averages."""
        try:
            await self.reducer.reduce(deltas, units=units)
        except NonFiniteGradientError:
            self.reducer.skip()
            return False
        return True

    def momentum_of(self, exchange: Exchange) -> float:
        """Return the outer momentum of an exchange."""
        if exchange.last:
            return 0.0
        return (
            1 - 1 / self.reducer.comm.world_size
            if self.settings.momentum is None
            else self.settings.momentum
        )

    def _whole(self, part: int, deltas: Sequence[Tensor]) -> Tensor:
        """Return a fragment as one vector, joined from its units' changes, which are used up."""
        for delta in deltas:
            rotate_(delta, self.settings.dct, back=True)
        return self.layout.joined(part, deltas)

    def _scratch_of(self, part: int, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return memory for an exchange, and the rows of it that a fragment needs."""
        sizes = [fragment.span.stop - fragment.span.start for fragment in self.layout.fragments]
        scratch = (
            self._scratch.take(self.memory["shared"], max(sizes)) if scratch is None else scratch
        )
        return scratch, scratch[:, : sizes[part]]

    def _base(self, part: int, out: Tensor | None = None) -> Tensor:
        """Return the part of this rank's weights after an exchange that a fragment has."""
        shared = self.memory["shared"][self.layout.fragments[part].span]
        out = torch.empty_like(shared) if out is None else out
        if self.settings.residual == "apart":
            return out.copy_(shared)
        shown = self.contributions.shown[part]
        return torch.sub(shared, self._withheld(part), alpha=shown, out=out)

    def _began(self, part: int, out: Tensor | None = None) -> Tensor:
        """Return the base as the model holds it.

        A model of 16 bits begins with those weights rounded.  Rounding is no move: fed back, it would be
        added to the residual at every exchange.
        """
        return self.layout.rounded(part, self._base(part, out))

    def _withheld(self, part: int) -> Tensor:
        """Return the residual of a fragment."""
        kept = [self.reducer.residuals[unit] for unit in self.layout.fragments[part].units]
        values = [torch.zeros_like(r.accumulated) if r.value is None else r.value for r in kept]
        if self.settings.dct:
            values = [rotate_(value.clone(), self.settings.dct, back=True) for value in values]
        return self.layout.joined(part, values)

    def lr(self) -> float:
        """Return the size of a step by signs."""
        return common_rate(self.optimizers) if self.settings.sign and self.optimizers else 1.0

    def _stepped(
        self, average: Tensor, span: slice, momentum: float, lr: float, out: Tensor
    ) -> Tensor:
        """Write the shared weights after an outer step to ``out``; the average is used up.

        Buffers and moments take it as it is.
        """
        # torch.optim.SGD on shared weights, with the average as its gradient:
        #   v = momentum v + g;  g = g + momentum v (Nesterov) or v;  shared -= outer_lr g
        gradient = average[: max(self.layout.end - (span.start or 0), 0)]
        if momentum:
            if "momentum" not in self.memory:
                self.memory["momentum"] = torch.zeros_like(self.memory["shared"][: self.layout.end])
            velocity = self.memory["momentum"][span]
            torch.add(gradient, velocity, alpha=momentum, out=velocity)
            if self.settings.nesterov:
                gradient.add_(velocity, alpha=momentum)
            else:
                gradient.copy_(velocity)
        if self.settings.sign:
            gradient.sign_().mul_(lr)
        if self.settings.outer_lr != 1:
            gradient.mul_(self.settings.outer_lr)
        return torch.sub(self.memory["shared"][span], average, out=out)


def kinds_of(
    settings: OuterStep,
    state: Mapping[str, Any],
    layout: Layout,
    memory: Mapping[str, Tensor],
) -> dict[str, Kind]:
    """Return the kind of every field of a saved state but those of its place."""
    own = outer_kinds(
        state,
        layout,
        memory,
        fragments=settings.fragments,
        momentum=settings.momentum != 0,
        rule=settings.rule,
    )
    return {"steps": Common(Number(0, whole=True)), **own}
