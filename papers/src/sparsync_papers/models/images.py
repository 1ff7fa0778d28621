"""Image classifiers: AlexNet, VGG-16, and the parts that residual networks share with them.

``width`` is the number of channels of the first stage, to which all others are proportional.
"""

from __future__ import annotations

from torch import Tensor, nn

# of VGG: channels in multiples of the width, convolutions
_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))


class ImageClassifier(nn.Module):
    """Features of an image, then one fully connected layer that gives the logits of the classes."""

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head
        he_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]` for images `[batch, 3, height, width]`, ``float32``."""
        logits: Tensor = self.head(self.features(images))
        return logits


def he_(module: nn.Module) -> None:
    """Initialise the weights in place, for ReLUs.

    Convolutions: normal, variance 2 / (outputs that a number has a part in) (He et al. 2015).  Fully
    connected layers: normal, 0.01.  Their biases: 0.  Norms: 1 and 0 (torch's own).

    References: He et al., `Delving Deep into Rectifiers <https://arxiv.org/abs/1502.01852>`_, 2015;
    Goyal et al., `Accurate, Large Minibatch SGD <https://arxiv.org/abs/1706.02677>`_, 2017.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def alexnet(
    *, width: int = 64, hidden: int = 4096, classes: int = 1000, dropout: float = 0.5
) -> ImageClassifier:
    """Build the AlexNet of RedSync (Table 1, "233 MB"): 61,100,840 parameters are 233 MiB.

    Images `[batch, 3, 224, 224]`, ``float32``, to logits `[batch, classes]`; other sizes from 63 on
    are averaged to the 6x6 that the fully connected layers want.

    Free choices: one column, without response normalisation (Krizhevsky 2014), as usual in PyTorch,
    with which RedSync trained.  The size allows the two columns of 2012 too (60,965,224 parameters).
    Initial weights: ``he_``.

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


def vgg16_cifar10(*, width: int = 64, classes: int = 10) -> ImageClassifier:
    """Build the VGG-16 of Ok-Topk (Table 2) and RedSync (Table 1): 14,728,266 parameters.

    Images `[batch, 3, 32, 32]`, ``float32``, to logits `[batch, classes]`.

    Free choices: convolutions have biases and are batch-normalised; one fully connected layer.  Both
    papers' figures ask for exactly this.  Initial weights: ``he_``.

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
