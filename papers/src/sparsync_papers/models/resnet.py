"""Residual networks: ResNet-20/44/110 for CIFAR-10, ResNet-50 and four times wide ones for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sparsync_papers.models.images import ImageClassifier


class _Residual(nn.Module):
    """``relu(body(x) + shortcut(x))``: two 3x3 convolutions, or a bottleneck of three.

    Args:
        before: channels that come in.
        width: channels of the 3x3 convolutions.
        stride: of the (first) 3x3 convolution, and of the shortcut.
        bottleneck: 1x1, 3x3 and 1x1 to ``4 * width`` channels.
    """

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
        self.body = nn.Sequential(*body[:-1])  # the last ReLU is that of the sum
        self.shortcut = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(*_convolution(before, after, 1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many images, with the channels and the stride of the block."""
        return F.relu(self.body(x) + self.shortcut(x))


def _stages(width: int, depths: Sequence[int], *, bottleneck: bool = False) -> nn.Sequential:
    """Build all blocks: each stage after the first doubles the width and halves the images."""
    blocks, before = [], width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            blocks.append(_Residual(before, inner, stride=stride, bottleneck=bottleneck))
            before = 4 * inner if bottleneck else inner
    return nn.Sequential(*blocks)


def resnet20_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-20 of SparCML's Figure 1: 272,474 parameters; see ``resnet44_cifar10``."""
    return _cifar(3, width, classes)


def resnet44_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-44 of RedSync (Table 1, "2.65 MB"): 661,338 parameters.

    Images `[batch, 3, 32, 32]`, ``float32``, to logits `[batch, classes]`.

    Free choices: projections where the width changes (option B of He et al., section 4.1): with
    shortcuts without parameters (option A) it is 2.63 MB.  Initial weights: ``he_``.

    References: He et al., `Deep Residual Learning for Image Recognition
    <https://arxiv.org/abs/1512.03385>`_, 2015, section 4.2.
    """
    return _cifar(7, width, classes)


def resnet110_cifar10(*, width: int = 16, classes: int = 10) -> ImageClassifier:
    """Build the ResNet-110 of SparCML's Figure 4: 1,730,714 parameters; see ``resnet44_cifar10``."""
    return _cifar(18, width, classes)


def resnet50(*, width: int = 64, classes: int = 1001) -> ImageClassifier:
    """Build the ResNet-50 of WAGMA (section 5.2): 25,559,081 parameters.

    Also of RedSync (Table 1: "103 MB"; 102.2, or 102.4 with what batch normalisation keeps) and SparCML
    (section 8.4: "approximately 25 million").  Images `[batch, 3, 224, 224]`, ``float32``, to logits
    `[batch, classes]`; other sizes work.

    Free choices: 1,001 classes, that is 1,000 and "background" (class 0 or the last, never a target),
    as is usual in TensorFlow: this alone gives WAGMA's count.  ``classes=1000``: 25,557,032.  Where a
    bottleneck halves the images, its 3x3 convolution does.  Initial weights: ``he_``.

    References: see ``resnet44_cifar10``.
    """
    return _imagenet((3, 4, 6, 3), width, classes, bottleneck=True)


def resnet18x4(*, width: int = 256, classes: int = 1000) -> ImageClassifier:
    """Build the 4xResNet18 of SparCML (section 8.4): 180,645,096 parameters.

    All widths of ResNet-18, the first convolution's too, times 4.  "More than 2M" of the parameters
    are in the last layer: 2,048 features and 1,000 classes.  Images `[batch, 3, 224, 224]`,
    ``float32``, to logits `[batch, classes]`; other sizes work.

    Free choices: ImageNet-1K (Table 3; the text says 11K once).  Initial weights: ``he_``.

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
