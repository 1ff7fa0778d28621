"""Results of training runs: their fields, which are also the JSON keys, and the time to a target loss.

To decide whether a run has reached the target, its loss at a step is averaged with the losses of
earlier steps.  Later losses are not used, because they are unknown during the run.  All runs see the
same data in the same order, so their noise is similar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean

__all__ = ["Goal", "TrainResult", "seconds_of_all", "smoothed", "with_target"]


@dataclass(frozen=True)
class TrainResult:
    """One training run; its fields are the keys of the JSON.  Fields that do not apply are None.

    Settings of the run, e.g. ``density``, have the same names as in ``TrainSettings``.
    """

    algorithm: str  # a preset; "dense" (plain DDP); "fp16", "powersgd" (PyTorch's); or a scheme
    ranks: int
    steps: int  # number of steps made
    density: float  # requested k / n; 1 if everything is exchanged
    parameters: int  # number of trained elements n
    optimizer: str
    lr: float  # learning rate after its warm-up
    loss: list[float]  # loss per step in nats per byte, image, ...; mean over ranks
    eval_loss: float  # the same on held-out samples, after the last step
    # seconds until all ranks have made all steps, and until the replicas are equal
    seconds_total: float
    seconds_per_step_mean: float  # mean of ``seconds``, i.e. without ``seconds_finish``
    seconds_per_step_median: float
    bytes_sent_per_step_max: int  # maximum over ranks and steps, including headers
    replicas_equal: bool  # whether all ranks ended with bit-identical parameters
    bytes_sent: list[int]  # per step, by the rank that sent most in total
    # bytes sent by the rank that sent most, as a mean over steps; includes the last exchange, after
    # which the replicas are equal
    sent_per_parameter_and_step: float
    received_per_parameter_and_step: float
    seed: int
    batch_size: int
    context: int | None
    warmup_steps: int
    # for each step, the seconds between the time when the last rank finished the previous step and the
    # time when the last rank finished this one
    seconds: list[float]
    # seconds of forward, backward and optimizer without an exchange, on all ranks in parallel; measured
    # before the run
    seconds_computation_median: float
    # the median step minus ``seconds_computation_median``, i.e. the part of the exchange that is not
    # hidden behind computation
    seconds_rest_median: float
    bytes_counted: str  # "ledger": as sent; "formula": computed for a bandwidth-optimal allreduce
    # largest number of bytes per step that the kernel counted on a lab's link
    bytes_kernel: list[int] | None
    transport: str  # what carries the gradients
    lab: float | None  # lowest rate of the links in bits per second
    layers: int | None
    width: int | None
    links: str | None = None  # the lab's links, as ``parse_links`` reads them
    workload: str = "bytes"
    accuracy: float | None = None  # accuracy on held-out images, in [0, 1]
    lr_divisor: int = 1  # divides ``lr``; P if SGD applies the sum of the gradients, else 1
    momentum: float = 0.0  # momentum of SGD
    momentum_corrected: bool = False  # whether momentum is applied before the exchange
    nesterov: bool = False
    lr_schedule: str = "constant"  # after the warm-up of the rate
    weight_decay: float = 0.0
    clip: float | None = None
    options: Mapping[str, object] | None = None  # options of an averaging scheme
    # fraction of all contributions to averages that came from a stale model
    stale_share: float | None = None
    largest_staleness: int | None = None  # age of the oldest stale model, in steps
    # seconds waited in the averages of all steps, mean over ranks
    seconds_waited: float | None = None
    # predicted fraction of a step's bytes from layers that a preset does not compress
    dense_share: float = 0.0
    delay: str = "none"
    seconds_finish: float = 0.0  # the part of ``seconds_total`` after the last step
    target_step: int | None = None  # the target is the loss of "dense" at this step
    target_loss: float | None = None  # loss averaged over the last ``target_window`` steps
    target_window: int | None = None
    # number of steps until the loss, averaged in the same way, is at most the target
    steps_to_target: int | None = None
    seconds_to_target: float | None = None  # the same in seconds of training
    speedup_to_target: float | None = None  # seconds of "dense" to the target step / these seconds
    # further figures of the evaluation, e.g. "WER"
    metrics: Mapping[str, float] = field(default_factory=dict)


def seconds_of_all(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the duration of each step over all ranks, given every rank's seconds per step.

    Some ranks may be ahead of others; a step ends when the last rank has finished it.

    Example:
        >>> seconds_of_all([[1.0, 1.0, 4.0], [3.0, 1.0, 1.0]])
        [3.0, 1.0, 2.0]
    """
    through = zip(*(accumulate(seconds) for seconds in ranks), strict=True)
    return [end - start for start, end in pairwise([0.0, *(max(times) for times in through)])]


def smoothed(loss: Sequence[float], radius: int) -> list[float]:
    """Average each value with up to ``radius`` values before and after it; keep the first unchanged.

    Example:
        >>> smoothed([8.0, 2.0, 2.0, 0.0], radius=1)
        [8.0, 4.0, 1.3333333333333333, 1.0]
    """
    # average symmetrically, so the radius must shrink towards both ends
    reach = [min(i, radius) for i in range(len(loss))]
    return [fmean(loss[i - r : i + r + 1]) for i, r in enumerate(reach)]


@dataclass(frozen=True)
class Goal:
    """The loss that "dense" has at a step, averaged over the last ``window`` steps.

    Example:
        >>> Goal.of([4.0, 3.0, 2.0], step=3), Goal.of([4.0] * 50 + [3.0] * 50, step=60).window
        (Goal(loss=2.0, window=1), 12)
    """

    loss: float
    window: int

    @staticmethod
    def of(losses: Sequence[float], step: int) -> Goal:
        """Return the goal given by the loss of "dense" at ``step``, counted from 1.

        The loss is averaged over the last 20 steps, or over a fifth of ``step`` in a shorter run.
        Losses of batches differ by 10 %, and the loss of dense falls by as much in 20 steps.
        """
        window = max(1, min(20, step // 5))
        return Goal(fmean(losses[step - window : step]), window)

    def reached_by(self, losses: Sequence[float]) -> bool:
        """Return whether the mean of the last ``window`` losses has reached the goal."""
        return fmean(losses[-self.window :]) <= self.loss


def with_target(
    results: Sequence[TrainResult], target_step: int | None = None
) -> list[TrainResult]:
    """Fill in when each run reached the loss that "dense" had at ``target_step``, counted from 1.

    If "dense" is not among the results, return them unchanged.
    """
    dense = next((result for result in results if result.algorithm == "dense"), None)
    if dense is None:
        return list(results)
    step = target_step or dense.steps
    goal = Goal.of(dense.loss, step)
    judged = []
    for result in results:
        made = range(1, result.steps + 1)
        # for dense, use the target step itself: by chance, its noisy loss may have been as low earlier
        first = (s for s in made if goal.reached_by(result.loss[:s]))
        reached = step if result is dense else next(first, None)
        seconds = None if reached is None else sum(result.seconds[:reached])
        judged.append(
            replace(
                result,
                target_step=step,
                target_loss=goal.loss,
                target_window=goal.window,
                steps_to_target=reached,
                seconds_to_target=seconds,
                speedup_to_target=sum(dense.seconds[:step]) / seconds if seconds else None,
            )
        )
    return judged
