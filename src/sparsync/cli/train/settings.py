"""Settings of ``sparsync train``, equal for all algorithms and ranks; checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
from torch import nn
from typer import Option

from sparsync.algorithm import check_density
from sparsync.api import connect
from sparsync.averaging.binding import BufferRule
from sparsync.cli.flags import (
    CurveKeys,
    Lab,
    Transport,
    option,
    ranks_option,
)
from sparsync.cli.network_choice import Connection
from sparsync.cli.train.schedule import parse_schedule
from sparsync.cli.values import (
    Bounds,
    Positive,
    Ranks,
    Rates,
    Readable,
    Seed,
    Size,
    Steps,
    Warmup,
    check,
    check_fields,
    check_memory,
)
from sparsync.cli.workloads import make_workload, workload_class, workload_names
from sparsync.cli.workloads.delays import parse_delay
from sparsync.cli.workloads.workload import Workload, is_hidden_matrix
from sparsync.errors import ConfigurationError, require
from sparsync.feedback.correction import Correction
from sparsync.transports.communicator import Communicator

__all__ = ["ELASTIC_TIMEOUT", "TrainSettings"]

ELASTIC_TIMEOUT = 5.0  # seconds after which elastic ranks go on without a rank that stalls

Layers = Annotated[int, Bounds(1, 1000)]
_SPACES = ("gradient", "update", "local")
_ADAM_SPACES = (*_SPACES, "frozen", "refreshed")
_OPTIMIZERS = ("sgd", "adam", "adamw", "muon")

_MOMENTUM_OF_SGD = 0.9
_DEFAULT: Any = None  # until the constructor fills it in
_WORKLOADS = (
    f"One of {', '.join(workload_names())}. The first need no data: a transformer or an LSTM on Python's "
    "own source text, a CNN on scikit-learn's digits. The others are the papers'."
)
_SPACE = (
    "The tensors that presets exchange: gradient, update or local (progress of the ranks' own weights); "
    "with adam also frozen, refreshed."
)
_DATA = "Folder that the papers' workloads read: see docs/data.md. Never downloaded."
_MOMENTUM = "With sgd: apply momentum and decay before the exchange, not after."
_CLIP = (
    "Largest norm of the averaged gradient; 0: any. Presets clip local gradients to sqrt(P) times it, "
    "schemes of averaging to it."
)
_PERIOD = "Steps between exchanges of --space local, and of schemes that let ranks train alone."
_LAYERS = "Blocks of the transformer: 12 width^2 parameters each; or layers of the LSTM."
_WIDTH = (
    "Of the transformer, a multiple of 32 (416 gives 8.6 M parameters), or of the LSTM; or "
    "channels of a CNN's first stage."
)
_OPTIMIZER = "sgd, adam, adamw or muon (adamw but for hidden matrices); auto: the workload's."
_DECAY = "0.01 for adamw and muon, the workload's for sgd, else 0"
_BATCH = "32 for digits, 16 for lines, 8 for bytes and lstm; the papers'"
_DELAY = (
    "Ranks wait before steps: random:COUNT:SECONDS, persistent:RANK:SECONDS or heavytail:MIN:MAX."
)
_SCHEDULE = (
    "After those: constant, linear (to 0 after the last step), step:FACTOR:AT+AT (AT in steps, or in per "
    "cent of the run) or plateau:FACTOR:PATIENCE:EVERY (windows of EVERY steps of the training loss)."
)
_WAIT, _TIMEOUT = Bounds(0.1, 1e6), "Seconds that a rank waits for another."
_TARGET = "Time to loss: end each run at the loss that dense has at this step, and report when."


@dataclass(frozen=True)
class TrainSettings:
    """Settings that all algorithms of a comparison share; every field is an option of the command.

    The constructor fills in the fields whose defaults depend on the workload and the optimizer.  In
    other fields, None stands for the default of the workload or the scheme.
    """

    ranks: Annotated[Ranks, ranks_option(4)] = 4
    steps: Annotated[Steps, option("Optimizer steps.")] = 300
    density: Annotated[float, option("Exchanged part of the gradient, in (0, 1].")] = 0.01
    seed: Annotated[Seed, option("Seed of the initial weights and of the data.")] = 0
    workload: Annotated[str, option(_WORKLOADS)] = "bytes"
    data: Annotated[Path | None, Readable(folder=True), option(_DATA)] = None
    optimizer: Annotated[str, option(_OPTIMIZER)] = "auto"
    lr: Annotated[Positive, option("Learning rate.", "by workload and optimizer")] = _DEFAULT
    momentum: Annotated[float, option("Of sgd.")] = _MOMENTUM_OF_SGD
    nesterov: Annotated[bool, Option("--nesterov", help="Nesterov momentum, with sgd.")] = False
    momentum_correction: Annotated[
        bool | None, option(_MOMENTUM, "as the algorithm is published")
    ] = None
    weight_decay: Annotated[
        Rates, option("Weight decay of the optimizer; decoupled for adamw.", _DECAY)
    ] = _DEFAULT
    clip: Annotated[Rates, option(_CLIP, "0.25 for LSTMs of text, else 0")] = _DEFAULT
    space: Annotated[str, option(_SPACE)] = "gradient"
    period: Annotated[Steps | None, option(_PERIOD, "by density, or the scheme's")] = None
    buffers: Annotated[
        str, option("Buffers of the model: schemes average them, or leave them local to the end.")
    ] = "average"
    delay: Annotated[str, option(_DELAY)] = "none"
    lr_warmup_steps: Annotated[
        Warmup, option("Number of first steps, over which the learning rate grows.")
    ] = 20
    lr_schedule: Annotated[str, option(_SCHEDULE)] = "constant"
    warmup_steps: Annotated[Warmup, option("Number of first steps, which are exchanged dense.")] = 0
    batch_size: Annotated[
        Size, option("Windows, images or other samples per rank and step.", _BATCH)
    ] = _DEFAULT
    context: Annotated[
        Size | None,
        option("Bytes, words or tokens per window.", "64; lstm 32; lines 96; the papers'"),
    ] = None
    layers: Annotated[Layers | None, option(_LAYERS, "4; lstm 2; the papers'")] = None
    width: Annotated[Size | None, option(_WIDTH, "160; lstm 224; the papers'")] = None
    target_step: Annotated[Steps | None, option(_TARGET, "the last step of dense")] = None
    transport: Transport = "auto"
    lab: Lab = None
    curve_keys: CurveKeys = None
    timeout: Annotated[
        float, _WAIT, option(_TIMEOUT, f"300; with --elastic {ELASTIC_TIMEOUT:g}")
    ] = _DEFAULT

    def __post_init__(self) -> None:
        check_fields(self)
        self.make_workload()  # refuses options that the workload does not have
        self._fill_in()
        self._check_memory()
        check("buffers", self.buffers, self.buffers in get_args(BufferRule), "average or local")
        delay = parse_delay(self.delay)
        waits = delay.kind != "persistent" or delay.first < self.ranks
        check("delay", self.delay, waits, f"a rank from 0 to {self.ranks - 1}")
        parse_schedule(self.lr_schedule)
        self._check_optimizer()
        check_density(self.density)
        self.connection()

    def _fill_in(self) -> None:
        defaults = workload_class(self.workload).defaults
        optimizer = defaults.optimizer if self.optimizer == "auto" else self.optimizer
        decays = {"sgd": defaults.weight_decay, "adamw": 0.01, "muon": 0.01}
        for name, value in (
            ("lr", defaults.sgd_lr if optimizer == "sgd" else defaults.adam_lr),
            ("weight_decay", decays.get(optimizer, 0.0)),
            ("clip", defaults.clip or 0.0),
            ("batch_size", defaults.batch_size),
            ("timeout", 300.0),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "optimizer", optimizer)

    def _check_memory(self) -> None:
        """Refuse sizes whose activations and weights exceed the memory of this machine."""
        workload = self.make_workload()
        width, context, layers = (
            getattr(workload, name, None) or 1 for name in ("width", "context", "layers")
        )
        activations = self.batch_size * context * width * layers
        check_memory(
            f"{self.ranks} ranks with these sizes",
            4.0 * self.ranks * max(activations, width**2 * layers),
            "give a smaller --batch-size, --context, --width or --layers, or fewer --ranks",
        )

    def _check_optimizer(self) -> None:
        known = self.optimizer in _OPTIMIZERS
        check("optimizer", self.optimizer, known, "sgd, adam, adamw or muon")
        check("lr", self.lr, 0 < self.lr < math.inf, "a number > 0")
        check("momentum", self.momentum, 0 <= self.momentum < 1, "a number in [0, 1)")
        ignored = self.optimizer != "sgd" and self.momentum != _MOMENTUM_OF_SGD
        expected = f"--optimizer sgd, not {self.optimizer}, or leave it out"
        check("momentum", self.momentum, not ignored, expected)
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            check(name, value, 0 <= value < math.inf, "a number >= 0")
        require(
            self.optimizer != "muon" or hasattr(torch.optim, "Muon"),
            f"--optimizer muon needs torch 2.9, this is {torch.__version__}; choose adamw",
        )
        spaces = {"sgd": _SPACES, "muon": _SPACES[:1]}.get(self.optimizer, _ADAM_SPACES)
        check("space", self.space, self.space in spaces, f"one of {', '.join(spaces)}")
        if self.space != "gradient" and self.clip:
            raise ConfigurationError(
                f"clip is {self.clip:g}, but --space {self.space} exchanges updates, which are not "
                "clipped; add --clip 0"
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
        """Connect this rank for an exchange that is not DDP's own."""
        return connect(self.timeout, transport=self.transport, curve_keys=self.curve_keys)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step, before the reductions of the plateau schedule."""
        rising = self.lr * min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))
        schedule = parse_schedule(self.lr_schedule)
        return rising * schedule.at_step(step, steps=self.steps, warmup=self.lr_warmup_steps)

    def lr_divisor(self, *, sums: bool) -> int:
        """Return the number that divides the learning rate: P for SGD if gradients are summed, else 1.

        A sum is P times the mean, so SGD's steps would be P times too long.  Adam's and Muon's steps
        would not change.
        """
        return self.ranks if sums and self.optimizer == "sgd" else 1

    def steps_of(self, algorithm: str) -> int:
        """Return the number of steps of an algorithm; "dense" ends at the target."""
        return self.target_step or self.steps if algorithm == "dense" else self.steps

    def make_workload(self) -> Workload:
        """Make the workload; its data is loaded when first needed."""
        options = {name: getattr(self, name) for name in ("data", "context", "layers", "width")}
        return make_workload(self.workload, **options)

    def correction(self, corrects: bool) -> Correction:
        """Return the correction of local gradients; ``corrects``: whether presets use it by default."""
        wanted = corrects if self.momentum_correction is None else self.momentum_correction
        clip = self.clip or None
        if self.optimizer != "sgd" or not wanted:
            return Correction(clip=clip)
        return Correction(
            self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay, clip=clip
        )

    def make_optimizers(
        self, model: nn.Module, correction: Correction | None = None
    ) -> list[torch.optim.Optimizer]:
        """Build the optimizers for a model, without the features that the correction takes over."""
        parameters, decay = list(model.parameters()), self.weight_decay
        if correction is not None and (correction.momentum or correction.weight_decay):
            return [torch.optim.SGD(parameters, self.lr)]
        if self.optimizer == "sgd":
            return [torch.optim.SGD(parameters, self.lr, self.momentum, 0.0, decay, self.nesterov)]
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        if self.optimizer != "muon":
            return [kind(parameters, lr=self.lr, weight_decay=decay)]
        hidden, rest = list[nn.Parameter](), list[nn.Parameter]()
        for name, p in model.named_parameters():
            inside = p.dim() == 2 and is_hidden_matrix(name.removeprefix("module."), p)
            (hidden if inside else rest).append(p)
        require(
            bool(hidden),
            f"--optimizer muon is for hidden matrices, and {self.workload} has none; choose adamw",
        )
        # with this adjustment, Muon's updates are as large as AdamW's, so both can use the same rate
        # (Liu et al., 2025, section 2.2)
        muon = torch.optim.Muon(
            hidden, lr=self.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, kind(rest, lr=self.lr, weight_decay=decay)]
