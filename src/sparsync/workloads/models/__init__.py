"""The models of the papers, each with the number of parameters that its paper states.

On the meta device they cost no memory:

    >>> import torch
    >>> with torch.device("meta"):
    ...     parameter_count(MODELS["bert"].build())
    133547324
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from sparsync.workloads.models.alexnet import alexnet
from sparsync.workloads.models.bert import bert
from sparsync.workloads.models.encoder_decoder import encoder_decoder_hansards, encoder_decoder_lstm
from sparsync.workloads.models.habitat import habitat_policy
from sparsync.workloads.models.language import lstm_ptb, lstm_wikitext2
from sparsync.workloads.models.resnet import (
    resnet18x4,
    resnet20_cifar10,
    resnet34x4,
    resnet44_cifar10,
    resnet50,
    resnet110_cifar10,
)
from sparsync.workloads.models.size import megabytes, parameter_count
from sparsync.workloads.models.speech import lstm_an4
from sparsync.workloads.models.transformer import transformer_wmt17
from sparsync.workloads.models.vgg import vgg16_cifar10, vgg16_imagenet

__all__ = [
    "MODELS",
    "PaperModel",
    "alexnet",
    "bert",
    "encoder_decoder_hansards",
    "encoder_decoder_lstm",
    "habitat_policy",
    "lstm_an4",
    "lstm_ptb",
    "lstm_wikitext2",
    "megabytes",
    "parameter_count",
    "resnet110_cifar10",
    "resnet18x4",
    "resnet20_cifar10",
    "resnet34x4",
    "resnet44_cifar10",
    "resnet50",
    "transformer_wmt17",
    "vgg16_cifar10",
    "vgg16_imagenet",
]


@dataclass(frozen=True)
class PaperModel:
    """A model as a paper uses it.

    Attributes:
        build: builds it; without arguments: as the paper has it.
        parameters: how many are learnable.
        paper: where it is used, and where its size is stated.
        stated: its size there; "": nowhere.
        dataset: what it is trained on there.
    """

    build: Callable[..., nn.Module]
    parameters: int
    paper: str
    stated: str
    dataset: str


_MODELS = (
    PaperModel(
        vgg16_cifar10,
        14_728_266,
        "Ok-Topk, Table 2; RedSync, Table 1",
        "14,728,266; 58.91 MB",
        "CIFAR-10",
    ),
    PaperModel(lstm_an4, 27_569_568, "Ok-Topk, Table 2", "27,569,568", "AN4"),
    PaperModel(bert, 133_547_324, "Ok-Topk, Table 2", "133,547,324", "Wikipedia"),
    PaperModel(
        resnet50,
        25_559_081,
        "WAGMA, 5.2; RedSync, Table 1; SparCML, 8.4",
        "25,559,081; 103 MB; 25 M",
        "ImageNet",
    ),
    PaperModel(transformer_wmt17, 61_362_176, "WAGMA, 5.3", "61,362,176; 245 MB", "WMT17 en-de"),
    PaperModel(habitat_policy, 8_476_421, "WAGMA, 5.4", "8,476,421", "Habitat"),
    PaperModel(resnet44_cifar10, 661_338, "RedSync, Table 1", "2.65 MB", "CIFAR-10"),
    PaperModel(alexnet, 61_100_840, "RedSync, Table 1", "233 MB", "ImageNet"),
    PaperModel(vgg16_imagenet, 138_357_544, "RedSync, Table 1", "528 MB", "ImageNet"),
    PaperModel(lstm_ptb, 66_034_000, "RedSync, Table 1", "264 MB", "Penn Treebank"),
    PaperModel(lstm_wikitext2, 135_891_278, "RedSync, Table 1", "543 MB", "WikiText-2"),
    PaperModel(resnet20_cifar10, 272_474, "SparCML, Figure 1", "", "CIFAR-10"),
    PaperModel(resnet110_cifar10, 1_730_714, "SparCML, 8.3", "", "CIFAR-10"),
    PaperModel(encoder_decoder_lstm, 19_821_440, "SparCML, 8.3", "20 M; 80 MB", "ATIS"),
    PaperModel(encoder_decoder_hansards, 88_048_944, "SparCML, 8.3", "", "Hansards"),
    PaperModel(resnet18x4, 180_645_096, "SparCML, 8.4", "", "ImageNet"),
    PaperModel(resnet34x4, 342_286_568, "SparCML, 8.4", "", "ImageNet"),
)
MODELS: MappingProxyType[str, PaperModel] = MappingProxyType(
    {model.build.__name__: model for model in _MODELS}
)
