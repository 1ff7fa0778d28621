"""Algorithms: ways to average gradients, each a combination of a selector and a collective."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.collective import Collective
from sparsync.collectives.costs import Cost, Job, Result
from sparsync.collectives.dense import Dense
from sparsync.errors import ConfigurationError
from sparsync.names import parameters_of, text_of
from sparsync.reduction import Reduction
from sparsync.selection.selector import Everything, Exact, Selector
from sparsync.state import Stateful
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.units import Unit
from sparsync.wire.codec import Codec

__all__ = [
    "LARGE",
    "Algorithm",
    "Preset",
    "check_density",
    "default_bits",
    "default_density",
    "row",
    "settings_of",
]

# Models with at least this many elements exchange 1 % of them. In a smaller model, delayed entries cost
# more training steps, and sending fewer bytes saves less time. So the density grows as elements ** -1.5,
# up to 1 at 46,415 elements.
LARGE = 1_000_000
USUAL_DENSITY = 0.01


@dataclass(frozen=True)
class Algorithm:
    """A way to average gradients.

    Attributes:
        name: the name in messages and tables.
        make_selector: builds one selector; called once per unit.
        make_collective: builds one collective; called once per unit.
        options: the options given to the preset; ranks compare them.
        source: the paper and its equation, for tables.
        average: whether the total is divided by world_size; if not, the sum is applied, as in SparCML.
        shared: whether several units share a global k, each in proportion to its large entries;
            otherwise, each unit has its own k.
        unit_bytes: size of the units within which entries are selected, unless the user gives one; see
            ``plan_units``.
        compress: returns whether a parameter is exchanged sparsely, unless the user gives such a
            function; None if all are.
        bits: bits per element if every element is sent in a few bits; None if selected entries or
            full-width numbers are sent.
        output: the algorithm for the output layer, if it differs from this one.
        make_dense: builds the collective of dense units, once per unit; None for ``Dense``.
        prepare: measures the group before the first step and returns the algorithm for this group;
            None if there is nothing to measure.
        calls: for the planner, maps a step's job to the number of calls of the collective and the job
            of each call.  The two jobs differ if the selector finds more than k entries, or if layers
            are sent in several messages.
    """

    name: str
    make_selector: Callable[[], Selector]
    make_collective: Callable[[], Collective]
    options: tuple[tuple[str, object], ...] = ()
    source: str = "sparsync"
    average: bool = True
    shared: bool = True
    unit_bytes: int | None = None
    compress: Callable[[str, Tensor], bool] | None = None
    bits: float | None = None
    output: Algorithm | None = None
    make_dense: Callable[[], Collective] | None = None
    prepare: Callable[[Communicator], Coroutine[Any, Any, Algorithm]] | None = None
    calls: Callable[[Job], tuple[int, Job]] = lambda job: (1, job)

    @property
    def result(self) -> Result:
        """The kind of the total; "whole" if no entries are selected."""
        return self.make_collective().result

    @property
    def predictable(self) -> bool:
        """Whether the collective declares a cost."""
        return self.make_collective().cost(Job(2, 1, 2)) is not None

    def cost(self, job: Job) -> Cost:
        """Return the cost of one step on the busiest rank.

        Raises:
            ConfigurationError: the collective declares no cost.
        """
        times, called = self.calls(job)
        cost = self.make_collective().cost(called)
        if cost is None:
            raise ConfigurationError(
                f"the cost of {self.name!r} is unknown: its collective has no cost(job); choose "
                "others"
            )
        return cost if times == 1 else cost.times(times)

    def bytes_of(
        self, units: Sequence[Unit], density: float, world_size: int
    ) -> tuple[float, float] | None:
        """Return how many bytes a step sends for dense units and for all others, by the declared costs.

        Return None if a collective declares no cost.
        """
        sent = {True: 0.0, False: 0.0}
        for unit in units:
            chosen = self.output if unit.output and self.output else self
            collective: Collective = Dense() if unit.dense else chosen.make_collective()
            cost = collective.cost(Job(unit.size, unit.entries(density), world_size))
            if cost is None:
                return None
            sent[unit.dense] += cost.nbytes
        return sent[True], sent[False]

    def dense_share(self, units: Sequence[Unit], density: float, world_size: int) -> float:
        """Return the fraction of a step's bytes that dense units send, by the declared costs.

        The fraction is 0 if a collective declares no cost.
        """
        dense, rest = self.bytes_of(units, density, world_size) or (0.0, 0.0)
        return dense / (dense + rest) if dense else 0.0

    async def on(self, comm: Communicator) -> Algorithm:
        """Return the algorithm adapted to a group; all ranks of the group must call this."""
        # names are compared before anything is measured, because ranks with different algorithms would
        # wait in different collectives
        await agree(comm, {"the algorithm": self.name})
        if self.prepare is None:
            return self
        return replace(await self.prepare(comm), options=self.options, make_dense=self.make_dense)

    def for_unit(self, unit: Unit) -> tuple[Selector, Collective]:
        """Build the selector and the collective of one unit."""
        if unit.dense and self.make_dense is not None:
            return Everything(), self.make_dense().for_layers(unit.layers)
        chosen = self.output if unit.output and self.output else self
        selector, collective = chosen.make_selector(), chosen.make_collective()
        return selector.for_layers(unit.layers), collective.for_layers(unit.layers)


@dataclass(frozen=True)
class Preset:
    """A row of the presets' table: what commands, ``auto``, tests and docs need to know about a preset.

    If ``planned`` is set, ``auto`` and ``sparsync plan`` may choose the algorithm.  With its default
    options, the algorithm must then round no more than bf16 does.  Among rows with equal predictions,
    the first wins.
    """

    make: Callable[..., Algorithm]  # its keyword-only arguments are the options
    source: str = "sparsync"  # the paper and equation that give its cost
    planned: bool = False
    # True if the paper uses momentum correction instead of the optimizer's momentum
    corrects: bool = False
    passes_on: Callable[..., Collective] | None = None  # takes the ``**options`` of ``make``

    @property
    def options(self) -> dict[str, Parameter]:
        """The options by name."""
        own = parameters_of(self.make)
        more = parameters_of(self.passes_on) if self.passes_on else {}
        return {
            **{name: p for name, p in own.items() if p.kind is p.KEYWORD_ONLY},
            **{name: p for name, p in more.items() if name not in own},
        }

    @property
    def text(self) -> str:
        """The docstrings that explain the options, joined."""
        return text_of(self.make, *filter(None, [self.passes_on]))


def row(
    name: str,
    collective: Callable[..., Collective],
    source: str = "sparsync",
    *,
    selector: Callable[[], Selector] = Exact,
    planned: bool = False,
    **more: Any,
) -> Preset:
    """Return a preset whose options are the collective's arguments; the selector takes none.

    Args:
        name: name of the algorithm.
        collective: the class of the collective.
        source: the paper and equation that give its cost.
        selector: a function that creates the selector.
        planned: see ``Preset``.
        more: additional fields of ``Algorithm``.
    """

    def make(**options: Any) -> Algorithm:
        return Algorithm(name, selector, partial(collective, **options), **more)

    make.__doc__ = getattr(collective, "func", collective).__doc__
    return Preset(make, source, planned, passes_on=collective)


_PLAIN = (bool, int, float, str, type(None), torch.dtype, Codec, Reduction)


def settings_of(part: object) -> str:
    """Return the type of a selector or collective and its settings, as a text that ranks compare.

    Example:
        >>> settings_of(Exact()), settings_of([Dense(), 0.5, Algorithm])
        ('Exact()', '[Dense(), 0.5, Algorithm]')
    """
    if isinstance(part, _PLAIN):
        return repr(part)
    if isinstance(part, type):
        return part.__name__
    if isinstance(part, list | tuple):
        return f"[{', '.join(map(settings_of, part))}]"
    kept: dict[str, Any] = {}
    if isinstance(part, Stateful):
        # All public attributes count as settings, so that a third party's class need not declare its
        # settings.  Private attributes may be caches; among them, only further selectors and collectives
        # count.
        for name, value in sorted(vars(part).items()):
            parts = value if isinstance(value, list | tuple) else [value]
            inner = any(isinstance(one, Stateful) for one in parts)
            if name != "state" and (inner or not name.startswith("_")):
                kept[name] = value
    elif is_dataclass(part):
        kept = {field.name: getattr(part, field.name) for field in fields(part)}
    # for all other objects, only the type counts, because their texts may contain an address
    named = ", ".join(f"{name}={settings_of(value)}" for name, value in kept.items())
    return f"{type(part).__name__}({named})"


def default_density(elements: int) -> float:
    """Return the default density for a model: 1 %, and more for small models.

    Delayed entries cost training steps, especially if momentum or a high learning rate acts on them.
    Below ``LARGE`` elements, ``LARGE ** 1.5 / (100 elements ** 0.5)`` entries are exchanged.  Up to
    46,415 elements, all entries are exchanged.

    Example:
        >>> [round(default_density(n), 3) for n in (5_000, 100_000, 300_000, 1_000_000, 25_000_000)]
        [1.0, 0.316, 0.061, 0.01, 0.01]
    """
    smaller = max(1.0, LARGE / max(elements, 1))
    return min(1.0, USUAL_DENSITY * smaller * math.sqrt(smaller))


def default_bits(elements: int) -> int:
    """Return the default bits per element for a model's updates: 2, and more for small models.

    Rounding costs training steps, and a small model has few bytes to save.  So an exchange sends 8 or 4
    bits per element if this makes at most ``LARGE`` bits in all (125 kB), and otherwise 2.

    Example:
        >>> [default_bits(n) for n in (5_000, 125_000, 150_000, 300_000, 25_000_000)]
        [8, 8, 4, 2, 2]
    """
    return next((bits for bits in (8, 4) if bits * elements <= LARGE), 2)


def check_density(density: float) -> float:
    """Return the density as a float; refuse one outside (0, 1]."""
    # subnormal floats are also invalid, because their inverse is infinite
    least = sys.float_info.min
    if (
        isinstance(density, bool)
        or not isinstance(density, int | float)
        or not least <= density <= 1
    ):
        raise ConfigurationError(
            f"density is {density!r}; give the fraction k / n to exchange, in (0, 1], e.g. 0.01"
        )
    return float(density)
