"""AlexNet in one column."""

from __future__ import annotations

from torch import nn

from sparsync.workloads.models.images import ImageClassifier

__all__ = ["alexnet"]


def alexnet(
    *, width: int = 64, hidden: int = 4096, classes: int = 1000, dropout: float = 0.5
) -> ImageClassifier:
    """Build the AlexNet of RedSync (Table 1, "233 MB"): 61,100,840 parameters are 233 MiB.

    Images `[batch, 3, 224, 224]`, ``float32``, to logits `[batch, classes]`; other sizes from 63 on
    are averaged to the 6x6 that the fully connected layers want.

    Free choices: one column, without response normalisation (Krizhevsky 2014), as usual in PyTorch,
    with which RedSync trained.  The size allows the two columns of 2012 too (60,965,224 parameters).
    Initial weights: ``he_``.

    Args:
        width: channels of the first convolution; the others have 3, 6, 4, 4 times as many.
        hidden: units of each of the two hidden fully connected layers.
        classes: how many there are.
        dropout: share of inputs of the hidden layers that are left out in training (as published).

    References: Krizhevsky, `One Weird Trick for Parallelizing Convolutional Neural Networks
    <https://arxiv.org/abs/1404.5997>`_, 2014.
    """
    features = nn.Sequential(
        nn.Conv2d(3, width, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(width, 3 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width * 6 * 6, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
    )
    return ImageClassifier(features, nn.Linear(hidden, classes))
