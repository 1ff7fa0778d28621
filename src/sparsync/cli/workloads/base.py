"""The seam of workloads: a model, the batches of every rank, held-out samples, and default settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.metrics import Mean, Metric, Perplexity, top_hits

__all__ = [
    "PADDING",
    "Batch",
    "CrossEntropy",
    "Defaults",
    "Evaluation",
    "HeldInMemory",
    "Objective",
    "Tensors",
    "Workload",
    "is_hidden_matrix",
    "outputs_of",
]

Tensors: TypeAlias = "Tensor | tuple[Tensor, ...]"
Batch: TypeAlias = "tuple[Tensors, Tensors]"  # inputs and targets

PADDING = -100  # a target that is none: it counts in no loss (torch's own ``ignore_index``)


@dataclass(frozen=True)
class Defaults:
    """Settings that suit a workload, unless others are given.

    Those of the papers' workloads are the papers'; the others are dense's best of three or more.

    Attributes:
        sgd_lr: learning rate of SGD with momentum 0.9.
        adam_lr: learning rate of Adam and AdamW.
        batch_size: samples (windows, images) per rank and step.
        clip: largest 2-norm of the averaged gradient; None: any.
        optimizer: "sgd", "adam" or "adamw".
        weight_decay: of sgd.
    """

    sgd_lr: float
    adam_lr: float
    batch_size: int
    clip: float | None = None
    optimizer: str = "sgd"
    weight_decay: float = 0.0

    def lr(self, optimizer: str) -> float:
        """Return the learning rate of "sgd", "adam" or "adamw"."""
        return self.sgd_lr if optimizer == "sgd" else self.adam_lr


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out targets; shares of ranks are added up.

    Attributes:
        loss_sum: cross entropy in nats, or another loss, summed.
        hits: targets that the model found most probable.
        count: how many targets there are.
        metrics: further sums, by name; a share without samples may have none.

    Example:
        >>> whole = Evaluation.total([Evaluation(3.0, 4, 5), Evaluation(1.0, 5, 5)])
        >>> whole.loss, whole.accuracy
        (0.4, 0.9)
    """

    loss_sum: float = 0.0
    hits: int = 0
    count: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)

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
        metrics: dict[str, Metric] = {}
        for share in shares:
            for name, metric in share.metrics.items():
                metrics[name] = metrics[name] + metric if name in metrics else metric
        return Evaluation(
            sum(share.loss_sum for share in shares),
            sum(share.hits for share in shares),
            sum(share.count for share in shares),
            metrics,
        )


def outputs_of(model: nn.Module, inputs: Tensors) -> Tensors:
    """Run a model; several inputs are its positional arguments."""
    outputs: Tensors = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return outputs


class Objective(ABC):
    """The loss that a model is trained for, and its evaluation."""

    @abstractmethod
    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """Evaluate a held-out batch; no gradient is recorded, and dropout is off."""


@final
@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Mean cross entropy in nats of logits `[batch, ..., classes]`; ``PADDING`` counts for nothing.

    Attributes:
        top: count also the targets among this many most probable ones, e.g. "top-5".
        perplexity: report it too.
        smoothing: of the labels, while training (Szegedy et al. 2016, section 7).
    """

    top: int | None = None
    perplexity: bool = False
    smoothing: float = 0.0

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        logits, expected = _flat(outputs, targets)
        return F.cross_entropy(
            logits, expected, ignore_index=PADDING, label_smoothing=self.smoothing
        )

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``."""
        return self.judge_outputs(outputs_of(model, inputs), targets)

    def judge_outputs(self, outputs: Tensors, targets: Tensors) -> Evaluation:
        """Evaluate what a model has returned."""
        logits, expected = _flat(outputs, targets)
        loss = F.cross_entropy(logits, expected, reduction="sum", ignore_index=PADDING).item()
        hits = int((logits.argmax(-1) == expected).sum())
        count = int((expected != PADDING).sum())
        metrics: dict[str, Metric] = {}
        if self.top is not None:
            metrics[f"top-{self.top}"] = Mean(top_hits(logits, expected, self.top), count)
        if self.perplexity:
            metrics["perplexity"] = Perplexity(loss, count)
        return Evaluation(loss, hits, count, metrics)


def _flat(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, tuple) or isinstance(targets, tuple):
        raise TypeError("cross entropy is of one tensor of logits, and one of targets")
    return outputs.flatten(0, -2), targets.flatten()


class Workload(ABC):
    """A model and its data.  Light until data is asked for; fields of a subclass are options.

    Attributes:
        name: on the command line.
        target: what a loss is per: "byte" or "image".
        classifies: its accuracy is of interest.
        defaults: settings that suit it.
        reads_folder: its data lies in a folder, the option ``data``.
    """

    name: ClassVar[str]
    target: ClassVar[str]
    classifies: ClassVar[bool]
    defaults: ClassVar[Defaults]
    reads_folder: ClassVar[bool] = False

    @property
    def objective(self) -> Objective:
        """Its loss, and what is evaluated; unless a workload has another, the cross entropy."""
        return CrossEntropy()

    @abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """Build the model; the same seed gives the same weights."""

    @abstractmethod
    def batch(self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int) -> Batch:
        """Return a rank's inputs and targets of a step: a function of the arguments and nothing else."""

    @abstractmethod
    def held_out_batches(self, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Yield a rank's share of what to evaluate on, whatever the seed."""

    @final
    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Return the mean loss of what the model has returned for a batch."""
        return self.objective.loss(outputs, targets)

    @final
    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, *, rank: int = 0, world_size: int = 1, batch_size: int = 32
    ) -> Evaluation:
        """Evaluate a model on a rank's share of what is held out; by default on all of it."""
        training = model.training
        model.eval()
        try:
            return Evaluation.total(
                self.objective.judge(model, *batch)
                for batch in self.held_out_batches(
                    rank=rank, world_size=world_size, batch_size=batch_size
                )
            )
        finally:
            model.train(training)


class HeldInMemory(Workload):
    """A workload whose held-out samples are two tensors."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets to evaluate on, whatever the seed."""

    @final
    def held_out_batches(self, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """See ``Workload``."""
        inputs, targets = (part[rank::world_size] for part in self.held_out())
        for start in range(0, len(inputs), batch_size):
            part = slice(start, start + batch_size)
            yield inputs[part], targets[part]


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Tell weights inside a model from its embeddings, its output layer ("head"), norms and biases.

    Their gradients are spread evenly, as a selection of k from every block supposes; those of
    embeddings and of the output layer lie in the rows of a few bytes.
    """
    return parameter.dim() >= 2 and "embedding" not in name and not name.startswith("head.")
