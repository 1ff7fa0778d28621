"""Local steps with a compressed outer step; ``published`` lists the settings of published methods."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from sparsync.algorithm import Algorithm, check_density
from sparsync.averaging.averager import Averager, mean
from sparsync.collectives import Changing
from sparsync.errors import ConfigurationError, NonFiniteGradientError, PeerError, require
from sparsync.feedback.facts import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.state import (
    ParsedState,
    parse_state,
    reducer_state,
    restore_reducer,
    take_state,
)
from sparsync.feedback.step import Proposal, Use
from sparsync.fields import Kind
from sparsync.presets import resolve
from sparsync.sparse import DenseVector
from sparsync.transports.agree import agree, unequal_steps
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import together
from sparsync.transports.ledger import Ledger
from sparsync.units import Slot, Unit, output_parameters
from sparsync.updates.contributions import Contributions, shown_of
from sparsync.updates.fragments import Exchange, Layout, Rooms, Weights, rotate_
from sparsync.updates.moments import common_rate, drop_broken
from sparsync.updates.periods import AdaptivePeriod, drift_of, followed, share_of, warm_exchanges
from sparsync.updates.saved import outer_kinds

__all__ = ["OuterState", "OuterStep"]

_PAIR_BITS = 64  # of an index and a value


@dataclass(frozen=True)
class OuterState:
    """Exchanges in a row that were refused because of NaN or Inf."""

    refused: int = 0


@final
class OuterStep(Averager):
    """Exchanges ``period`` local steps at once, compressed; an outer SGD applies them to shared weights.

    ::

        accumulated = decay * residual + (shared - weights)    every ``period`` steps
        delivered, total = exchange(accumulated)               select, encode, sum
        residual = accumulated - delivered
        shared = SGD(shared, gradient = total / P)             bit-identical on all ranks
        weights = shared

    With ``residual="weights"`` the residual stays in the rank's own weights, ``weights = shared -
    residual``, where the next gradients see it: mass that waits is not stale to its own rank.  With Adam
    this is what keeps up with dense training (``benchmarks/adam.md``).

    Buffers and moments that travel are averaged whole, without outer learning rate and momentum.

    When NaN or Inf is in the sum, no rank applies it: all return to their weights after the last
    exchange, residuals stay as they were, and the state of ``optimizer`` is dropped where it is broken.
    A second time in a row raises ``NonFiniteGradientError``.

    With ``fragments``, a part of the model is exchanged every ``period / fragments`` steps.  With
    ``delay`` an exchange is under way while the next local steps are done; they are added to its result.

    Args:
        model: its parameters are the units' names, without it there is one unit.
        algorithm: a preset's name or an ``Algorithm``; sums are divided by world_size, whatever it says.
        density: what is sent per exchange, as k / n of index-value pairs.
        period: local steps between exchanges, H.  None: 1 for sparse algorithms; for those that send
            every element, the number at which the bytes per step are those of pairs at this density.
            An ``AdaptivePeriod`` follows the measured drift.
        fragments: runs of parameters of about equal size, exchanged in turn within a period.
        delay: local steps from the begin of an exchange until it is applied, below the period.
        warmup_steps: over these first steps the period doubles from 1 to H in equal parts: local steps
            cost most while weights move fast.
        residual: "apart": all ranks continue from equal weights, as the papers have it; or "weights".
        outer_lr: the outer learning rate, > 0; 1 is averaging.
        momentum: of the outer optimizer, in [0, 1); None: 1 - 1 / world_size, as BMUF has it.
        nesterov: the outer momentum looks ahead, as ``torch.optim.SGD``'s.
        residual_decay: of the residual at every exchange, in [0, 1].
        noise_correction: Adam's steps are as long as with the second moment of averaged gradients, see
            ``moments.correct``, and the average of steps that have a length of their own has that length,
            see ``lengths.lengthen``.  This is for ``attach``, which knows the optimizer.
        dct: exchange and keep the changes as cosine coefficients of runs of this many elements, see
            ``rotate_``; None: as they are.  Ranks must compute alike, to the last bit.
        sign: the outer step is ``outer_lr`` times the optimizer's learning rate, which all ranks and
            groups have alike, in the direction of the average's signs (without optimizer: rate 1).

    Cost: one exchange of the algorithm every ``period`` steps; memory: residual and shared weights, 2 n
    elements, and n with momentum; for each exchange under way 2 to 4 times the largest fragment.
    State: ``memory``: the vectors ``shared`` and ``momentum``; ``OuterState``; that of the reducer.
    Differs from the paper: ``finish`` exchanges what is missing, dense and without momentum: the
    residuals and a period that it falls into; with ``sign``, one more step in their direction.

    Example:
        >>> from sparsync import simulate
        >>> async def program(comm):
        ...     averager, shared = OuterStep(density=0.5, period=1), torch.zeros(2)
        ...     await averager.begin(comm, shared, 0)
        ...     local = shared + torch.tensor([1.0, 4.0 * comm.rank])
        ...     return (await averager.average(comm, local, 0)).tolist()
        >>> simulate(program, world_size=2).results
        [[0.5, 2.0], [0.5, 2.0]]

    References: Chen and Huo, blockwise model-update filtering (BMUF), ICASSP 2016; Basu et al.,
    Qsparse-local-SGD, NeurIPS 2019, Algorithm 1; Douillard et al., DiLoCo, 2023, Algorithm 1; Peng et
    al., `DeMo <https://arxiv.org/abs/2411.19870>`_, 2024; Sarfi et al.,
    `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        algorithm: str | Algorithm = "allgather",
        density: float = 0.01,
        period: int | AdaptivePeriod | None = None,
        fragments: int = 1,
        delay: int = 0,
        warmup_steps: int = 0,
        residual: Literal["apart", "weights"] = "apart",
        outer_lr: float = 1.0,
        momentum: float | None = 0.0,
        nesterov: bool = False,
        residual_decay: float = 1.0,
        noise_correction: bool = False,
        dct: int | None = None,
        sign: bool = False,
        **binding: Any,
    ) -> None:
        # every argument is checked here, on each rank by itself: nothing has been sent yet
        self.rule = rule = period if isinstance(period, AdaptivePeriod) else None
        first = period.least if isinstance(period, AdaptivePeriod) else period
        counted = first is None or (type(first) is int and first >= 1)
        for name, value, fits, cure in (
            ("period", period, counted, "at least 1 step, an AdaptivePeriod, or None"),
            ("fragments", fragments, type(fragments) is int and fragments >= 1, "at least 1"),
            ("residual", residual, residual in ("apart", "weights"), "'apart' or 'weights'"),
            ("outer_lr", outer_lr, 0 < outer_lr < math.inf, "a rate > 0"),
            ("momentum", momentum, momentum is None or 0 <= momentum < 1, "one in [0, 1), or None"),
            ("nesterov", nesterov, not nesterov or momentum != 0, "a momentum > 0, too, e.g. 0.9"),
            ("residual_decay", residual_decay, 0 <= residual_decay <= 1, "a factor in [0, 1]"),
            ("noise_correction", noise_correction, type(noise_correction) is bool, "True or False"),
            ("dct", dct, dct is None or (type(dct) is int and dct > 1), "elements, >= 2, or None"),
            ("sign", sign, type(sign) is bool, "True or False"),
        ):
            require(fits, f"OuterStep: {name} is {value!r}; give {cure}")
        # sums that are not divided, as SparCML's, would be an outer_lr of world_size
        self.chosen = replace(resolve(algorithm), average=True, make_dense=Changing)
        if fragments > 1:  # their units are selected from at different times
            self.chosen = replace(self.chosen, shared=False)
        self.algorithm = f"{self.chosen.name} {self.chosen.options}"  # ranks compare it
        self.density, bits = check_density(density), self.chosen.bits or 0
        # The period at which the bytes per step equal those of pairs at this density,
        # H = bits / (64 density): for 32 bits per element at 1 %, every 50 steps.  ``bits`` is 0 for
        # algorithms that select entries, which are exchanged on every step.
        self.period = first or max(1, math.ceil(bits / (_PAIR_BITS * density)))  # the present one
        self.period_rule = str(rule or "fixed")
        self.drift = 0.0  # measured last, with an ``AdaptivePeriod``
        require(
            rule is None or (fragments == 1 and not delay),
            f"OuterStep: fragments {fragments} and delay {delay!r} need a period that stays; give a "
            "number of steps, or omit them",
        )
        require(
            type(delay) is int and 0 <= delay < self.period,
            f"OuterStep: delay is {delay!r}; give steps from 0 to {self.period - 1}: below the period",
        )
        self.fragments, self.delay, self.residual = fragments, delay, residual
        self.warmup_steps = Warmup(warmup_steps).steps
        self.adapt()
        self.outer_lr, self.momentum, self.nesterov = outer_lr, momentum, nesterov
        self.residual_decay, self.noise_correction = residual_decay, noise_correction
        self.dct, self.sign = dct, sign
        self.state = OuterState()
        # tells whether something is true on any other part of the replica; without parts there is none
        self.on_any_part: Callable[[bool], bool] = lambda _here: False
        # used in place of ``_reduce`` where ranks come and go: turns changes into averages, in place;
        # False: all ranks refuse them
        self.reduce: Callable[[Exchange, list[Tensor], range], Awaitable[bool]] | None = None
        self.contributions = Contributions()
        self._reducer: Reducer | None = None
        self._saved: Mapping[str, Any] | None = None
        self.layout = Layout({}, {}, 1)
        self._under_way: list[Exchange] = []
        self._rooms = Rooms()
        self.ledgers: list[Ledger] = []  # of all communicators, which are told the local step
        self._sent: list[int] = []  # by fragment, the last step after which its exchange began
        super().__init__(model, nonfinite="spread", **binding)  # the exchange finds it on all ranks
        bound = self._binding and self._binding.optimizer
        self.optimizers: Sequence[torch.optim.Optimizer] = [bound] if bound else []

    @property
    def attached(self) -> bool:
        """Whether there is a model."""
        return self._binding is not None or self._reducer is not None

    def adapt(
        self,
        compress: Callable[[str, Tensor], bool] | None = None,
        unit_bytes: int | None = None,
        warmup_steps: int = 0,
    ) -> None:
        """Take over the settings that ``attach`` was given in other arguments, if any."""
        self.chosen = replace(
            self.chosen,
            compress=compress or self.chosen.compress,
            unit_bytes=unit_bytes or self.chosen.unit_bytes,
        )
        self.warmup_steps = Warmup(warmup_steps).steps or self.warmup_steps
        self._warm = warm_exchanges(self.warmup_steps, self.period)

    def plan(
        self,
        vector: Tensor,
        parameters: Mapping[str, Tensor],
        output: Collection[str] = (),
        kinds: Mapping[str, str] | None = None,
        rest: Mapping[str, int] | None = None,
    ) -> list[Unit]:
        """Divide the vector into fragments, and these into units: see ``Layout``.

        It holds these parameters, and then the ``rest``, by name and size.
        """
        chosen, kinds = self.chosen, kinds or {}
        self.layout = Layout(parameters, rest or {}, self.fragments)

        def compress(name: str, tensor: Tensor) -> bool:
            if name not in parameters:
                return False
            return chosen.compress is None or chosen.compress(name, tensor)

        return self.layout.plan(vector, chosen.unit_bytes, compress, output, kinds)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Plan the units; take over what was loaded, or share what all ranks begin with."""
        bound = self._binding
        trained = {"model": vector} if bound is None else bound.trained
        output = output_parameters(bound.model) if self.chosen.output and bound else ()
        units = self.plan(vector, trained, output, rest=bound.rest if bound else {})
        if bound and self.sign:
            await agree(comm, {"the learning rate of a step by signs": self._lr()})
        reducer = Reducer(comm, units, await self.chosen.on(comm), self.density)
        await self.start(reducer, vector.clone())

    async def start(self, reducer: Reducer, shared: Tensor) -> None:
        """Begin from weights that are equal on all ranks, or from the state that was loaded."""
        saved, self._saved = self._saved, None
        if saved is None:
            self.memory = {"shared": shared}
        require(
            self.memory["shared"].shape == shared.shape,
            f"the saved state is of {self.memory['shared'].numel()} elements, this model has "
            f"{shared.numel()}; load it into the model that it was saved with",
        )
        self._reducer = reducer
        # errors and the headers of messages name the local step next to the exchange
        self.ledgers.append(reducer.comm.ledger)
        self._note(self.steps)
        self._sent = self._sent or [self.steps - 1] * len(self.layout.fragments)
        self.contributions.plan(len(self.layout.fragments))
        if saved is not None:
            await restore_reducer(reducer, saved)

    def _note(self, step: int) -> None:
        """Let errors name a local step, not only the exchange."""
        for ledger in self.ledgers:
            ledger.local_step = step

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
        if step < self.warmup_steps:
            return list(range(len(self.layout.fragments) or 1)) if step in self._warm else []
        if self.rule is not None:
            return [0] if step - self._sent[0] >= self.period else []
        # periods are counted from the warm-up's last exchange; fragments take turns within a period
        since = step - max(self._warm, default=-1)
        count = len(self.layout.fragments) or 1
        offsets = [part * self.period // count for part in range(count)]
        return [part for part, at in enumerate(offsets) if (since - at) % self.period == 0]

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return what this rank's model is after the exchanges that begin or end with this step."""
        weights = Weights(vector)
        await self.advance(weights, step)
        return weights.vector

    async def advance(self, weights: Weights, step: int) -> None:
        """Apply the exchanges that end after local step ``step``, and begin those that are due.

        Raises:
            NonFiniteGradientError: NaN or Inf was exchanged twice in a row.
        """
        # Late exchanges land first: the next ones begin from weights that contain them.  The second call
        # applies the exchanges without delay that have just begun.
        await self.land(weights, step)
        for part in self._due(step):
            self._begin(weights, part, step, 0 if step < self.warmup_steps else self.delay)
        await self.land(weights, step)

    def _begin(
        self, weights: Weights, part: int, step: int, delay: int = 0, *, last: bool = False
    ) -> None:
        """Begin the exchange of a fragment."""
        # row 0: this rank's weights; 1: how far they have moved, then the average, then the new shared
        # weights; 2: the change for a late exchange (``_exchange``)
        room, rows = self._room(part)
        began = weights.read(self.layout.fragments[part].span, rows[0])
        exchange = Exchange(part, step + delay, delay > 0, began)
        exchange.room, exchange.lr, self._sent[part] = room, self._lr(), step
        exchange.last, exchange.seen = last, self.contributions.take(part)
        exchange.carried = weights.carry(partial(self._exchange, exchange))
        self._under_way.append(exchange)

    async def conclude_with(self, weights: Weights) -> None:
        """Exchange the one fragment by the reducer, as that has planned it, and without momentum."""
        await self.land(weights)
        self._begin(weights, 0, self.steps, last=True)
        await self.land(weights)

    def go_on_from(self, step: int) -> None:
        """Count on from the others' local step, before which they have exchanged."""
        self.steps, self._sent = step, [step - 1] * len(self._sent)

    def repeat(self, deltas: Sequence[Tensor], momentum: float) -> None:
        """Apply averages to the shared weights as others have; there is one fragment."""
        average, span = self._whole(0, deltas), self.layout.fragments[0].span
        self.memory["shared"] = self._stepped(average, span, momentum, 1.0, average)

    async def land(self, weights: Weights, step: float = math.inf) -> None:
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
                (weights.add if exchange.late else weights.write)(span, exchange.weights)
                if self.contributions.applied(exchange):
                    weights.landed(span, self.memory["shared"])
                if self.rule is not None:
                    self._follow_drift(self.rule, exchange)
            self._rooms.keep(exchange.room)
        if not refused:
            return
        # The first time, all go back to their weights after the last exchange, without broken moments.
        # If the next exchange is broken as well, that did not help, and would be repeated for ever.
        self.state = OuterState(self.state.refused + 1)
        drop_broken(self.optimizers, self.on_any_part)
        if self.state.refused > 1:
            raise weights.refused(self.reducer.comm.ledger.local_step)
        self.restart(weights)

    def _follow_drift(self, rule: AdaptivePeriod, exchange: Exchange) -> None:
        """Choose the next period, on all ranks and all parts of a replica alike."""
        self.drift = exchange.drift
        period = followed(rule, self.period, self.drift, self.on_any_part)
        if exchange.lands >= self.warmup_steps:
            self.period = period

    def restart(self, weights: Weights) -> None:
        """Set the weights to what they were on this rank after its last exchange."""
        self.contributions.drop()
        for part, whole in enumerate(self.layout.fragments):
            weights.write(whole.span, self._base(part))

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the shared weights plus all that was not delivered; without that, if it is NaN."""
        weights = Weights(vector)
        await self.deliver(weights, step)
        return weights.vector

    async def deliver(self, weights: Weights, step: int | None = None) -> None:
        """Finish the exchanges under way, then deliver all that is left, uncompressed.

        Args:
            weights: this rank's.
            step: local steps that it has done; None: as counted by ``step()``.

        Raises:
            PeerError: ranks have not done the same number of local steps; nothing more was exchanged.
        """
        await self.land(weights)
        await self._meet(self.steps if step is None else step)
        missing, reducer = [torch.zeros_like(self.memory["shared"][:0])], self.reducer
        # Missing on this rank is all that the shared weights lack of its own: with the residual in the
        # weights it is their difference, else the moves since the last exchange plus the residual.  The
        # two differ once updates are weighed, for only the moves are to be.
        for part, its in enumerate(await self.contributions.weigh_all(reducer)):
            span = self.layout.fragments[part].span
            if self.residual == "weights" and not self.contributions.weighs:
                missing.append(self.memory["shared"][span] - weights.read(span))
            else:
                moved = self._began(part).sub_(weights.read(span)).mul_(its.weight)
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
            self.memory["shared"] = self._stepped(average, slice(0, None), 0.0, self._lr(), average)
        for fragment in self.layout.fragments:
            weights.write(fragment.span, self.memory["shared"][fragment.span].clone())

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

    # ---- applied to a model -----------------------------------------------------------------------

    def _close_books(self, comm: Communicator) -> None:
        """Leave it to the reducer, which does so after every exchange."""

    @property
    def reducer(self) -> Reducer:
        """The exchange's state; of a model it begins, together with all ranks, when it is asked for."""
        if self._reducer is None and self._binding is not None:
            self._bound()
        if self._reducer is None:
            raise ConfigurationError("OuterStep: await begin() before average() and conclude()")
        return self._reducer

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put the shared weights into the model, to evaluate or save them; restore this rank's after."""
        binding = self._bound()
        own = binding.read()
        binding.write_(self.memory["shared"])
        try:
            yield
        finally:
            binding.write_(own)

    def settings(self) -> dict[str, Any]:
        """Return the settings that make this member of the family, as plain values."""
        names = ("period", "fragments", "delay", "warmup_steps", "residual", "outer_lr", "momentum")
        more = ("nesterov", "residual_decay", "noise_correction", "dct", "sign")
        return {name: getattr(self, name) for name in (*names, *more, "period_rule")}

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: local steps, exchanges, bytes of each and by phase, residual norms."""
        here = {"period": self.period, "drift": self.drift}
        return {**reducer_stats(self.reducer, self.steps), **here}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved per rank with its own model and optimizer."""
        saved = None if self._reducer is None else reducer_state(self._reducer)
        under_way = [exchange.state_dict() for exchange in self._under_way]
        parts: dict[str, Any] = {"under_way": under_way, "sent": list(self._sent)}
        parts["contributions"] = self.contributions.state_dict()
        if self.rule is not None:
            parts["present_period"] = self.period
        return {**super().state_dict(), "reducer": saved, **parts}

    def kinds(self, state: Mapping[str, Any]) -> dict[str, Kind]:
        """Return what every field of a saved state has to be."""
        given = {"fragments": self.fragments, "momentum": self.momentum != 0, "rule": self.rule}
        own = outer_kinds(state, self.layout, self.memory, **given)  # type: ignore[arg-type]
        return {**super().kinds(state), **own}

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed."""
        self.check(state)
        return parse_state(self.reducer, state["reducer"])

    def restore(self, state: Mapping[str, Any], parsed: ParsedState | None = None) -> None:
        """Take over a saved state: its reducer's in ``start``, or now, ``parsed`` by ``validate``."""
        super().restore(state)
        self._saved = state["reducer"] if parsed is None else None
        if parsed is not None:
            take_state(self.reducer, parsed)
        self._under_way = [Exchange(**saved) for saved in state["under_way"]]
        self._sent = list(state["sent"])
        self.contributions.load_state_dict(state["contributions"])
        self.period = state.get("present_period", self.period)
        self._note(self.steps)

    # ---- the exchange -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for what is under way, and apply nothing."""
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
        self._note(exchange.lands - self.delay if exchange.late else exchange.lands)
        rows = self._room(part, exchange.room)[1]
        # moved = shared - residual - weights, or shared - weights: positive where weights have fallen, as
        # a gradient is.  The reducer adds its residual: accumulated = residual + moved.
        moved = self._began(part, rows[1]).sub_(exchange.weights)
        # before it is weighed: the drift is a distance of real steps
        distance = (
            None if self.rule is None else share_of(moved, self.memory["shared"], self.layout.end)
        )
        await self.contributions.weigh_(exchange, moved, reducer)
        deltas = self.layout.by_units(part, moved)
        for delta, unit in zip(deltas, fragment.units, strict=True):
            rotate_(delta, self.dct)
            kept = reducer.residuals[unit].value
            if kept is not None and self.residual_decay < 1:
                # accumulated = residual + delta is to be decay residual + moved, so delta gives up
                # (1 - decay) residual.  The residual itself a refused exchange must leave as it is.
                delta.sub_(kept, alpha=1 - self.residual_decay)
        try:
            if distance is not None:
                exchange.drift = await drift_of(distance, reducer)
            applied = await (self.reduce or self._reduce)(exchange, deltas, fragment.units)
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
        base, free = exchange.shared, rows[2 if exchange.late else 0]
        # row 0 holds the weights at the begin, which a late exchange still has to subtract
        if self.residual == "weights":
            base = torch.sub(base, self._withheld(part), alpha=shown_of(exchange.weight), out=free)
        exchange.weights = torch.sub(base, exchange.weights, out=free) if exchange.late else base
        exchange.done = True

    async def _reduce(self, _exchange: Exchange, deltas: list[Tensor], units: range) -> bool:
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
        return 1 - 1 / self.reducer.comm.world_size if self.momentum is None else self.momentum

    def _whole(self, part: int, deltas: Sequence[Tensor]) -> Tensor:
        """Return the fragment of which the units' changes are given; they are used up."""
        for delta in deltas:
            rotate_(delta, self.dct, back=True)
        return self.layout.joined(part, deltas)

    def _room(self, part: int, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return memory for an exchange, and the rows of it that a fragment needs."""
        sizes = [fragment.span.stop - fragment.span.start for fragment in self.layout.fragments]
        room = self._rooms.take(self.memory["shared"], max(sizes)) if room is None else room
        return room, room[:, : sizes[part]]

    def _base(self, part: int, out: Tensor | None = None) -> Tensor:
        """Return what this rank's weights are after an exchange, in a fragment."""
        shared = self.memory["shared"][self.layout.fragments[part].span]
        out = torch.empty_like(shared) if out is None else out
        if self.residual == "apart":
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
        if self.dct:
            values = [rotate_(value.clone(), self.dct, back=True) for value in values]
        return self.layout.joined(part, values)

    def _lr(self) -> float:
        """Return the size of a step by signs."""
        return common_rate(self.optimizers) if self.sign and self.optimizers else 1.0

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
            if self.nesterov:
                gradient.add_(velocity, alpha=momentum)
            else:
                gradient.copy_(velocity)
        if self.sign:
            gradient.sign_().mul_(lr)
        if self.outer_lr != 1:
            gradient.mul_(self.outer_lr)
        return torch.sub(self.memory["shared"][span], average, out=out)

    def _place(self) -> dict[str, Any]:
        """Add the settings on which a saved residual depends."""
        period = self.period if self.rule is None else self.period_rule
        place = {"algorithm": self.algorithm, "density": self.density, "period": period}
        if self.residual == "weights":
            place["residual"] = self.residual
        if self.dct:
            place["dct"] = self.dct
        if self.fragments > 1 or self.delay:
            place |= {"fragments": self.fragments, "delay": self.delay}
        return super()._place() | place
