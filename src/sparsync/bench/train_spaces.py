"""What a training exchanges instead of gradients: updates, or the models' local progress."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import nn

from sparsync.api import connect
from sparsync.averaging.schemes import SCHEMES
from sparsync.bench.connection import transport_of
from sparsync.bench.train_hooks import (
    Allreduced,
    Attached,
    Exchange,
    PowerSgd,
    dense_bytes_per_step,
)
from sparsync.bench.train_schemes import Averaged
from sparsync.bench.train_settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync.integrations.adam import LocalAdamW
from sparsync.integrations.local_updates import LocalUpdates
from sparsync.integrations.optimizer import SecondMoment, UpdateSpaceAdamW, UpdateSpaceSGD

__all__ = ["make_exchange"]


def make_exchange(settings: TrainSettings, name: str, model: nn.Module) -> Exchange:
    """Prepare a model; every rank calls it.

    Args:
        settings: of the training; presets use the density, transport, and the like.
        name: "dense" (plain DDP), "fp16" or "powersgd" (PyTorch's hooks), a preset, or a scheme of
            averaging.
        model: of this rank.
    """
    if name in SCHEMES:
        return Averaged(settings, name, model)
    if name in ("dense", "fp16") and settings.space != "local":
        return Allreduced(model, half=name == "fp16")
    if name == "powersgd":
        return PowerSgd(model)
    if settings.space == "local":
        return _Local(settings, model, name)
    if settings.space in ("update", "frozen", "refreshed"):
        return _Updates(settings, model, name)
    return Attached(settings, name, model)


@final
class _Updates(Exchange):
    """``UpdateSpaceSGD`` or ``UpdateSpaceAdamW``."""

    counted = "ledger"
    sparse = True

    def __init__(self, settings: TrainSettings, model: nn.Module, name: str) -> None:
        self.model, self.settings, self.name = model, settings, name
        self.comm = connect(
            settings.timeout, transport=settings.transport, curve_keys=settings.curve_keys
        )
        self.transport = transport_of(self.comm)

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

    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""
        return self.comm.ledger.last_step.sent

    def close(self) -> None:
        """Close the connection."""
        self.comm.close()


@final
class _Local(Exchange):
    """``LocalUpdates``: local steps, and an exchange of what they did."""

    counted = "ledger"
    sparse = True

    def __init__(self, settings: TrainSettings, model: nn.Module, name: str) -> None:
        self.model = model
        self.comm = connect(
            settings.timeout, transport=settings.transport, curve_keys=settings.curve_keys
        )
        self.transport = transport_of(self.comm)
        self.local = LocalUpdates(
            model,
            name,
            density=settings.density,
            period=settings.period,
            warmup_steps=settings.warmup_steps,
            comm=self.comm,
        )
        self._exchanges = 0

    def make_optimizer(self, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build the optimizer."""
        if settings.optimizer == "sgd":
            return settings.make_optimizer(self.model)
        return LocalAdamW(
            self.model.parameters(),
            dist.get_world_size(),
            lr=settings.learning_rate,
            weight_decay=settings.decay,
        )

    def after_step(self) -> None:
        """Exchange, if it is time."""
        self.local.step()

    def bytes_sent(self) -> int:
        """Return what this rank sent in the step that has just ended."""
        before, self._exchanges = self._exchanges, self.local.reducer.step
        if self._exchanges == before:
            return 0
        if self.local.reducer.algorithm.name == "dense":  # native: its ledger has the same number
            return dense_bytes_per_step(
                sum(p.numel() for p in self.model.parameters()), dist.get_world_size()
            )
        return self.comm.ledger.last_step.sent

    def finish(self) -> int:
        """Deliver what is left, dense, once."""
        before = self.comm.ledger.total().sent
        self.local.finish()
        return self.comm.ledger.total().sent - before

    def close(self) -> None:
        """Close the connection."""
        self.comm.close()
