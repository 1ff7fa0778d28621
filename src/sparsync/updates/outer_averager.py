"""The outer step as an averaging scheme, applied to a model by hand, or to vectors in simulations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from sparsync.averaging.averager import Averager, Staleness
from sparsync.averaging.binding import Binding
from sparsync.errors import ConfigurationError, require
from sparsync.feedback.agreed_setup import reducer_stats
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import ParsedState, parse_state, restore_reducer
from sparsync.fields import Kind, opened, sealed
from sparsync.names import parameters_of
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.units import output_parameters
from sparsync.updates.contributions import Contributions
from sparsync.updates.fragments import Layout, Weights
from sparsync.updates.outer_engine import OuterEngine, OuterState, kinds_of
from sparsync.updates.outer_step import OuterStep

__all__ = ["OuterAverager"]

_SHOWN: Final = "within shared(), which replaces this rank's own weights; leave that block first"
_SETTINGS: Final = tuple(field.name for field in fields(OuterStep))


@final
class OuterAverager(Averager):
    """Averages models by an outer step, with the settings of ``OuterStep`` as keyword arguments.

    ``attach`` runs the same engine on a separate thread, driven by hooks.

    Args:
        model: its parameters name the units; without a model there is a single unit.
        given: the settings of ``OuterStep``, and the arguments of every ``Averager``.

    Attributes:
        settings: the settings of the outer step.
        optimizers: the optimizers whose broken moments are dropped, and whose learning rate a step
            by signs uses.

    Cost: see ``OuterStep``.
    State: the state of the ``OuterEngine``, once it runs.
    Differs from the paper: see ``OuterStep``.

    Example:
        >>> from sparsync import simulate
        >>> import torch
        >>> async def program(comm):
        ...     averager, shared = OuterAverager(density=0.5, period=1), torch.zeros(2)
        ...     await averager.begin(comm, shared, 0)
        ...     local = shared + torch.tensor([1.0, 4.0 * comm.rank])
        ...     return (await averager.average(comm, local, 0)).tolist()
        >>> simulate(program, world_size=2).results
        [[0.5, 2.0], [0.5, 2.0]]

    References: see ``OuterStep``.
    """

    # the tables of schemes read settings and their defaults from this signature
    __signature__ = inspect.Signature(
        [
            inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
            *(p.replace(kind=p.KEYWORD_ONLY) for p in parameters_of(OuterStep).values()),
            inspect.Parameter("binding", inspect.Parameter.VAR_KEYWORD),
        ]
    )

    averaged: ClassVar[str] = "updates"

    def __init__(self, model: nn.Module | None = None, **given: Any) -> None:
        own = {name: given.pop(name) for name in _SETTINGS if name in given}
        self.settings = OuterStep(**own)
        self._engine: OuterEngine | None = None
        self._loaded: Mapping[str, Any] | None = None
        # created only once, because the engine holds a weak reference to it; ``hold`` wraps each
        # step's vector
        self._weights = Weights()
        self._shows = False  # whether the model holds the shared weights
        rule = given.pop("nonfinite", "spread")
        require(
            rule == "spread",
            f"nonfinite is {rule!r}; an outer step knows only 'spread', because its exchange finds NaN "
            "and Inf on all ranks",
        )
        super().__init__(model, nonfinite="spread", **given)
        if self._binding:  # not only in ``begin``, because a state may be loaded before ``begin``
            trained = self._binding.trained.values()
            self.settings = self.settings.for_size(sum(p.numel() for p in trained))
        bound = self._binding and self._binding.optimizer
        self.optimizers: list[torch.optim.Optimizer] = [bound] if bound else []

    @property
    def engine(self) -> OuterEngine:
        """The engine; if there is a model, the first access creates it, which is collective.

        Raises:
            ConfigurationError: there is no model, and ``begin`` has not been awaited yet.
        """
        if self._engine is None and self._binding is not None:
            self._bound()
        if self._engine is None:
            raise ConfigurationError("OuterAverager: await begin() before average() and conclude()")
        return self._engine

    @property
    def state(self) -> OuterState:
        """The number of exchanges in a row that were refused, as an ``OuterState``."""
        return OuterState() if self._engine is None else self._engine.state

    @property
    def reducer(self) -> Reducer:
        """The reducer of the exchange."""
        return self.engine.reducer

    @property
    def staleness(self) -> Staleness:
        """The kind of staleness: "none", or "bounded" if there is a delay."""
        return "bounded" if self.settings.delay else "none"

    @property
    def global_period(self) -> int:
        """The current period."""
        return self.settings.first_period if self._engine is None else self._engine.period

    def effective_group_size(self, world_size: int) -> int:
        """Return 1 if ranks train alone between exchanges, and P if they exchange on every step."""
        return world_size if self.global_period == 1 else 1

    # ---- the algorithm -----------------------------------------------------------------------------

    def parts(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return the parameters in a vector by name; without a model, the vector is one parameter."""
        return {"model": vector} if self._binding is None else self._binding.trained

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Plan the units; adopt a loaded state, or start from the vector, which all ranks share."""
        bound, trained = self._binding, self.parts(vector)
        self.settings = settings = self.settings.for_size(sum(p.numel() for p in trained.values()))
        output = output_parameters(bound.model) if settings.chosen.output and bound else ()
        layout = settings.plan(vector, trained, output, rest=bound.rest if bound else {})
        reducer = Reducer(comm, layout.units, await settings.chosen.on(comm), settings.density)
        self._weights.hold(vector)
        engine = OuterEngine(
            settings,
            layout,
            reducer,
            self._weights,
            optimizers=self.optimizers,
        )
        if bound and settings.sign:
            await agree(comm, {"the learning rate of a step by signs": engine.lr()})
        loaded = self._loaded
        engine.go_on_from(step)
        if loaded is not None:
            size = loaded["memory"]["shared"].numel()
            require(
                size == vector.numel(),
                f"the saved state is of {size} elements, this model has {vector.numel()}; load it into "
                "the model that it was saved with",
            )
            engine.restore(loaded, None)
            await restore_reducer(reducer, loaded["reducer"])
        # keep the loaded state until all ranks have adopted theirs, so that ``begin`` can be retried
        self._engine, self._loaded = engine, None
        self.memory = engine.memory
        self._weights.hold(torch.zeros(0, device="cpu"))

    def is_due(self, step: int) -> bool:
        """Return whether a fragment is sent or applied after local step ``step``."""
        return self._engine is None or self._engine.is_due(step)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return this rank's model after the exchanges that start or end with this step."""
        with self._holding(vector):
            await self.engine.advance(step)
            return self._weights.vector

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Return the shared weights plus all undelivered changes, unless these contain NaN."""
        with self._holding(vector):
            await self.engine.deliver(step)
            return self._weights.vector

    @contextmanager
    def _holding(self, vector: Tensor) -> Iterator[None]:
        """Let the engine read and write a vector in this context; drop the reference afterwards."""
        self._weights.hold(vector)
        try:
            yield
        finally:
            self._weights.hold(torch.zeros(0, device="cpu"))

    # ---- applied to a model ------------------------------------------------------------------------

    def _close_books(self, comm: Communicator) -> None:
        """Do nothing: the reducer ends the ledger's step after every exchange."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put the shared weights into the model in this context, to evaluate or save them."""
        binding, engine = self._bound(), self.engine
        own = binding.read()
        binding.write_(engine.memory["shared"])
        self._shows = True
        try:
            yield
        finally:
            self._shows = False
            binding.write_(own)

    def _bound(self) -> Binding:
        require(not self._shows, f"the averager was used {_SHOWN}")
        return super()._bound()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers about the averager, its exchanges, and the residual norms."""
        here = {"period": self.engine.period, "drift": self.engine.drift}
        # without a model, e.g. in a simulation, the averager does not count steps itself
        own = {} if self._binding is None else super().stats()
        return {**reducer_stats(self.reducer, self.steps), **here, **own}

    def _count(self, comm: Communicator) -> None:
        """Count the exchanges that end with this step, i.e. that started ``delay`` steps ago."""
        while self.participation.averages < self.reducer.step:
            self.participation.note(self.settings.delay, comm.world_size)

    # ---- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; every rank saves its own, with its own model and optimizer."""
        require(not self._shows, f"the averager's state was saved {_SHOWN}")
        if self._loaded is not None:
            return sealed("averager", self._loaded)
        if self._engine is not None:
            content = {**self._engine.state_dict(), **self._place(), "steps": self.steps}
            return sealed("averager", content)
        begins = {"under_way": [], "sent": [], "contributions": Contributions().state_dict()}
        rule = self.settings.rule
        period = {} if rule is None else {"present_period": self.settings.first_period}
        start = {"steps": self.steps, "state": vars(OuterState()), "memory": {}, "reducer": None}
        return sealed("averager", {**self._place(), **start, **begins, **period})

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check on this rank alone that a saved state fits; nothing is changed."""
        return parse_state(self.reducer, self.check(state)["reducer"])

    def check(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a saved state as far as this rank alone can, and return its content."""
        known, memory = self.settings, opened(state, "averager").get("memory")
        shared = memory.get("shared") if isinstance(memory, Mapping) else None
        if self._binding is None and self._engine is None and isinstance(shared, Tensor):
            # without a model, the size, on which the defaults depend, is unknown until ``begin``
            self.settings = known.for_size(shared.numel())
        try:
            return super().check(state)
        finally:
            self.settings = known

    def kinds(self, content: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kind of every field of a saved state's content."""
        engine = self._engine
        layout, memory = (
            (Layout({}, {}, 1), {}) if engine is None else (engine.layout, engine.memory)
        )
        return kinds_of(self.settings, content, layout, memory)

    def restore(self, content: Mapping[str, Any]) -> None:
        """Adopt a saved state; the engine adopts its part when the first step begins."""
        require(not self._shows, f"a state was loaded {_SHOWN}")
        # the engine cannot start without a communicator, so the state is kept until then
        self.steps = int(content["steps"])
        memory = {name: vector.clone() for name, vector in content["memory"].items()}
        self._loaded = None if content["reducer"] is None else {**content, "memory": memory}
        # An existing engine adopts the state now, because ``stats`` reports its numbers.  All ranks
        # create a new engine in the next step.
        if self._engine is not None and self._loaded is not None:
            self._engine.restore(self._loaded, None)
            self.memory = self._engine.memory
        self._begin_again()

    def _settings(self) -> dict[str, Any]:
        place = self.settings.place(self.settings.first_period)
        return {**place, **self.settings.described(), "steps": self.steps}

    def _place(self) -> dict[str, Any]:
        period = self.settings.first_period if self._engine is None else self._engine.period
        return {**super()._place(), **self.settings.place(period)}
