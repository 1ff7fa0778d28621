"""Decide whether a step is applied: by all ranks, or by none.

Ranks that exchange with each other see the same totals, and NaN or Inf is always selected, so they
decide alike without a message.  Ranks that hold other parts of the same replica (shards, pipeline
stages) see other totals: a ``Consensus`` asks them before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsync.errors import NonFiniteGradientError
from sparsync.sparse import Vector
from sparsync.units import Unit

__all__ = ["Consensus", "Proposal", "decide_alone", "nonfinite_error"]


@dataclass(frozen=True, eq=False)
class Proposal:
    """A step that this rank could apply.

    Attributes:
        rank: this one, among those that exchange with each other.
        step: its number.
        units: what was exchanged.
        totals: of every unit, the same on all those ranks.
        broken: name of the first parameter whose total holds NaN or Inf; None if all are finite.
    """

    rank: int
    step: int
    units: Sequence[Unit]
    totals: Sequence[Vector]
    broken: str | None

    @staticmethod
    def of(rank: int, step: int, units: Sequence[Unit], totals: Sequence[Vector]) -> Proposal:
        """Look for NaN and Inf in the totals."""
        at = ((unit, t.first_nonfinite(unit.dtype)) for unit, t in zip(units, totals, strict=True))
        broken = next((unit.name_at(i) for unit, i in at if i is not None), None)
        return Proposal(rank, step, units, totals, broken)


# returns the name of a parameter that is not finite for anybody who was asked; None: apply the step
Consensus = Callable[[Proposal], str | None]


def decide_alone(proposal: Proposal) -> str | None:
    """Ask nobody: each rank holds the whole model."""
    return proposal.broken


def nonfinite_error(step: int, broken: str) -> NonFiniteGradientError:
    """Return the error of a step that nobody applies."""
    return NonFiniteGradientError(
        f"step {step}: the gradient of parameter '{broken}' is NaN or Inf on some rank "
        "(float16: > 65504); no rank applied it and all residuals are as before. Lower the "
        "learning rate, clip, or pass nonfinite='skip' (with a GradScaler: scaler=)"
    )
