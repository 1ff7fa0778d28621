"""The seam of workloads: a model, the batches of every rank, what is held out, settings that suit it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PADDING", "Defaults", "Evaluation", "Workload", "is_hidden_matrix"]

PADDING = -100  # a target that is none: it counts in no loss (torch's own ``ignore_index``)


@dataclass(frozen=True)
class Defaults:
    """Settings that suit a workload, unless others are given (ours: dense's best of three or more).

    Attributes:
        sgd_lr: learning rate of SGD with momentum 0.9.
        adam_lr: learning rate of Adam and AdamW.
        batch_size: samples (windows, images) per rank and step.
        clip: largest 2-norm of the averaged gradient; None: any.
    """

    sgd_lr: float
    adam_lr: float
    batch_size: int
    clip: float | None = None

    def lr(self, optimizer: str) -> float:
        """Return the learning rate of "sgd", "adam" or "adamw"."""
        return self.sgd_lr if optimizer == "sgd" else self.adam_lr


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out targets; shares of ranks are added up.

    Attributes:
        loss_sum: cross entropy in nats, summed.
        hits: targets that the model found most probable.
        count: how many targets there are.

    Example:
        >>> whole = Evaluation.total([Evaluation(3.0, 4, 5), Evaluation(1.0, 5, 5)])
        >>> whole.loss, whole.accuracy
        (0.4, 0.9)
    """

    loss_sum: float = 0.0
    hits: int = 0
    count: int = 0

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float:
        """Fraction of targets that were found."""
        return self.hits / self.count

    @staticmethod
    def total(shares: Iterable[Evaluation]) -> Evaluation:
        """Add shares up, in their order."""
        shares = list(shares)
        return Evaluation(
            sum(share.loss_sum for share in shares),
            sum(share.hits for share in shares),
            sum(share.count for share in shares),
        )


class Workload(ABC):
    """What ``sparsync train`` trains.  Light until data is asked for; fields of a subclass are options.

    The model returns logits `[batch, ..., classes]`; the loss is the mean cross entropy.  Targets that
    are ``PADDING`` count for nothing.

    Attributes:
        name: on the command line.
        target: what a loss is per: "byte" or "image".
        classifies: its accuracy is of interest.
        defaults: settings that suit it.
    """

    name: ClassVar[str]
    target: ClassVar[str]
    classifies: ClassVar[bool]
    defaults: ClassVar[Defaults]

    @abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """Build the model; the same seed gives the same weights."""

    @abstractmethod
    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return a rank's inputs and targets of a step: a function of the arguments and nothing else."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets to evaluate on, whatever the seed."""

    @final
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per target."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=PADDING)

    @final
    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, *, rank: int = 0, world_size: int = 1, batch_size: int = 32
    ) -> Evaluation:
        """Evaluate a model on a rank's share of what is held out; by default on all of it."""
        inputs, targets = (part[rank::world_size] for part in self.held_out())
        loss_sum, hits = 0.0, 0
        for start in range(0, len(inputs), batch_size):
            part = slice(start, start + batch_size)
            logits, expected = model(inputs[part]).flatten(0, -2), targets[part].flatten()
            loss_sum += F.cross_entropy(
                logits, expected, reduction="sum", ignore_index=PADDING
            ).item()
            hits += int((logits.argmax(-1) == expected).sum())
        return Evaluation(loss_sum, hits, int((targets != PADDING).sum()))


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Tell weights inside a model from its embeddings, its output layer ("head"), norms and biases.

    Their gradients are spread evenly, as a selection of k from every block supposes; those of
    embeddings and of the output layer lie in the rows of a few bytes.
    """
    return parameter.dim() >= 2 and "embedding" not in name and not name.startswith("head.")
