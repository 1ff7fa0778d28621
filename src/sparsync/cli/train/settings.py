"""Settings of ``sparsync train``, equal for all algorithms and ranks; checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import torch
from torch import nn
from typer import Option

from sparsync.api import connect
from sparsync.averaging.binding import BufferRule
from sparsync.cli.network import Connection
from sparsync.cli.options import (
    CurveKeys,
    Lab,
    Timeout,
    Transport,
    check,
    check_at_least,
    ranks_option,
)
from sparsync.cli.workloads import Defaults, Workload, make_workload, workload_class, workload_names
from sparsync.cli.workloads.delays import Persistent, parse_delay
from sparsync.errors import ConfigurationError
from sparsync.feedback.correction import Correction
from sparsync.presets import check_density
from sparsync.transports.communicator import Communicator

__all__ = ["TrainSettings"]

_SPACES = ("gradient", "update", "local")
_ADAM_SPACES = (*_SPACES, "frozen", "refreshed")
_OPTIMIZERS = ("sgd", "adam", "adamw")

_WORKLOADS = (
    f"One of {', '.join(workload_names())}. The first need no data: a transformer or an LSTM on Python's "
    "own source text, a CNN on scikit-learn's digits. The others are the papers'."
)
_EXCHANGED = (
    "What presets exchange: gradient, update or local (progress of the ranks' own weights); with adam "
    "also frozen, refreshed."
)
_DELAYS = (
    "Ranks wait before steps: random:COUNT:SECONDS, persistent:RANK:SECONDS or heavytail:MIN:MAX."
)
_TARGET = (
    "Time to loss: how soon is the loss reached that dense has at this step? A run ends there."
)


@dataclass(frozen=True)
class TrainSettings:
    """Settings that all algorithms of a comparison share; every field is an option of the command.

    None means a default that depends on the workload, the optimizer or the scheme; the properties
    fill it in.  ``optimizer="auto"`` becomes the workload's.
    """

    ranks: Annotated[int, ranks_option(4)] = 4
    steps: Annotated[int, Option(help="Optimizer steps.")] = 300
    density: Annotated[float, Option(help="Exchanged part of the gradient, in (0, 1].")] = 0.01
    seed: Annotated[int, Option(help="Of the initial weights and of the data.")] = 0
    workload: Annotated[str, Option(help=_WORKLOADS)] = "bytes"
    data: Annotated[
        Path | None,
        Option(help="Folder that the papers' workloads read: see docs/data.md. Never downloaded."),
    ] = None
    optimizer: Annotated[str, Option(help="sgd, adam or adamw; auto: the workload's.")] = "auto"
    lr: Annotated[
        float | None, Option(help="Learning rate.", show_default="by workload and optimizer")
    ] = None
    momentum: Annotated[float, Option(help="Of sgd.")] = 0.9
    nesterov: Annotated[bool, Option("--nesterov", help="Nesterov's momentum, of sgd.")] = False
    momentum_correction: Annotated[
        bool | None,
        Option(
            help="Of sgd: momentum and decay before the exchange, not after.",
            show_default="as the algorithm is published",
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        Option(
            help="Of the optimizer; adamw's is decoupled.",
            show_default="0.01 for adamw, the workload's for sgd, else 0",
        ),
    ] = None
    clip: Annotated[
        float | None,
        Option(
            help="Largest norm of the averaged gradient; 0: any. Presets clip local gradients to "
            "sqrt(P) times it, schemes of averaging to it.",
            show_default="0.25 for LSTMs of text, else 0",
        ),
    ] = None
    space: Annotated[str, Option(help=_EXCHANGED)] = "gradient"
    period: Annotated[
        int | None,
        Option(
            help="Steps between exchanges of --space local, and of schemes that let ranks train "
            "alone.",
            show_default="by density, or the scheme's",
        ),
    ] = None
    group_size: Annotated[
        int | None, Option(help="Ranks that average, of wagma.", show_default="near sqrt(ranks)")
    ] = None
    sync_period: Annotated[
        int | None, Option(help="Steps between global averages, of wagma.", show_default="10")
    ] = None
    neighbours: Annotated[
        int | None, Option(help="Ranks that a rank sends to per step, of sgp.", show_default="1")
    ] = None
    deadline: Annotated[
        float | None,
        Option(help="Seconds until wagma omits a silent rank.", show_default="the scheme's"),
    ] = None
    buffers: Annotated[
        str, Option(help="Of the model: schemes average them, or leave them local to the end.")
    ] = "average"
    delay: Annotated[str, Option(help=_DELAYS)] = "none"
    lr_warmup_steps: Annotated[
        int, Option(help="First steps, over which the learning rate grows.")
    ] = 20
    lr_decay: Annotated[
        bool, Option("--lr-decay", help="Then it falls linearly, to 0 after the last step.")
    ] = False
    warmup_steps: Annotated[int, Option(help="First steps, which are exchanged dense.")] = 0
    batch_size: Annotated[
        int | None,
        Option(
            help="Windows, images or other samples per rank and step.",
            show_default="32 for digits, 16 for lines, 8 for bytes and lstm; the papers'",
        ),
    ] = None
    context: Annotated[
        int | None,
        Option(
            help="Bytes, words or tokens per window.",
            show_default="64; lstm 32; lines 96; the papers'",
        ),
    ] = None
    layers: Annotated[
        int | None,
        Option(
            help="Blocks of the transformer: 12 width^2 parameters each; or layers of the LSTM.",
            show_default="4; lstm 2; the papers'",
        ),
    ] = None
    width: Annotated[
        int | None,
        Option(
            help="Of the transformer, a multiple of 32: 416 gives 8.6 M parameters; of the LSTM; or "
            "channels of a CNN's first stage.",
            show_default="160; lstm 224; the papers'",
        ),
    ] = None
    target_step: Annotated[
        int | None, Option(help=_TARGET, show_default="the last step of dense")
    ] = None
    transport: Transport = "auto"
    lab: Lab = None
    curve_keys: CurveKeys = None
    timeout: Timeout = 300.0

    def __post_init__(self) -> None:
        check_at_least(
            self, 1, "ranks", "steps", "batch_size", "layers", "width", "context", "period"
        )
        check_at_least(self, 0, "seed", "lr_warmup_steps", "warmup_steps")
        self.make_workload()  # refuses what it does not know
        if self.optimizer == "auto":
            object.__setattr__(self, "optimizer", self._defaults.optimizer)
        check("buffers", self.buffers, self.buffers in get_args(BufferRule), "average or local")
        delay = parse_delay(self.delay)
        waits = not isinstance(delay, Persistent) or delay.rank < self.ranks
        check("delay", self.delay, waits, f"a rank from 0 to {self.ranks - 1}")
        self._check_optimizer()
        good = self.deadline is None or 0 < self.deadline < math.inf
        check("deadline", self.deadline, good, "seconds > 0")
        check_density(self.density)
        self.connection()

    def _check_optimizer(self) -> None:
        check("optimizer", self.optimizer, self.optimizer in _OPTIMIZERS, "sgd, adam or adamw")
        check("lr", self.lr, 0 < self.learning_rate < math.inf, "a number > 0")
        check("momentum", self.momentum, 0 <= self.momentum < 1, "a number in [0, 1)")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            check(name, value, value is None or 0 <= value < math.inf, "a number >= 0")
        spaces = _SPACES if self.optimizer == "sgd" else _ADAM_SPACES
        check("space", self.space, self.space in spaces, f"one of {', '.join(spaces)}")
        if self.space != "gradient" and self.largest_norm is not None:
            raise ConfigurationError(
                f"clip is {self.largest_norm:g}, but --space {self.space} exchanges updates, which are "
                "not clipped; add --clip 0"
            )
        if self.momentum_correction and self.optimizer != "sgd":
            raise ConfigurationError(
                f"--momentum-correction is for sgd, not {self.optimizer}; leave it out"
            )
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ConfigurationError(
                f"--nesterov is for sgd with momentum, not {self.optimizer} with momentum "
                f"{self.momentum:g}; leave it out, or choose --optimizer sgd --momentum 0.9"
            )

    def connection(self) -> Connection:
        """Return how the ranks are connected."""
        return Connection(self.transport, self.timeout, self.curve_keys, self.lab)

    def connect(self) -> Communicator:
        """Connect this rank for an exchange that is not DDP's."""
        return connect(self.timeout, transport=self.transport, curve_keys=self.curve_keys)

    @property
    def _defaults(self) -> Defaults:
        return workload_class(self.workload).defaults

    @property
    def learning_rate(self) -> float:
        """The learning rate after its warm-up."""
        return self._defaults.lr(self.optimizer) if self.lr is None else self.lr

    @property
    def samples(self) -> int:
        """Windows or images per rank and step."""
        return self.batch_size or self._defaults.batch_size

    @property
    def largest_norm(self) -> float | None:
        """The 2-norm that the averaged gradient is clipped to; None: it is not."""
        return (self._defaults.clip if self.clip is None else self.clip) or None

    @property
    def decay(self) -> float:
        """The optimizer's weight decay."""
        if self.weight_decay is not None:
            return self.weight_decay
        if self.optimizer == "sgd":
            return self._defaults.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step."""
        rising = self.learning_rate * min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))
        if not self.lr_decay or step < self.lr_warmup_steps:
            return rising
        return rising * (self.steps - step) / max(self.steps - self.lr_warmup_steps, 1)

    def steps_of(self, algorithm: str) -> int:
        """Return the number of steps of an algorithm: "dense" ends at the target."""
        if algorithm == "dense" and self.target_step is not None:
            return self.target_step
        return self.steps

    def make_workload(self) -> Workload:
        """Make the workload; its data is loaded when it is first asked for."""
        options = {name: getattr(self, name) for name in ("data", "context", "layers", "width")}
        return make_workload(self.workload, **options)

    def correction(self, corrects: bool) -> Correction:
        """Return the correction of local gradients, for a preset that is published with it or not."""
        wanted = corrects if self.momentum_correction is None else self.momentum_correction
        if self.optimizer != "sgd" or not wanted:
            return Correction(clip=self.largest_norm)
        return Correction(
            self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.decay,
            clip=self.largest_norm,
        )

    def make_optimizer(
        self, model: nn.Module, correction: Correction | None = None
    ) -> torch.optim.Optimizer:
        """Build the optimizer of a model's parameters, without what the correction does."""
        parameters, lr, decay = model.parameters(), self.learning_rate, self.decay
        if correction is not None and (correction.momentum or correction.weight_decay):
            return torch.optim.SGD(parameters, lr)
        if self.optimizer == "sgd":
            nesterov = self.nesterov
            return torch.optim.SGD(parameters, lr, self.momentum, 0.0, decay, nesterov)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr, weight_decay=decay)
