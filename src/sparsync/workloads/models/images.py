"""What the image classifiers share: features, a head, initial weights."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ImageClassifier", "he_"]


class ImageClassifier(nn.Module):
    """Features of an image, then one fully connected layer that gives the logits of the classes.

    Args:
        features: from images `[batch, 3, height, width]`, ``float32``, to `[batch, numbers]`.
        head: from there to `[batch, classes]`.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head
        he_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]` for images `[batch, 3, height, width]`, ``float32``."""
        logits: Tensor = self.head(self.features(images))
        return logits


def he_(module: nn.Module, *, linear_std: float = 0.01) -> None:
    """Initialise the weights in place, for ReLUs.

    Convolutions: normal, variance 2 / (outputs that a number has a part in) (He et al. 2015).  Fully
    connected layers: normal.  Their biases: 0.  Norms: 1 and 0 (torch's own).

    Args:
        module: modified.
        linear_std: standard deviation of fully connected weights (Goyal et al. 2017, section 5.1).

    References: He et al., `Delving Deep into Rectifiers <https://arxiv.org/abs/1502.01852>`_, 2015;
    Goyal et al., `Accurate, Large Minibatch SGD <https://arxiv.org/abs/1706.02677>`_, 2017.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=linear_std)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
