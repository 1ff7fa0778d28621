"""What is equal for all algorithms of one ``sparsync train``, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from sparsync.errors import ConfigurationError
from sparsync.presets import check_density
from sparsync.transports.base import check_timeout

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

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "batch_size"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("seed", "lr_warmup_steps", "warmup_steps"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _check("optimizer", self.optimizer, self.optimizer in ("sgd", "adam"), "sgd or adam")
        _check("lr", self.lr, 0 < self.learning_rate < math.inf, "a number > 0")
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "a number in [0, 1)")
        check_timeout(self.timeout)
        check_density(self.density)

    @property
    def learning_rate(self) -> float:
        """The learning rate after its warm-up."""
        if self.lr is not None:
            return self.lr
        return 0.1 if self.optimizer == "sgd" else 1e-3

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a 0-based step."""
        return self.learning_rate * min(1.0, (step + 1) / max(self.lr_warmup_steps, 1))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of a model's parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), self.learning_rate, momentum=self.momentum)
        return torch.optim.Adam(model.parameters(), self.learning_rate)


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigurationError(f"{name} is {value}; give {expected}")
