"""RedSync's test systems and trainings, and the seconds of a step by its own cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsync.planning.redsync_costs import equation_2
from sparsync.reproduce.redsync_phases import (
    MOMENTUM_MASK,
    QUANTISED_RGC,
    RGC,
    Machine,
    Model,
    lstm,
    predicted_phases,
    resnet50,
)

__all__ = [
    "DAINT",
    "EFFICIENCY",
    "IMAGENET",
    "MURADIN",
    "SCHEMES",
    "SMALL",
    "TEXT",
    "Platform",
    "Training",
]

_WORD_BYTES = 4
_BACKWARD = 2 / 3  # of the computation: what communication of a CNN can hide behind
EFFICIENCY = 0.4  # of the peak that training reaches (ours: cuDNN's usual third to half)


@dataclass(frozen=True)
class Platform:
    """Where the paper measured.

    Attributes:
        name: of the machine.
        machine: network and GPU.
        flops: of a GPU at its peak, per second, single precision (data sheets).
        ranks: GPUs of the figures.
    """

    name: str
    machine: Machine
    flops: float
    ranks: tuple[int, ...]


DAINT = Platform("Piz Daint", Machine(), 9.3e12, (2, 4, 8, 16, 32, 64, 128))
# 3.5 GB/s: section 6.1; 3/4 of a Titan V's 652 GB/s
MURADIN = Platform("Muradin", Machine(beta=1 / 3.5e9, memory=1 / 490e9), 14.9e12, (2, 4, 8))


@dataclass(frozen=True)
class Training:
    """A model, and what one step computes.

    Attributes:
        model: its layers.
        gflops: forward, one sample (Table 1).
        batch: samples per GPU (Table 1).
        overlaps: communication runs beside the backward pass: CNNs (section 5.5).
    """

    model: Model
    gflops: float
    batch: int
    overlaps: bool = True

    def seconds(self, platform: Platform) -> float:
        """Return the computation: forward, and twice as much backward."""
        return 3e9 * self.gflops * self.batch / (EFFICIENCY * platform.flops)

    def step(self, platform: Platform, ranks: int, scheme: str) -> float:
        """Return the seconds of a step with "SGD", "RGC" or "quantised RGC"."""
        computed = self.seconds(platform)
        hidden = _BACKWARD * computed if self.overlaps else 0.0
        machine = platform.machine
        if scheme == "SGD":
            whole = equation_2(ranks, alpha=machine.alpha, beta=machine.beta)
            exchanged = whole.seconds(_WORD_BYTES * sum(self.model.sizes))
            return computed + max(exchanged - hidden, 0.0)
        chosen = RGC if scheme == RGC.name else QUANTISED_RGC
        stages = predicted_phases(self.model, chosen, ranks, machine)
        gpu = sum(seconds for stage, seconds in stages.items() if stage != "communicate")
        return computed + gpu + max(stages["communicate"] - hidden, 0.0)


def _convolutional(name: str, layers: tuple[tuple[int, int], ...]) -> Model:
    """Return a model of layers, inputs and outputs of each; a bias per output."""
    sizes = (size for inputs, outputs in layers for size in (inputs * outputs, outputs))
    return Model(name, tuple(sizes), MOMENTUM_MASK)


_VGG = (
    (27, 64),
    (576, 64),
    (576, 128),
    (1152, 128),
    (1152, 256),
    (2304, 256),
    (2304, 256),
    (2304, 512),
    *(((4608, 512),) * 5),
)
_HIDDEN = ((9216, 4096), (4096, 4096), (4096, 1000))
_ALEXNET = _convolutional(
    "AlexNet",
    ((363, 64), (1600, 192), (1728, 384), (3456, 256), (2304, 256), *_HIDDEN),
)
_VGG_16 = _convolutional("VGG-16", (*_VGG, (25088, 4096), *_HIDDEN[1:]))
_VGG_CIFAR = _convolutional("VGG-16, CIFAR-10", (*_VGG, (512, 10)))
_LSTM, _WIKI = lstm(), replace(lstm(vocabulary=33_278), name="LSTM 2 x 1500, Wiki2")
IMAGENET = (
    Training(_ALEXNET, 0.72, 32),
    Training(_VGG_16, 15.5, 32),
    Training(resnet50(), 8.22, 32),
)
TEXT = (Training(_LSTM, 2.52, 5, overlaps=False),)
SMALL = (Training(_VGG_CIFAR, 0.31, 64), Training(_WIKI, 2.52, 5, overlaps=False))

SCHEMES = ("SGD", RGC.name, QUANTISED_RGC.name)
