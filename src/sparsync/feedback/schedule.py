"""The warm-up: the densities at which the first steps are exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from sparsync.errors import require

__all__ = ["DGC_RAMP", "Warmup"]

DGC_RAMP = (0.25, 0.0625, 0.015625, 0.004, 0.001)


@dataclass(frozen=True)
class Warmup:
    """The densities of the first steps.

    Attributes:
        steps: the length of the warm-up.
        densities: densities of equally long parts of the warm-up (DGC: ``DGC_RAMP``, one epoch
            each). If there are none, the whole warm-up is dense, as in RedSync: at 64 ranks, an
            allgather at 1.5625 % already takes as many bytes as the dense exchange.

    Example:
        >>> warmup = Warmup(10, DGC_RAMP)
        >>> [warmup.density(step, final=0.001) for step in (0, 1, 2, 10)]
        [0.25, 0.25, 0.0625, 0.001]
        >>> Warmup(10).density(9, final=0.001) is None
        True

    References: Fang et al., RedSync, section 5.6; Lin et al., Deep Gradient Compression, ICLR 2018.
    """

    steps: int = 0
    densities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        whole = type(self.steps) is int and self.steps >= 0
        require(whole, f"warmup_steps is {self.steps!r}; give a whole number >= 0")
        given = all(isinstance(density, int | float) for density in self.densities)
        require(
            given and all(0 < density <= 1 for density in self.densities),
            f"warmup_densities are {self.densities}; give fractions in (0, 1], e.g. {DGC_RAMP}",
        )
        require(
            not self.densities or self.steps > 0,
            f"warmup_densities {self.densities} need warmup_steps > 0, the number of steps they "
            "last",
        )

    def density(self, step: int, final: float) -> float | None:
        """Return the density of a step, at least ``final``, or None for a dense step."""
        if step >= self.steps:
            return final
        if not self.densities:
            return None
        # the final density may be higher than the end of the ramp
        return max(self.densities[step * len(self.densities) // self.steps], final)
