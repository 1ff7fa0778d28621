"""Plans meet measurements: factors mend the predictions, and a better collective is changed to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sparsync.cost.predict import Prediction
from sparsync.errors import ConfigurationError

__all__ = ["Tracker"]

_NO_FACTORS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Tracker:
    """Which collective is used, and what was learned about predictions; changed by ``checked``.

    Arithmetic on its arguments alone: ranks that are given the same seconds go the same way.  These are
    the least of all ranks' (an allreduce of minima): a rank that arrives early measures its wait for the
    others as well.  A collective that was never used is taken at its prediction: so each that promises
    enough is tried, once, and judged by its own factor afterwards.

    Attributes:
        choice: name of the collective in use.
        gain: part of the measured time that another must save.
        patience: checks in a row that must say so.
        weight: of a new measurement in its collective's factor, in (0, 1].
        factors: measured over predicted seconds, by name.
        streak: checks in a row that said so.

    Example:
        >>> made = [Prediction(name, 0.0, s, 0, 0, "", 0) for name, s in (("a", 0.01), ("b", 0.02))]
        >>> tracker = Tracker("a")
        >>> for _ in range(3):
        ...     tracker = tracker.checked(made, measured=0.1)
        >>> tracker.choice, tracker.factors["a"]
        ('b', 10.0)
    """

    choice: str
    gain: float = 0.1
    patience: int = 3
    weight: float = 0.5
    factors: Mapping[str, float] = field(default_factory=lambda: _NO_FACTORS)
    streak: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gain < 1:
            raise ConfigurationError(
                f"Tracker: gain is {self.gain}; give a part in [0, 1), e.g. 0.1"
            )
        if not self.patience >= 1:
            raise ConfigurationError(f"Tracker: patience is {self.patience}; give at least 1 check")
        if not 0 < self.weight <= 1:
            raise ConfigurationError(f"Tracker: weight is {self.weight}; give a part in (0, 1]")

    def checked(self, table: Sequence[Prediction], measured: float) -> Tracker:
        """Return what follows from one more measurement; ``choice`` may be another one then.

        Args:
            table: of the plan; the choice is in it.
            measured: seconds that the choice took, the same on all ranks: what its prediction calls
                ``seconds``.

        Raises:
            ConfigurationError: the choice is not in the table, or no time was measured.
        """
        predicted = {p.collective: p.seconds for p in table}
        if self.choice not in predicted:
            raise ConfigurationError(
                f"Tracker: {self.choice} is in use but not in the plan, which has "
                f"{', '.join(predicted)}; plan with it among the candidates"
            )
        if not 0 <= measured < float("inf"):
            raise ConfigurationError(f"Tracker: {measured} s were measured; give seconds >= 0")
        factors = MappingProxyType({**self.factors, self.choice: self._factor(predicted, measured)})
        corrected = {name: factors.get(name, 1.0) * s for name, s in predicted.items()}
        best = min(corrected, key=corrected.__getitem__)
        if corrected[best] >= (1 - self.gain) * corrected[self.choice]:
            return replace(self, factors=factors, streak=0)
        if self.streak + 1 < self.patience:
            return replace(self, factors=factors, streak=self.streak + 1)
        return replace(self, choice=best, factors=factors, streak=0)

    def _factor(self, predicted: Mapping[str, float], measured: float) -> float:
        """Return the choice's factor, a moving average that begins with the first measurement."""
        if not predicted[self.choice]:
            return 1.0
        fresh = measured / predicted[self.choice]
        return fresh + (1 - self.weight) * (self.factors.get(self.choice, fresh) - fresh)
