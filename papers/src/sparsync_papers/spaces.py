"""Values that this package adds to ``sparsync train --space``: updates, and local progress."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import nn

from sparsync.algorithm import Algorithm
from sparsync.cli.train.exchanges import Exchange
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync.updates import OuterAverager
from sparsync_papers.baseline_optimizers import (
    LocalAdamW,
    SecondMoment,
    UpdateSpaceAdamW,
    UpdateSpaceSGD,
)

__all__ = ["Local", "Updates"]


@final
class Updates(Exchange):
    """Exchanges updates with ``UpdateSpaceSGD`` or ``UpdateSpaceAdamW``."""

    def __init__(self, settings: TrainSettings, algorithm: Algorithm, model: nn.Module) -> None:
        lr, comm = settings.lr, settings.connect()
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "sgd":
            if settings.momentum or settings.weight_decay or settings.warmup_steps:
                raise ConfigurationError(
                    "--space update with sgd is Ok-Topk's Algorithm 2: plain SGD; add --momentum 0"
                )
            optimizer = UpdateSpaceSGD(model, lr, algorithm, density=settings.density, comm=comm)
        else:
            moments: dict[str, SecondMoment] = {"frozen": "frozen", "refreshed": "refreshed"}
            optimizer = UpdateSpaceAdamW(
                model,
                lr,
                algorithm,
                weight_decay=settings.weight_decay,
                second_moment=moments.get(settings.space, "local"),
                warmup_steps=settings.warmup_steps,
                density=settings.density,
                comm=comm,
            )
        super().__init__(model, [optimizer], comm, sparse=True, close=comm.close)


@final
class Local(Exchange):
    """Exchanges each rank's local progress with ``OuterAverager``; the weights keep the residual."""

    def __init__(self, settings: TrainSettings, algorithm: Algorithm, model: nn.Module) -> None:
        comm, decay = settings.connect(), settings.weight_decay
        given = {n: getattr(settings, n) for n in ("density", "period", "warmup_steps")}
        given |= {"residual": "weights", "buffers": "local"}
        outer = OuterAverager(model, algorithm=algorithm, comm=comm, **given)
        optimizers = settings.make_optimizers(model)
        if settings.optimizer != "sgd":
            ranks = dist.get_world_size()
            optimizers = [LocalAdamW(model.parameters(), ranks, lr=settings.lr, weight_decay=decay)]
        super().__init__(model, optimizers, comm, sparse=True, close=comm.close)
        self.after_step, self.finish = outer.step, outer.finish
