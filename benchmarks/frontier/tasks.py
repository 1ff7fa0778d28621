"""The training tasks: byte-level GPTs of two sizes, and two workloads that are not GPTs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.cli.workloads.stdlib_text import HEAD_WIDTH, LstmWorkload, TextWorkload
from sparsync.cli.workloads.workload import Defaults, Workload, is_hidden_matrix

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1  # for matrices
LEAST_RATE = 0.1  # learning rate after the last step, as a fraction of the largest
INITIAL_DEVIATION = 0.02
BYTES = 256  # the vocabulary


class ByteGpt(nn.Module):
    """A GPT for bytes: pre-norm, causal attention, squared ReLU, head tied to the embedding.

    There are no biases. Initial weights are normal, and smaller at the end of a residual branch
    (GPT-2, section 2.3).
    """

    def __init__(self, *, context: int, width: int, layers: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # leaves the caller's generator unchanged
            torch.manual_seed(seed)
            self.byte_embedding = nn.Embedding(BYTES, width)
            self.position_embedding = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.final_norm = nn.LayerNorm(width, bias=False)
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    branches = 2 * layers if "out" in name else 1
                    nn.init.normal_(weight, std=INITIAL_DEVIATION / math.sqrt(branches))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, 256]` for tokens `[batch, positions]`."""
        x = self.byte_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.byte_embedding.weight)


class Block(nn.Module):
    """An attention layer and a two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, positions, ...]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square())


@dataclass(frozen=True)
class GptWorkload(TextWorkload):
    """``ByteGpt`` on the source of Python's standard library; every twentieth file is held out."""

    width: int = 160
    layers: int = 4

    name: ClassVar[str] = "gpt"
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=0.1, adam_lr=4e-3, batch_size=8)

    def make_model(self, seed: int) -> ByteGpt:
        """See ``Workload``."""
        return ByteGpt(context=self.context, width=self.width, layers=self.layers, seed=seed)


@dataclass(frozen=True)
class Task:
    """A workload and its default training settings."""

    workload: Workload
    batch: int  # samples per rank and step
    rates: tuple[float, ...]  # learning rates that every method tries
    clip: float = 1.0  # largest 2-norm of a gradient


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "gpt-1m": Task(GptWorkload(), 8, (1e-3, 2e-3, 4e-3)),
        # 4 ranks on 2 cores compute a step of 2 windows per rank in less than 0.6 s
        "gpt-9m": Task(GptWorkload(width=416), 2, (1e-3, 2e-3, 4e-3)),
        # for many ranks
        "gpt-100k": Task(GptWorkload(context=64, width=64, layers=2), 4, (4e-3, 8e-3, 1.6e-2)),
        "lstm": Task(LstmWorkload(), 8, (3e-3, 6e-3, 1.2e-2)),
        "digits": Task(DigitsWorkload(), 32, (1e-3, 2e-3, 4e-3)),
        "tiny": Task(GptWorkload(context=16, width=32, layers=1), 2, (4e-3, 8e-3)),  # for tests
    }
)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate as a fraction of the largest.

    It rises for a tenth of the steps, then falls along a cosine.

    Example:
        >>> [round(rate_at(step, 20), 3) for step in (0, 1, 2, 19)]
        [0.5, 1.0, 1.0, 0.107]
    """
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    turn = math.pi * (step - warmup) / max(steps - warmup, 1)
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(turn)) / 2


def grouped(named: Mapping[str, nn.Parameter]) -> list[dict]:
    """Return an optimizer's groups: matrices decay, but norms and biases do not."""
    decaying = [p for p in named.values() if p.dim() >= 2]
    rest = [p for p in named.values() if p.dim() < 2]
    groups = ((decaying, WEIGHT_DECAY), (rest, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def make_optimizers(model: nn.Module, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """Return AdamW, SGD for "sgd", or for "muon" Muon for hidden matrices and AdamW for the rest.

    Muon's updates are scaled to the size of AdamW's, so one learning rate suits both (Liu et al.,
    Muon is Scalable for LLM Training, 2025, section 2.2).
    """
    named = dict(model.named_parameters())
    if kind == "sgd":
        return [torch.optim.SGD(grouped(named), lr=lr)]
    hidden = {
        name: parameter
        for name, parameter in named.items()
        if kind == "muon" and parameter.dim() == 2 and is_hidden_matrix(name, parameter)
    }
    rest = {name: parameter for name, parameter in named.items() if name not in hidden}
    adam = torch.optim.AdamW(grouped(rest), lr=lr, betas=BETAS, fused=True)  # fused into one pass
    if not hidden:
        return [adam]
    muon = torch.optim.Muon(
        hidden.values(), lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adam]
