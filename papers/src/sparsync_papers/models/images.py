"""Image classifiers: AlexNet, VGG-16 and residual networks.

They map images `[batch, 3, height, width]`, ``float32``, to logits `[batch, classes]`.  Images
have 32 x 32 pixels for CIFAR-10 and 224 x 224 for ImageNet. Networks for ImageNet also accept other
sizes, because they pool the features to the size that their last layers need. ``width`` is the
number of channels of the first stage; the other stages scale with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

# (channels as a multiple of the width, number of convolutions) for each stage of VGG
_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))


class ImageClassifier(nn.Module):
    """A network that extracts an image's features, and a fully connected layer that classifies them."""

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
    """Initialise the weights in place, in the way that suits ReLUs.

    The weights of convolutions are normal with variance 2 / (number of outputs to which an input
    contributes) (He et al. 2015). The weights of fully connected layers are normal with standard
    deviation 0.01, and their biases are 0. Normalisation layers have weight 1 and bias 0, as in
    torch.

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
    """Build the AlexNet of RedSync (Table 1, "233 MB") with 61,100,840 parameters, i.e. 233 MiB.

    Images must have at least 63 x 63 pixels.

    Free choices: the network has one column and no response normalisation (Krizhevsky 2014). This
    is the usual form in PyTorch, which RedSync used. The two-column network of 2012 (60,965,224
    parameters) would also have the stated size.

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

    Free choices: convolutions have biases and are followed by batch normalisation, and there is one
    fully connected layer. Only these choices give both papers' parameter counts.

    References: Simonyan & Zisserman, `Very Deep Convolutional Networks for Large-Scale Image
    Recognition <https://arxiv.org/abs/1409.1556>`_, 2014.
    """
    features = nn.Sequential(*_convolutions(width, normalised=True), nn.Flatten())
    return ImageClassifier(features, nn.Linear(8 * width, classes))


def vgg16_imagenet(
    *, width: int = 64, hidden: int = 4096, classes: int = 1000, dropout: float = 0.5
) -> ImageClassifier:
    """Build the VGG-16 of RedSync (Table 1, "528 MB") with 138,357,544 parameters, i.e. 528 MiB.

    Free choices: there is no batch normalisation, as in the VGG paper.

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


class _Residual(nn.Module):
    """A block ``relu(body(x) + shortcut(x))``; the body is two 3x3 convolutions or a bottleneck."""

    def __init__(self, before: int, width: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        parts = (
            (
                _convolution(before, width, 1),
                _convolution(width, width, 3, stride=stride),
                _convolution(width, after, 1),
            )
            if bottleneck
            else (_convolution(before, width, 3, stride=stride), _convolution(width, width, 3))
        )
        body = [layer for part in parts for layer in (*part, nn.ReLU())]
        self.body = nn.Sequential(*body[:-1])  # the last ReLU follows the sum
        self.shortcut = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(*_convolution(before, after, 1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; it changes the number of channels and divides the image size by its stride."""
        return F.relu(self.body(x) + self.shortcut(x))


def _stages(width: int, depths: Sequence[int], *, bottleneck: bool = False) -> nn.Sequential:
    """Build all blocks; each stage after the first doubles the width and halves the image size."""
    blocks, before = [], width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            blocks.append(_Residual(before, inner, stride=stride, bottleneck=bottleneck))
            before = 4 * inner if bottleneck else inner
    return nn.Sequential(*blocks)


def resnet20_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-20 of SparCML's Figure 1, with 272,474 parameters; see ``resnet44_cifar10``."""
    return _cifar(3, width, classes)


def resnet44_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-44 of RedSync (Table 1, "2.65 MB"): 661,338 parameters.

    Free choices: shortcuts are projections where the width changes (option B of He et al., section
    4.1). With parameter-free shortcuts (option A), the size would be 2.63 MB.

    References: He et al., `Deep Residual Learning for Image Recognition
    <https://arxiv.org/abs/1512.03385>`_, 2015, section 4.2.
    """
    return _cifar(7, width, classes)


def resnet110_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-110 of SparCML's Figure 4: 1,730,714 parameters; see ``resnet44_cifar10``."""
    return _cifar(18, width, classes)


def resnet50(*, width: int = 64, classes: int = 1001) -> ImageClassifier:
    """Build the ResNet-50 of WAGMA (section 5.2): 25,559,081 parameters.

    It is also the ResNet-50 of RedSync (Table 1: "103 MB"; here 102.2, or 102.4 with the statistics
    of batch normalisation) and SparCML (section 8.4: "approximately 25 million").

    Free choices: there are 1,001 classes, including "background" (the first or last class, which is
    never a target), as is usual in TensorFlow. Only this gives WAGMA's parameter count; with
    ``classes=1000``, there are 25,557,032 parameters. A bottleneck that halves the image size does
    so in its 3x3 convolution.

    References: see ``resnet44_cifar10``.
    """
    return _imagenet((3, 4, 6, 3), width, classes, bottleneck=True)


def resnet18x4(*, width: int = 256, classes: int = 1000) -> ImageClassifier:
    """Build the 4xResNet18 of SparCML (section 8.4): 180,645,096 parameters.

    All layers, including the first convolution, are four times as wide as in ResNet-18. The last
    layer, with 2,048 features and 1,000 classes, contains the paper's "more than 2M" parameters.

    Free choices: there are 1,000 classes, as in ImageNet-1K (Table 3; the text mentions 11K once).

    References: Zagoruyko & Komodakis, `Wide Residual Networks <https://arxiv.org/abs/1605.07146>`_,
    2016.
    """
    return _imagenet((2, 2, 2, 2), width, classes, bottleneck=False)


def resnet34x4(*, width: int = 256, classes: int = 1000) -> ImageClassifier:
    """Build the 4xResNet34 of SparCML (section 8.4): 342,286,568 parameters; see ``resnet18x4``."""
    return _imagenet((3, 4, 6, 3), width, classes, bottleneck=False)


def _convolution(
    before: int, after: int, kernel: int, *, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(after)


def _classifier(stem: nn.Module, stages: nn.Module, features: int, classes: int) -> ImageClassifier:
    pooled = nn.Sequential(stem, stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return ImageClassifier(pooled, nn.Linear(features, classes))


def _cifar(depth: int, width: int, classes: int) -> ImageClassifier:
    stem = nn.Sequential(*_convolution(3, width, 3), nn.ReLU())
    stages = _stages(width, (depth,) * 3)
    return _classifier(stem, stages, 4 * width, classes)


def _imagenet(
    depths: Sequence[int], width: int, classes: int, *, bottleneck: bool
) -> ImageClassifier:
    first = _convolution(3, width, 7, stride=2)
    stem = nn.Sequential(*first, nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    stages = _stages(width, depths, bottleneck=bottleneck)
    return _classifier(stem, stages, (32 if bottleneck else 8) * width, classes)
