"""What is equal for all algorithms of one ``sparsync train``, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sparsync.bench.connection import Connection
from sparsync.bench.shaped import check_rate
from sparsync.errors import ConfigurationError
from sparsync.presets import check_density
from sparsync.transports.base import check_timeout
from sparsync.workloads.byte_transformer import HEAD_WIDTH, ByteTransformer

__all__ = ["TrainSettings"]


@dataclass(frozen=True)
class TrainSettings:
    """What is equal for all algorithms of a comparison, and on all ranks.

    Attributes:
        ranks: world size P.
        steps: optimizer steps.
        density: k / n to exchange, in (0, 1].
        seed: of the initial weights and of the data.
        optimizer: "sgd" or "adam".
        lr: learning rate; default 0.1 for sgd, 1e-3 for adam (ours).
        momentum: of sgd.
        lr_warmup_steps: the learning rate grows linearly over so many first steps.
        warmup_steps: so many first steps are exchanged dense.
        batch_size: windows per rank and step.
        timeout: seconds that any rank waits for another.
        layers: blocks of the transformer.
        width: of its residual stream; a multiple of 32, the width of a head.
        context: bytes per window.
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
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.9
    lr_warmup_steps: int = 20
    warmup_steps: int = 0
    batch_size: int = 8
    timeout: float = 300.0
    layers: int = 4
    width: int = 160
    context: int = 64
    target_step: int | None = None
    transport: str = "auto"
    curve_keys: Path | None = None
    lab: str | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "batch_size", "layers", "width", "context"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("seed", "lr_warmup_steps", "warmup_steps"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _check("optimizer", self.optimizer, self.optimizer in ("sgd", "adam"), "sgd or adam")
        _check("lr", self.lr, 0 < self.learning_rate < math.inf, "a number > 0")
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "a number in [0, 1)")
        good = self.width % HEAD_WIDTH == 0
        _check("width", self.width, good, f"a multiple of {HEAD_WIDTH}, the width of a head")
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
        return 0.1 if self.optimizer == "sgd" else 1e-3

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step."""
        return self.learning_rate * min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))

    def steps_of(self, algorithm: str) -> int:
        """Return how many steps an algorithm makes: "dense" ends at the target."""
        if algorithm == "dense" and self.target_step is not None:
            return self.target_step
        return self.steps

    def make_model(self) -> ByteTransformer:
        """Build the model; the same weights on every rank."""
        return ByteTransformer(
            context=self.context, width=self.width, layers=self.layers, seed=self.seed
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of a model's parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), self.learning_rate, momentum=self.momentum)
        return torch.optim.Adam(model.parameters(), self.learning_rate)


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigurationError(f"{name} is {value}; give {expected}")
