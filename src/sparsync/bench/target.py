"""Time to loss: how long a run takes to the loss that dense reaches, on the clock of this network.

Losses are averaged over the last few steps, never over coming ones: at a moment of the run one knows
no more.  All runs see the same data in the same order, so their noise is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sparsync.bench.report import TrainResult
from sparsync.errors import ConfigurationError

__all__ = ["Goal", "check_target_step", "smoothed", "trailing", "with_target"]

_BASELINE = "dense"


def smoothed(loss: Sequence[float], radius: int) -> list[float]:
    """Average each value with up to ``radius`` before and behind it; the first value stays itself.

    Example:
        >>> smoothed([8.0, 2.0, 2.0, 0.0], radius=1)
        [8.0, 4.0, 1.3333333333333333, 1.0]
    """
    reach = [min(i, radius) for i in range(len(loss))]  # as far back as forth, from the first on
    return [fmean(loss[i - r : i + r + 1]) for i, r in enumerate(reach)]


def trailing(loss: Sequence[float], window: int) -> list[float]:
    """Average each value with up to ``window - 1`` values before it.

    Example:
        >>> trailing([8.0, 2.0, 2.0, 0.0], window=2)
        [8.0, 5.0, 2.0, 1.0]
    """
    return [fmean(loss[max(i + 1 - window, 0) : i + 1]) for i in range(len(loss))]


@dataclass(frozen=True)
class Goal:
    """The loss that "dense" has at a step, averaged.

    Attributes:
        loss: nats per byte or image.
        window: number of last steps that are averaged.
    """

    loss: float
    window: int

    @staticmethod
    def of(losses: Sequence[float], step: int, *, most_averaged: int = 20) -> Goal:
        """Take the loss at ``step``, counted from 1.

        Args:
            losses: of "dense", per step.
            step: where the goal is set.
            most_averaged: losses are averaged over so many last steps, over a fifth of ``step`` in a
                shorter run (ours: batches differ by 10 %, and dense gains that in 20 steps).

        Example:
            >>> Goal.of([4.0, 3.0, 2.0], step=3), Goal.of([4.0] * 50 + [3.0] * 50, step=60).window
            (Goal(loss=2.0, window=1), 12)
        """
        window = max(1, min(most_averaged, step // 5))
        return Goal(trailing(losses[:step], window)[-1], window)

    def reached_by(self, losses: Sequence[float]) -> bool:
        """Tell whether the loss, averaged likewise, is there after the last of ``losses``."""
        return fmean(losses[-self.window :]) <= self.loss


def check_target_step(target_step: int | None, steps: int, algorithms: Sequence[str]) -> None:
    """Refuse a target that no run of "dense" will set."""
    if target_step is None:
        return
    if not 1 <= target_step <= steps:
        raise ConfigurationError(
            f"target_step is {target_step}; give a step of the run, from 1 to {steps}"
        )
    if _BASELINE not in algorithms:
        raise ConfigurationError(
            f"--target-step {target_step} asks for the loss of dense, which is not among the "
            f"algorithms {', '.join(algorithms)}; add dense"
        )


def with_target(
    results: Sequence[TrainResult], target_step: int | None = None
) -> list[TrainResult]:
    """Fill in when each run reached the loss that "dense" had at ``target_step``.

    Args:
        results: of the same settings; without "dense" among them they stay as they are.
        target_step: counted from 1; default: the last step of "dense".
    """
    dense = next((result for result in results if result.algorithm == _BASELINE), None)
    if dense is None:
        return list(results)
    step = dense.steps if target_step is None else target_step
    goal = Goal.of(dense.loss, step)
    dense_seconds = sum(dense.seconds[:step])
    done = []
    for result in results:
        made = range(1, result.steps + 1)
        reached = next((s for s in made if goal.reached_by(result.loss[:s])), None)
        if result is dense:
            reached = step  # where the goal is; noise may have touched it before
        seconds = None if reached is None else sum(result.seconds[:reached])
        done.append(
            replace(
                result,
                target_step=step,
                target_loss=goal.loss,
                target_window=goal.window,
                steps_to_target=reached,
                seconds_to_target=seconds,
                speedup_to_target=dense_seconds / seconds if seconds else None,
            )
        )
    return done
