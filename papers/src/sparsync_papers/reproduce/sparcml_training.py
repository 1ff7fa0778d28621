"""Compare quantised top-k SGD with dense on models that train in a minute (SparCML, Figures 4 to 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from sparsync.cli.workloads.workload import Evaluation
from sparsync.presets import resolve
from sparsync.published.sparcml import sparcml
from sparsync_papers.reproduce import Comparison, Outcome, Row, Settings, artifact
from sparsync_papers.reproduce.one_process import (
    RANKS,
    Choice,
    Recipe,
    SimulatedTraining,
    Trained,
    Way,
    digits_recipe,
    learning_curves,
    lstm_recipe,
    text_recipe,
    train_all,
)

_BLOCK = 512  # size of the blocks; k elements are selected from each one (section 8.3)
_STEPS = 600
_TUNING_STEPS = 300  # Figure 6: steps of dense training, then as many with each method
_WIDE_STEPS = 1500  # Figure 5, where an entry waits about 500 steps to be sent
_LARGE = 4096  # smallest number of elements of a compressed layer; these models' layers are small
_LEARNT = 0.5  # below this accuracy, there is nothing to compare
_NOISE = 0.02  # difference in accuracy between seeds, on 359 images
_WIDE_HIDDEN = 1024  # hidden units; four times as many as usual, like 4xResNet compared with ResNet


_FULL = Way(resolve("dense"))


def _large(name: str, parameter: Tensor) -> bool:
    return parameter.numel() >= _LARGE


def _attention(name: str, parameter: Tensor) -> bool:
    return "attention" in name and parameter.dim() > 1


def _topk(entries: int, bits: Literal[2, 4, 8] | None = None, compress: Choice = _large) -> Way:
    """Return quantised top-k with this many entries per block."""
    return Way(sparcml(bits=bits), entries / _BLOCK, compress)


def _outcome(
    settings: Settings,
    models: Sequence[tuple[Recipe, dict[str, Trained]]],
    comparisons: Sequence[Comparison],
    steps: int,
    more: str = "",
) -> Outcome:
    """Collect all training runs in one table, and plot one panel per model."""
    rows: list[Row] = [
        {
            "model": recipe.name,
            "variant": name,
            "held-out loss": run.evaluation.loss,
            "accuracy, %": 100 * run.evaluation.accuracy,
            "bytes per step": run.bytes_sent,
            "of dense": run.bytes_sent / found["dense"].bytes_sent,
        }
        for recipe, found in models
        for name, run in found.items()
    ]
    ranks = settings.pick(RANKS, 2)
    return Outcome(
        rows,
        comparisons,
        {
            "steps": steps,
            "seeds": len(settings.seeds_or(1)),
            "ranks": ranks,
            "optimizer": "SGD, momentum 0.9",
        },
        f"Models and data of this size, {steps} steps, {ranks} virtual ranks; layers below 4,096 "
        "elements are exchanged whole; all learning rates are dense's and fall linearly, not by "
        f"factors of 10 (appendix D). {more}".strip(),
        [learning_curves(recipe, found) for recipe, found in models],
    )


@artifact(
    "sparcml-fig4",
    "sparse and quantised training ends at the same quality as full precision",
    minutes=3.5,
    steps=_STEPS,
    repeats=True,
)
def figure_4(settings: Settings) -> Outcome:
    """Accuracy of quantised top-k SGD against dense (CIFAR-10, ATIS)."""
    images, text = digits_recipe(), lstm_recipe()
    steps = settings.steps_or(_STEPS, 3)
    ways = {"dense": _FULL, "16 of 512, 4 bits": _topk(16, 4), "8 of 512, 4 bits": _topk(8, 4)}
    text_ways = {"dense": _FULL, "2 of 512": _topk(2)}
    trainings = len(ways) + len(text_ways)
    first = train_all(images, ways, settings, steps, trainings=trainings)
    second = train_all(text, text_ways, settings, steps, trainings=trainings)
    base, *others = (run.evaluation.accuracy for run in first.values())
    loss, sparse = (run.evaluation.loss for run in second.values())
    comparisons = []
    for entries, says, other in zip(
        (16, 8), ("matches full precision", "1 % above full precision"), others, strict=True
    ):
        comparisons.append(
            Comparison(
                f"accuracy, {entries} of 512 at 4 bits",
                says,
                "section 8.3",
                f"{100 * (other - base):+.1f} points",
                base > _LEARNT and other >= base - _NOISE,
                f"{steps} steps are too few for entries that are sent so rarely",
            )
        )
    comparisons.append(
        Comparison(
            "loss, 2 of 512",
            "within 1 % of full precision",
            "section 8.3, ATIS",
            f"{100 * (sparse / loss - 1):+.1f} %",
            sparse <= 1.01 * loss,
            f"0.4 % of the gradient over {steps} steps, not 20 epochs to convergence",
        )
    )
    return _outcome(settings, [(images, first), (text, second)], comparisons, steps)


@artifact(
    "sparcml-fig5",
    "a wide network loses less than a point of accuracy, and learns faster at first",
    minutes=2.0,
    steps=_WIDE_STEPS,
    repeats=True,
)
def figure_5(settings: Settings) -> Outcome:
    """Wide network at 1 of 512 entries against dense (ImageNet)."""
    recipe, steps = digits_recipe(hidden=_WIDE_HIDDEN), settings.steps_or(_WIDE_STEPS, 3)
    ways = {"dense": _FULL, "1 of 512": _topk(1)}
    found = train_all(recipe, ways, settings, steps)
    whole, sparse = found.values()
    lower = whole.evaluation.accuracy - sparse.evaluation.accuracy
    third = max(len(whole.losses) // 3, 1)
    early = sum(sparse.losses[:third]) < sum(whole.losses[:third])
    comparisons = [
        Comparison(
            "top-1 accuracy, 1 of 512",
            "less than 0.9 % lower",
            "section 8.4",
            f"{100 * lower:.1f} points lower",
            whole.evaluation.accuracy > _LEARNT and lower < 0.009,
            f"0.2 % of the gradient over {steps} steps: most is still in the residuals",
        ),
        Comparison(
            "loss early in training, 1 of 512",
            '"the faster loss reduction of TopK"',
            "section 8.4",
            f"{'faster' if early else 'slower'} over the first third of the steps",
            early,
            "entries wait about 500 steps to be sent, so training starts later than with dense",
        ),
    ]
    more = "The times (2 x) need its GPUs."
    return _outcome(settings, [(recipe, found)], comparisons, steps, more)


@artifact(
    "sparcml-fig6",
    "errors are less than 1 % higher than in full precision",
    minutes=1.5,
    steps=_TUNING_STEPS,
    repeats=True,
)
def figure_6(settings: Settings) -> Outcome:
    """Top-k of the attention layers alone, from a trained model (speech)."""
    recipe, steps = text_recipe(), settings.steps_or(_TUNING_STEPS, 3)
    starts: list[Evaluation] = []

    def trained(seed: int) -> nn.Module:
        """Train a model with the dense exchange; return it."""
        training = SimulatedTraining(
            recipe,
            resolve("dense"),
            ranks=settings.pick(RANKS, 2),
            density=1.0,
            steps=steps,
            seed=seed,
        )
        starts.append(training.run().evaluation)
        return training.model

    ways = {"dense": _FULL, "4 of 512, attention": _topk(4, compress=_attention)}
    found = train_all(recipe, ways, settings, steps, initial=trained)
    whole, sparse = (1 - run.evaluation.accuracy for run in found.values())
    comparison = Comparison(
        "error, 4 of 512, attention alone",
        "less than 1 % higher",
        "section 8.4",
        f"{100 * (sparse / whole - 1):+.2f} %",
        sparse <= 1.01 * whole,
        "attention is a fourth of this model's weights, 4 % of the paper's",
    )
    more = (
        f"Both start from a model after {steps} dense steps (held-out loss "
        f"{Evaluation.total(starts).loss:.3f}). Error: bytes that the model does not find most "
        "probable, not words; times and scaling (6b) need its GPUs."
    )
    return _outcome(settings, [(recipe, found)], [comparison], steps, more)
