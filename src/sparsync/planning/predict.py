"""How long a step's exchange takes, by collective.

    seconds   = selection + exchange
    selection = n select
    exchange  = messages alpha + bytes beta + (bytes of dense sums) gamma
                + (entries encoded) encode + (entries decoded and merged) decode + turns turn

all of the busiest rank: see ``forms``.  An entry takes the same time in every sparse format.  Messages
are counted one after the other, as the papers do: links on which they overlap are faster by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsync.errors import ConfigurationError
from sparsync.planning.cost import Cost
from sparsync.planning.forms import COLLECTIVES, UNPREDICTABLE, Job, Work
from sparsync.planning.machine import Machine

__all__ = ["Prediction", "check_collective", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What one step of one collective costs.

    Attributes:
        collective: name of the preset.
        seconds_selection: to accumulate and select, and to apply the total.
        seconds_exchange: from the selected entries to their sum.
        bytes_sent: the most that a rank sends or receives.
        messages: that a rank sends, one after the other.
        equation: paper and number, or "ours".
        lower_bound_words: words of 4 bytes that no algorithm for the same result goes below, with
            entries of two words or values of one; fewer bits per entry do.
        seconds_hidden: of the exchange, what goes on behind the backward pass.
    """

    collective: str
    seconds_selection: float
    seconds_exchange: float
    bytes_sent: float
    messages: float
    equation: str
    lower_bound_words: float
    seconds_hidden: float = 0.0

    @property
    def seconds(self) -> float:
        """What the step waits: selection and exchange, less what is hidden."""
        return self.seconds_selection + self.seconds_exchange - self.seconds_hidden


def predict(collective: str, *, size: int, k: int, world_size: int, machine: Machine) -> Prediction:
    """Predict what one step costs.

    Args:
        collective: a name of ``COLLECTIVES``: of a preset, with its own options.
        size: number of elements n.
        k: entries asked for; more than n are n.
        world_size: number of ranks P.
        machine: seconds per message, byte, element and entry.

    Raises:
        ConfigurationError: unknown name (lists the known ones), or a number that cannot be.

    Example:
        >>> job = dict(size=14_728_266, k=147_283, world_size=8, machine=Machine())
        >>> [round(1e3 * predict(name, **job).seconds_exchange) for name in ("dense", "budgeted")]
        [833, 11]
    """
    form = COLLECTIVES[check_collective(collective)]
    for name, value, least in (("size", size, 0), ("k", k, 0), ("world_size", world_size, 1)):
        if value < least:
            raise ConfigurationError(f"predict: {name} is {value}; give at least {least}")
    job = Job(size, min(k, size), world_size)
    alone = world_size == 1 or size == 0
    work = Work(Cost(0, 0)) if alone else form.work(job)
    applied = 0.0 if alone else form.result(job)
    seconds = work.cost.seconds(machine.alpha, machine.beta) + work.dense_bytes * machine.gamma
    return Prediction(
        collective=collective,
        seconds_selection=0.0 if form.whole else size * machine.select + applied * machine.decode,
        seconds_exchange=seconds
        + work.encoded * machine.encode
        + work.decoded * machine.decode
        + work.turns * machine.turn,
        bytes_sent=work.cost.nbytes if work.volume is None else work.volume,
        messages=work.cost.messages,
        equation=form.equation,
        lower_bound_words=0.0 if alone else form.bound(job),
    )


def check_collective(name: str) -> str:
    """Return the name, or refuse one that has no row.

    Raises:
        ConfigurationError: lists the known ones.
    """
    if name not in COLLECTIVES:
        reason = f" ({UNPREDICTABLE[name]})" if name in UNPREDICTABLE else ""
        known = ", ".join(COLLECTIVES)
        raise ConfigurationError(f"no cost is known of {name!r}{reason}; choose among {known}")
    return name
