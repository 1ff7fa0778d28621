"""What is equal for all algorithms of one ``sparsync train``, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from sparsync.averaging.binding import BufferRule
from sparsync.bench.connection import Connection
from sparsync.bench.shaped import check_rate
from sparsync.correction import Correction
from sparsync.errors import ConfigurationError
from sparsync.presets import check_density
from sparsync.transports.base import check_timeout
from sparsync.workloads import Workload, make_workload, workload_class
from sparsync.workloads.delays import Persistent, parse_delay

__all__ = ["TrainSettings"]

_SPACES = ("gradient", "update", "local")
_ADAM_SPACES = (*_SPACES, "arrival", "frozen", "refreshed")
_OPTIMIZERS = ("sgd", "adam", "adamw")
_BUFFERS = get_args(BufferRule)


@dataclass(frozen=True)
class TrainSettings:
    """What is equal for all algorithms of a comparison, and on all ranks.

    Attributes:
        ranks: world size P.
        steps: optimizer steps.
        density: k / n to exchange, in (0, 1].
        seed: of the initial weights and of the data.
        workload: "bytes", "digits" or "lstm", or one of the papers': see ``sparsync.workloads``.
        data: folder that the papers' workloads read; see ``docs/data.md``.
        optimizer: "sgd", "adam" or "adamw"; "auto" becomes the workload's.
        lr: learning rate; default: the workload's.
        momentum: of sgd.
        nesterov: sgd looks ahead by its momentum.
        momentum_correction: sgd's momentum and decay are done to local gradients, before the exchange
            of presets.  Default: as the algorithm is published ("redsync").
        weight_decay: as torch's optimizers have it: adamw's is decoupled.  Default 0.01 for adamw
            (torch's), the workload's for sgd, 0 for adam.
        clip: largest 2-norm of the averaged gradient; 0: any.  Presets clip local gradients to
            sqrt(P) times it, schemes of averaging clip them to it.  Default: the workload's.
        space: what presets exchange: "gradient" (``sparsync.attach``), "update", "local"
            (``LocalUpdates``); with adam also "arrival" (gradients; moments updated where entries
            arrive), and "frozen" or "refreshed" (updates; second moments shared).
        period: steps between exchanges; default: of space "local" what the density allows, else the
            scheme's.
        group_size: of schemes that average in groups, S; default: the scheme's.
        sync_period: steps between their global averages.
        neighbours: of gossip schemes: how many others a rank sends to per step.
        deadline: seconds after which a scheme goes on without a rank that does not answer.
        buffers: of the model: schemes "average" them with the parameters, or leave them "local" until
            the end.
        delay: seconds that ranks wait before steps; see ``sparsync.workloads.delays``.
        lr_warmup_steps: the learning rate grows linearly over so many first steps.
        lr_decay: after that it falls linearly, to 0 behind the last step (Ok-Topk's BERT).
        warmup_steps: so many first steps are exchanged dense; "local": with growing periods.
        batch_size: windows or images per rank and step; default: the workload's.
        timeout: seconds that any rank waits for another.
        layers: of the transformer or LSTM; default: the workload's.
        width: of its residual stream (a multiple of 32), or hidden units; default: the workload's.
        context: bytes per window; default: the workload's.
        target_step: whose loss of "dense" is the target: "dense" ends there, every other run when it
            has reached it.  None: the last step of "dense", and all runs have equal steps.
        transport: of the sparse exchange: "torch" (gloo), "zmq", "mpi", or "auto", the library's
            default.
        curve_keys: folder of keys, for zmq.
        lab: rate of a real, shaped network on this machine, as "100mbit".
    """

    ranks: int = 4
    steps: int = 300
    density: float = 0.01
    seed: int = 0
    workload: str = "bytes"
    data: Path | None = None
    optimizer: str = "auto"
    lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    momentum_correction: bool | None = None
    weight_decay: float | None = None
    clip: float | None = None
    space: str = "gradient"
    period: int | None = None
    group_size: int | None = None
    sync_period: int | None = None
    neighbours: int | None = None
    deadline: float | None = None
    buffers: BufferRule = "average"
    delay: str = "none"
    lr_warmup_steps: int = 20
    lr_decay: bool = False
    warmup_steps: int = 0
    batch_size: int | None = None
    timeout: float = 300.0
    layers: int | None = None
    width: int | None = None
    context: int | None = None
    target_step: int | None = None
    transport: str = "auto"
    curve_keys: Path | None = None
    lab: str | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "batch_size", "layers", "width", "context", "period"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1")
        for name in ("seed", "lr_warmup_steps", "warmup_steps"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        self.make_workload()  # refuses what it does not know
        if self.optimizer == "auto":
            object.__setattr__(self, "optimizer", workload_class(self.workload).defaults.optimizer)
        _check("buffers", self.buffers, self.buffers in _BUFFERS, "average or local")
        delay = parse_delay(self.delay)
        waits = not isinstance(delay, Persistent) or delay.rank < self.ranks
        _check("delay", self.delay, waits, f"a rank from 0 to {self.ranks - 1}")
        _check("optimizer", self.optimizer, self.optimizer in _OPTIMIZERS, "sgd, adam or adamw")
        _check("lr", self.lr, 0 < self.learning_rate < math.inf, "a number > 0")
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "a number in [0, 1)")
        good = self.deadline is None or 0 < self.deadline < math.inf
        _check("deadline", self.deadline, good, "seconds > 0")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 <= value < math.inf, "a number >= 0")
        spaces = _SPACES if self.optimizer == "sgd" else _ADAM_SPACES
        _check("space", self.space, self.space in spaces, f"one of {', '.join(spaces)}")
        if self.space not in ("gradient", "arrival") and self.largest_norm is not None:
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
        check_timeout(self.timeout)
        check_density(self.density)
        if self.lab is not None:
            check_rate(self.lab)
            if self.transport == "mpi":
                raise ConfigurationError(
                    "--lab and --transport mpi do not go together: MPI's ranks of one machine share "
                    "memory, past the lab's links; choose zmq or torch"
                )
        Connection(self.transport, self.timeout, self.curve_keys)

    @property
    def learning_rate(self) -> float:
        """The learning rate after its warm-up."""
        if self.lr is not None:
            return self.lr
        return workload_class(self.workload).defaults.lr(self.optimizer)

    @property
    def samples(self) -> int:
        """Windows or images per rank and step."""
        return self.batch_size or workload_class(self.workload).defaults.batch_size

    @property
    def largest_norm(self) -> float | None:
        """The 2-norm that the averaged gradient is clipped to; None: it is not."""
        clip = workload_class(self.workload).defaults.clip if self.clip is None else self.clip
        return clip or None

    @property
    def decay(self) -> float:
        """The optimizer's weight decay."""
        if self.weight_decay is not None:
            return self.weight_decay
        if self.optimizer == "sgd":
            return workload_class(self.workload).defaults.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step."""
        rising = self.learning_rate * min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))
        if not self.lr_decay or step < self.lr_warmup_steps:
            return rising
        return rising * (self.steps - step) / max(self.steps - self.lr_warmup_steps, 1)

    def steps_of(self, algorithm: str) -> int:
        """Return how many steps an algorithm makes: "dense" ends at the target."""
        if algorithm == "dense" and self.target_step is not None:
            return self.target_step
        return self.steps

    def make_workload(self) -> Workload:
        """Make the workload; its data is loaded when it is first asked for."""
        return make_workload(
            self.workload,
            data=self.data,
            context=self.context,
            layers=self.layers,
            width=self.width,
        )

    def correction(self, corrects: bool) -> Correction:
        """Return what is done to local gradients, for a preset that is published with it or not."""
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
            return torch.optim.SGD(
                parameters,
                lr,
                momentum=self.momentum,
                weight_decay=decay,
                nesterov=self.nesterov,
            )
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr, weight_decay=decay)


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigurationError(f"{name} is {value}; give {expected}")
