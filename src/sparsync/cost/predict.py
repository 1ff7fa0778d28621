"""Predict how long a step's exchange takes, by collective.

    seconds   = selection + exchange
    selection = n select + (entries of the total) decode
    exchange  = messages alpha + bytes beta + (bytes of dense sums) gamma
                + (entries encoded) encode + (entries decoded and merged) decode + turns turn

all of the busiest rank, as ``Collective.cost`` counts them.  An entry takes the same time in every
sparse format.  Messages are counted one after the other, as the papers do: links on which they overlap
are faster by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import (
    Cost,
    Job,
    Result,
    lemma_5_1_words,
    lower_bound_words,
    sum_bound_words,
)
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError

__all__ = ["Prediction", "bound_words", "predict"]


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step of one collective.

    Attributes:
        collective: name of the preset.
        seconds_selection: time to accumulate and select, and to apply the total.
        seconds_exchange: time from the selected entries to their sum.
        bytes_sent: the most that a rank sends or receives.
        messages: number that a rank sends, one after the other.
        equation: paper and number, or "sparsync".
        lower_bound_words: words of 4 bytes that no algorithm for the same result goes below, with
            entries of two words or values of one; fewer bits per entry do.
        seconds_hidden: part of the exchange that overlaps the backward pass.
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
        """Time that the step waits: selection and exchange, less what is hidden."""
        return self.seconds_selection + self.seconds_exchange - self.seconds_hidden


def predict(
    algorithm: Algorithm, *, size: int, k: int, world_size: int, machine: Machine
) -> Prediction:
    """Predict what one step costs.

    Args:
        algorithm: with its options.
        size: number of elements n.
        k: entries asked for; more than n are n.
        world_size: number of ranks P.
        machine: seconds per message, byte, element and entry.

    Raises:
        ConfigurationError: the algorithm has no cost, or a number makes no sense.

    Example:
        >>> from sparsync.presets import resolve
        >>> job = dict(size=14_728_266, k=147_283, world_size=8, machine=Machine())
        >>> made = [predict(resolve(name), **job) for name in ("dense", "budgeted")]
        >>> [round(1e3 * prediction.seconds_exchange) for prediction in made]
        [833, 11]
    """
    for name, value, least in (("size", size, 0), ("k", k, 0), ("world_size", world_size, 1)):
        if value < least:
            raise ConfigurationError(f"predict: {name} is {value}; give at least {least}")
    job, result = Job(size, min(k, size), world_size), algorithm.result
    alone = world_size == 1 or size == 0
    cost = Cost(0, 0) if alone else algorithm.cost(job)
    applied = 0.0 if alone else min(job.k, job.summed) if result == "top-k" else job.summed
    selection = 0.0 if result == "whole" else size * machine.select + applied * machine.decode
    return Prediction(
        collective=algorithm.name,
        seconds_selection=selection,
        seconds_exchange=cost.seconds(machine.alpha, machine.beta)
        + cost.dense_bytes * machine.gamma
        + cost.encoded * machine.encode
        + cost.decoded * machine.decode
        + cost.turns * machine.turn,
        bytes_sent=cost.nbytes,
        messages=cost.messages,
        equation=algorithm.source,
        lower_bound_words=0.0 if alone else bound_words(result, job),
    )


def bound_words(result: Result, job: Job) -> float:
    """Return the words that no algorithm for such a total goes below.

    Top-k: Ok-Topk's Theorem 3.1; a sum: SparCML's Lemmas 5.1 and 5.2; whole vectors: Lemma 5.1.
    """
    if result == "top-k":
        return lower_bound_words(job.k, job.world_size)
    if result == "sum":
        return sum_bound_words(job)
    return lemma_5_1_words(job.size, job.world_size, disjoint=False)
