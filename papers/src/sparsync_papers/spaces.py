"""The space that the papers add to ``sparsync train --space``: updates."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from sparsync.cli.train.exchanges import Connected
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync_papers.optimizers import (
    SecondMoment,
    UpdateSpaceAdamW,
    UpdateSpaceSGD,
)

__all__ = ["Updates"]


@final
class Updates(Connected):
    """``UpdateSpaceSGD`` or ``UpdateSpaceAdamW``."""

    def __init__(self, settings: TrainSettings, name: str, model: nn.Module) -> None:
        super().__init__(settings, model)
        self.name = name

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build the optimizer."""
        lr = settings.learning_rate
        if settings.optimizer == "sgd":
            if settings.momentum or settings.decay or settings.warmup_steps:
                raise ConfigurationError(
                    "--space update with sgd is Ok-Topk's Algorithm 2: plain SGD; add --momentum 0"
                )
            return UpdateSpaceSGD(
                self.model, lr, self.name, density=settings.density, comm=self.comm
            )
        moments: dict[str, SecondMoment] = {"frozen": "frozen", "refreshed": "refreshed"}
        return UpdateSpaceAdamW(
            self.model,
            lr,
            self.name,
            weight_decay=settings.decay,
            second_moment=moments.get(settings.space, "local"),
            warmup_steps=settings.warmup_steps,
            density=settings.density,
            comm=self.comm,
        )
