"""The interface of workloads: a model, every rank's batches, held-out samples, and default settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.errors import ConfigurationError

__all__ = [
    "PADDING",
    "Batch",
    "CrossEntropy",
    "Defaults",
    "Draw",
    "Evaluation",
    "Objective",
    "Tensors",
    "Workload",
    "is_hidden_matrix",
    "mean",
    "outputs_of",
]

Tensors: TypeAlias = "Tensor | tuple[Tensor, ...]"
Batch: TypeAlias = "tuple[Tensors, Tensors]"  # inputs and targets

# marks a position without a target, which losses ignore (torch's default ``ignore_index``)
PADDING = -100


@dataclass(frozen=True)
class Defaults:
    """Default settings of a workload.

    The papers' workloads take their settings from the papers.  For all other workloads, at least
    three settings were tried with dense, and these were the best.
    """

    sgd_lr: float  # learning rate of SGD with momentum 0.9
    adam_lr: float  # learning rate of Adam and AdamW
    batch_size: int  # samples (windows, images) per rank and step
    clip: float | None = None  # largest 2-norm of the averaged gradient; None: no limit
    optimizer: str = "sgd"  # "sgd", "adam" or "adamw"
    weight_decay: float = 0.0  # weight decay of sgd


@dataclass(frozen=True)
class Draw:
    """All values that determine a rank's batch at a step.

    Example:
        >>> sorted(Draw(seed=0, step=0, rank=1, world_size=2, batch_size=4).samples(8).tolist())
        [1, 3, 5, 7]
    """

    seed: int
    step: int
    rank: int
    world_size: int
    batch_size: int

    def generator(self) -> np.random.Generator:
        """Return the generator for all random choices in the batch."""
        return np.random.default_rng([self.seed, self.step, self.rank])

    def samples(self, count: int) -> Tensor:
        """Return the indices of the batch's samples among ``count``, `[batch_size]`.

        Each rank owns every ``world_size``-th sample, and reshuffles its samples in each epoch; a batch
        may span several epochs.

        Raises:
            ConfigurationError: this rank has no sample.

        Cost: a permutation of the rank's share.
        """
        shard = np.arange(self.rank, count, self.world_size)
        if not len(shard):
            raise ConfigurationError(
                f"{self.world_size} ranks share {count} training samples: rank {self.rank} has none; "
                f"use at most {count} ranks"
            )
        epoch, start = divmod(self.step * self.batch_size, len(shard))
        stop = start + self.batch_size
        epochs = range(epoch, epoch + -(-stop // len(shard)))
        order = [
            np.random.default_rng([self.seed, e, self.rank]).permutation(shard) for e in epochs
        ]
        return torch.from_numpy(np.concatenate(order)[start:stop])


# ---- evaluation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out targets; sums over disjoint shares add up to the sums over all targets.

    Example:
        >>> whole = Evaluation.total([Evaluation(3.0, 4, 5), Evaluation(1.0, 5, 5)])
        >>> whole.loss, whole.accuracy
        (0.4, 0.9)
    """

    loss_sum: float = 0.0  # cross entropy in nats, or another loss
    hits: int = 0  # targets to which the model gave the highest probability
    count: int = 0  # number of targets
    # further sums, from which ``Objective.figures`` computes its figures
    more: Counter[str] = field(default_factory=Counter)

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float:
        """Fraction of targets that were predicted correctly."""
        return self.hits / self.count

    @staticmethod
    def total(shares: Iterable[Evaluation]) -> Evaluation:
        """Add up the evaluations of disjoint shares, in the given order."""
        loss, hits, count, more = 0.0, 0, 0, Counter[str]()
        for share in shares:
            loss, hits, count = loss + share.loss_sum, hits + share.hits, count + share.count
            more.update(share.more)
        return Evaluation(loss, hits, count, more)


def mean(total: float, count: int) -> float:
    """Return ``total / count``, or NaN if the count is 0."""
    return total / count if count else math.nan


def outputs_of(model: nn.Module, inputs: Tensors) -> Tensors:
    """Run a model and return its outputs; several inputs become positional arguments."""
    outputs: Tensors = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return outputs


class Objective(ABC):
    """The loss that a model is trained on, and its evaluation."""

    @abstractmethod
    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """Evaluate a held-out batch; no gradient is recorded, and dropout is off."""

    def figures(self, whole: Evaluation) -> dict[str, float]:
        """Return further figures for the held-out samples, by name; NaN if there are no samples."""
        return {}


@final
@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Mean cross entropy in nats of logits `[batch, ..., classes]`; ``PADDING`` is ignored."""

    # if given, also report how many targets are among this many most probable classes, e.g. "top-5"
    top: int | None = None
    perplexity: bool = False  # also report the perplexity
    smoothing: float = 0.0  # smoothing of the labels in training (Szegedy et al. 2016, section 7)

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
        """Evaluate the outputs of a model."""
        logits, expected = _flat(outputs, targets)
        loss = F.cross_entropy(logits, expected, reduction="sum", ignore_index=PADDING).item()
        hits = int((logits.argmax(-1) == expected).sum())
        count = int((expected != PADDING).sum())
        best = logits.topk(min(self.top or 1, logits.shape[-1]), dim=-1).indices
        among = int((best == expected[:, None]).sum())
        return Evaluation(loss, hits, count, Counter(top=among))

    def figures(self, whole: Evaluation) -> dict[str, float]:
        """See ``Objective``."""
        found = (
            {} if self.top is None else {f"top-{self.top}": mean(whole.more["top"], whole.count)}
        )
        if self.perplexity:
            nats = mean(whole.loss_sum, whole.count)
            # e^710 exceeds the largest float64
            found["perplexity"] = math.inf if nats > 700 else math.exp(nats)
        return found


def _flat(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    assert isinstance(outputs, Tensor) and isinstance(targets, Tensor), "of one tensor each"
    return outputs.flatten(0, -2), targets.flatten()


class Workload(ABC):
    """A model and its data.  Data is loaded on first use; fields of a subclass are options."""

    name: ClassVar[str]  # name on the command line
    target: ClassVar[str]  # unit of the loss: "byte" or "image"
    classifies: ClassVar[bool]  # whether to report the accuracy
    defaults: ClassVar[Defaults]
    reads_folder: ClassVar[bool] = False  # whether its data is in a folder, given by ``data``

    @property
    def objective(self) -> Objective:
        """The loss and the metrics to evaluate; cross-entropy by default."""
        return CrossEntropy()

    @abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """Build the model; the same seed gives the same weights."""

    @abstractmethod
    def batch(self, draw: Draw) -> Batch:
        """Return a rank's inputs and targets for one step; they depend only on ``draw``."""

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the held-out inputs and targets, if they are two tensors."""
        raise NotImplementedError

    def held_out_batches(self, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Yield a rank's share of the held-out samples, in batches; the seed has no influence on it.

        By default, the samples are those of ``held_out``.
        """
        inputs, targets = (part[rank::world_size] for part in self.held_out())
        for start in range(0, len(inputs), batch_size):
            part = slice(start, start + batch_size)
            yield inputs[part], targets[part]

    @final
    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Return the mean loss of the model's outputs for a batch."""
        return self.objective.loss(outputs, targets)

    @final
    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, *, rank: int = 0, world_size: int = 1, batch_size: int = 32
    ) -> Evaluation:
        """Evaluate a model on a rank's share of the held-out samples; by default, on all of them."""
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


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a weight matrix other than an embedding or the output layer ("head").

    Selecting k entries of every block assumes that large entries are spread evenly, as they are in the
    gradients of such matrices.  In embeddings and the output layer, they concentrate in the rows of a
    few bytes.
    """
    return parameter.dim() >= 2 and "embedding" not in name and not name.startswith("head.")
