"""The papers' models, each with the parameter count that its paper states.

Models built on the meta device occupy no memory:

    >>> import torch
    >>> with torch.device("meta"):
    ...     parameter_count(MODELS["bert"].build())
    133547324
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import nn

from sparsync_papers.models.images import (
    alexnet,
    resnet18x4,
    resnet20_cifar10,
    resnet34x4,
    resnet44_cifar10,
    resnet50,
    resnet110_cifar10,
    vgg16_cifar10,
    vgg16_imagenet,
)
from sparsync_papers.models.navigation import NavigationPolicy
from sparsync_papers.models.speech import SpeechLstm
from sparsync_papers.models.text import Bert, EncoderDecoder, LstmLanguageModel, Transformer

__all__ = ["MODELS", "PaperModel", "parameter_count"]


class PaperModel(NamedTuple):
    """A paper's model, with the facts that the paper states about it."""

    build: Callable[..., nn.Module]  # builds the model; without arguments, in the paper's size
    parameters: int  # number of learnable parameters
    paper: str  # sections that use the model and state its size
    stated: str  # size stated in the paper; "" if there is none
    dataset: str  # data set on which the paper trains the model


_ptb = partial(LstmLanguageModel, vocabulary=10_000)
_wikitext2 = partial(LstmLanguageModel, vocabulary=33_278)
_atis = partial(EncoderDecoder, source_vocabulary=945, target_vocabulary=128)
_hansards = partial(EncoderDecoder, source_vocabulary=30_000, target_vocabulary=30_000)

MODELS: Mapping[str, PaperModel] = {
    "vgg16_cifar10": PaperModel(
        vgg16_cifar10,
        14_728_266,
        "Ok-Topk, Table 2; RedSync, Table 1",
        "14,728,266; 58.91 MB",
        "CIFAR-10",
    ),
    "lstm_an4": PaperModel(SpeechLstm, 27_569_568, "Ok-Topk, Table 2", "27,569,568", "AN4"),
    "bert": PaperModel(Bert, 133_547_324, "Ok-Topk, Table 2", "133,547,324", "Wikipedia"),
    "resnet50": PaperModel(
        resnet50,
        25_559_081,
        "WAGMA, 5.2; RedSync, Table 1; SparCML, 8.4",
        "25,559,081; 103 MB; 25 M",
        "ImageNet",
    ),
    "transformer_wmt17": PaperModel(
        Transformer, 61_362_176, "WAGMA, 5.3", "61,362,176; 245 MB", "WMT17 en-de"
    ),
    "navigation": PaperModel(NavigationPolicy, 8_476_421, "WAGMA, 5.4", "8,476,421", "Habitat"),
    "resnet44_cifar10": PaperModel(
        resnet44_cifar10, 661_338, "RedSync, Table 1", "2.65 MB", "CIFAR-10"
    ),
    "alexnet": PaperModel(alexnet, 61_100_840, "RedSync, Table 1", "233 MB", "ImageNet"),
    "vgg16_imagenet": PaperModel(
        vgg16_imagenet, 138_357_544, "RedSync, Table 1", "528 MB", "ImageNet"
    ),
    "lstm_ptb": PaperModel(_ptb, 66_034_000, "RedSync, Table 1", "264 MB", "Penn Treebank"),
    "lstm_wikitext2": PaperModel(
        _wikitext2, 135_891_278, "RedSync, Table 1", "543 MB", "WikiText-2"
    ),
    "resnet20_cifar10": PaperModel(resnet20_cifar10, 272_474, "SparCML, Figure 1", "", "CIFAR-10"),
    "resnet110_cifar10": PaperModel(resnet110_cifar10, 1_730_714, "SparCML, 8.3", "", "CIFAR-10"),
    "encoder_decoder_lstm": PaperModel(_atis, 19_821_440, "SparCML, 8.3", "20 M; 80 MB", "ATIS"),
    "encoder_decoder_hansards": PaperModel(_hansards, 88_048_944, "SparCML, 8.3", "", "Hansards"),
    "resnet18x4": PaperModel(resnet18x4, 180_645_096, "SparCML, 8.4", "", "ImageNet"),
    "resnet34x4": PaperModel(resnet34x4, 342_286_568, "SparCML, 8.4", "", "ImageNet"),
}


def parameter_count(model: nn.Module) -> int:
    """Count learnable parameters; a tied parameter counts once.

    Example:
        >>> parameter_count(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
