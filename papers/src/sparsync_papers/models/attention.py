"""Multi-head attention, as BERT and the Transformer use it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.errors import ConfigurationError


class Attention(nn.Module):
    """Every position looks at what is visible of a memory.

    Raises:
        ConfigurationError: ``heads`` does not divide ``width``.

    References: Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017,
    section 3.2.
    """

    def __init__(self, width: int, heads: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigurationError(
                f"heads is {heads} and width {width}, expected a divisor: take heads={width // 64 or 1}"
            )
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return `[batch, positions, width]`.

        Args:
            x: `[batch, positions, width]`.
            memory: `[batch, remembered, width]`.
            visible: of the memory, `[batch, remembered]`, ``bool``; None: for every position of the
                memory those up to it (``memory`` is ``x``).
        """
        mixed = F.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            attn_mask=None if visible is None else visible[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=visible is None,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """Return `[batch, heads, positions, width / heads]`."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
