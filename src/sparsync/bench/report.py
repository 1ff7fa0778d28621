"""What a training run measured: its fields, its JSON; and how reports write bytes and ratios."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from sparsync.errors import ConfigurationError

__all__ = [
    "TrainResult",
    "check_writable",
    "format_bytes",
    "format_ratio",
    "seconds_of_all",
    "write_json",
]


@dataclass(frozen=True)
class TrainResult:
    """One training run; its fields are the keys of the JSON.  None: does not apply.

    Attributes:
        algorithm: the preset's name; "dense" is plain DDP; "fp16" and "powersgd" are PyTorch's own
            communication hooks; or a scheme of model averaging.
        ranks: world size P.
        steps: optimizer steps.
        density: k / n asked for; 1 where everything is exchanged.
        parameters: number of trained elements n.
        optimizer: "sgd", "adam" or "adamw".
        lr: learning rate after its warm-up.
        loss: training loss in nats per byte (of "digits": per image), mean over ranks, per step.
        eval_loss: likewise, on what is held out, after the last step.
        seconds_total: of the slowest rank: all steps, and leaving all replicas equal.
        seconds_per_step_median: median of ``seconds``.
        bytes_sent_per_step_max: the most that any rank sent in any step, headers included.
        replicas_equal: whether all ranks ended with bit-identical parameters.
        bytes_sent: per step, by the rank that sent most in all.
        seed: of the initial weights and of the data.
        batch_size: windows or images per rank and step.
        context: bytes per window.
        warmup_steps: first steps that ran dense.
        seconds: per step, from when the last rank was through with the step before until the last
            one is through with this one: where none is ahead, the slowest rank's.
        seconds_computation_median: forward, backward and optimizer on all ranks at once, without any
            exchange; measured before the trainings.
        seconds_rest_median: the median step minus that: the exchange, as far as it is not hidden.
        bytes_counted: "ledger": counted as sent; "formula": what a bandwidth-optimal allreduce of
            the hook's elements sends, since PyTorch's hooks count no bytes.
        bytes_kernel: what the kernel counted on the lab's links, headers and repeats included: the
            most that any rank sent, per step.
        transport: what carried the gradients: "torch" (gloo) or "zmq".
        lab: bits per second of the shaped links.
        layers: blocks of the transformer, or layers of the LSTM.
        width: of its residual stream, or hidden units.
        workload: "bytes", "digits" or "lstm".
        accuracy: on held-out images after the last step, in [0, 1].
        metrics: further figures of the evaluation, by name ("WER", "perplexity").
        nesterov: of sgd.
        weight_decay: of the optimizer.
        clip: largest 2-norm of the averaged gradient.
        options: of a scheme of averaging.
        delay: what ranks waited before steps, as ``--delay`` was given; in all seconds.
        seconds_finish: of ``seconds_total``, what came behind the last of ``seconds``.
        target_step: whose loss, in the run of "dense", is the target.
        target_loss: averaged over the last ``target_window`` steps.
        target_window: see there.
        steps_to_target: until the loss, averaged likewise, is first at most the target.
        seconds_to_target: the same in seconds of training.
        speedup_to_target: seconds of "dense" to its target step, over these.
    """

    algorithm: str
    ranks: int
    steps: int
    density: float
    parameters: int
    optimizer: str
    lr: float
    loss: list[float]
    eval_loss: float
    seconds_total: float
    seconds_per_step_median: float
    bytes_sent_per_step_max: int
    replicas_equal: bool
    bytes_sent: list[int]
    seed: int
    batch_size: int
    context: int | None
    warmup_steps: int
    seconds: list[float]
    seconds_computation_median: float
    seconds_rest_median: float
    bytes_counted: str
    bytes_kernel: list[int] | None
    transport: str
    lab: float | None
    layers: int | None
    width: int | None
    workload: str = "bytes"
    accuracy: float | None = None
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    options: Mapping[str, object] | None = None
    delay: str = "none"
    seconds_finish: float = 0.0
    target_step: int | None = None
    target_loss: float | None = None
    target_window: int | None = None
    steps_to_target: int | None = None
    seconds_to_target: float | None = None
    speedup_to_target: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def seconds_of_all(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return how long each step took all ranks, from how long it took each of them.

    A rank may be ahead of others: a step is over when the last one is through with it.

    Example:
        >>> seconds_of_all([[1.0, 1.0, 4.0], [3.0, 1.0, 1.0]])
        [3.0, 1.0, 2.0]
    """
    through = zip(*(accumulate(seconds) for seconds in ranks), strict=True)
    return [end - start for start, end in pairwise([0.0, *(max(times) for times in through)])]


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with a decimal unit and three digits.

    Example:
        >>> format_bytes(0), format_bytes(238_291), format_bytes(7_943_040)
        ('0 B', '238 kB', '7.94 MB')
    """
    exponent = 0
    while nbytes >= 999.5 and exponent < 4:
        nbytes, exponent = nbytes / 1000, exponent + 1
    return f"{nbytes:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"


def format_ratio(ratio: float | None) -> str:
    """Write a ratio with three digits; "-" where there is none.

    Example:
        >>> format_ratio(None), format_ratio(0.96666), format_ratio(52.04), format_ratio(1234.5)
        ('-', '0.967', '52', '1,234')
    """
    if ratio is None:
        return "-"
    return f"{ratio:,.0f}" if ratio >= 999.5 else f"{ratio:.3g}"


def check_writable(path: Path) -> None:
    """Make the folder of ``path`` and see whether the file can be written, before work begins.

    Raises:
        ConfigurationError: it cannot.
    """
    if str(path) == "-":
        raise ConfigurationError("'-' is no file, and standard output has the table; name a file")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to '{path}' ({error.strerror}); name a file in a writable folder"
        ) from error


def write_json(results: Sequence[TrainResult], path: Path) -> None:
    """Write one object, or a list where there are several; NaN and Inf become null."""
    entries = [
        {key: _without_nonfinite(value) for key, value in asdict(result).items()}
        for result in results
    ]
    written = json.dumps(entries if len(entries) > 1 else entries[0], indent=1, allow_nan=False)
    path.write_text(written + "\n", encoding="utf-8")


def _without_nonfinite(value: object) -> object:
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
