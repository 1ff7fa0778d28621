"""VGG-16: with batch normalisation for CIFAR-10, as published for ImageNet."""

from __future__ import annotations

from torch import nn

from sparsync.workloads.models.images import ImageClassifier

__all__ = ["vgg16_cifar10", "vgg16_imagenet"]

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # (channels in multiples of width, convolutions)


def vgg16_cifar10(*, width: int = 64, classes: int = 10) -> ImageClassifier:
    """Build the VGG-16 of Ok-Topk (Table 2) and RedSync (Table 1): 14,728,266 parameters.

    Images `[batch, 3, 32, 32]`, ``float32``, to logits `[batch, classes]`.

    Free choices: convolutions have biases and are batch-normalised; one fully connected layer.  Both
    papers' figures ask for exactly this.  Initial weights: ``he_``.

    Args:
        width: channels of the first stage; the last has eight times as many.
        classes: how many there are.

    Example:
        >>> import torch
        >>> from sparsync.workloads.models.size import parameter_count
        >>> with torch.device("meta"):
        ...     parameter_count(vgg16_cifar10())
        14728266

    References: Simonyan & Zisserman, `Very Deep Convolutional Networks for Large-Scale Image
    Recognition <https://arxiv.org/abs/1409.1556>`_, 2014.
    """
    features = nn.Sequential(*_convolutions(width, normalised=True), nn.Flatten())
    return ImageClassifier(features, nn.Linear(8 * width, classes))


def vgg16_imagenet(
    *, width: int = 64, hidden: int = 4096, classes: int = 1000, dropout: float = 0.5
) -> ImageClassifier:
    """Build the VGG-16 of RedSync (Table 1, "528 MB"): 138,357,544 parameters are 528 MiB.

    Images `[batch, 3, 224, 224]`, ``float32``, to logits `[batch, classes]`; other sizes from 32 on
    are averaged to the 7x7 that the fully connected layers want.

    Free choices: no batch normalisation, as published.  Initial weights: ``he_``.

    Args:
        width: channels of the first stage; the last has eight times as many.
        hidden: units of each of the two hidden fully connected layers.
        classes: how many there are.
        dropout: share of hidden units that are left out in training (VGG, section 3.1).

    References: see ``vgg16_cifar10``.
    """
    features = nn.Sequential(
        *_convolutions(width, normalised=False),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(8 * width * 7 * 7, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return ImageClassifier(features, nn.Linear(hidden, classes))


def _convolutions(width: int, *, normalised: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = 3
    for times, convolutions in _STAGES:
        after = times * width
        for _ in range(convolutions):
            layers.append(nn.Conv2d(before, after, 3, padding=1))
            if normalised:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU())
            before = after
        layers.append(nn.MaxPool2d(2))
    return layers
