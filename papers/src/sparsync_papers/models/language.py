"""The two-layer LSTM language model of words."""

from __future__ import annotations

from torch import Tensor, nn


class LstmLanguageModel(nn.Module):
    """Predicts the next word; embedding and output layer are not tied.

    The LSTM of RedSync (section 6.2 and Table 1): 66,034,000 parameters with the 10,000 words of the Penn
    Treebank ("264 MB"), 135,891,278 with the 33,278 of WikiText-2 ("543 MB").  Tokens `[batch,
    positions]`, ``int64``, to logits `[batch, positions, vocabulary]`.

    Free choices: torch's two biases per gate; embeddings as wide as the layers; both sizes of Table 1
    ask for it.  Initial weights: uniform within 0.1 for the embedding and the output layer, whose bias
    is 0; torch's own for the LSTM, uniform within 1 / sqrt(``width``) = 0.026.

    Differs from the paper: every window starts from a state of zeros.

    Args:
        vocabulary: how many words there are.
        width: of the embedding, and hidden units per layer.
        layers: stacked LSTM layers.
        dropout: rate before, between and after the layers (Zaremba et
            al., the large network; RedSync names none).

    References: Press & Wolf, `Using the Output Embedding to Improve Language Models
    <https://arxiv.org/abs/1608.05859>`_, 2016; Zaremba et al., `Recurrent Neural Network
    Regularization <https://arxiv.org/abs/1409.2329>`_, 2014.
    """

    def __init__(
        self, *, vocabulary: int, width: int = 1500, layers: int = 2, dropout: float = 0.65
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, width)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, vocabulary)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, vocabulary]` for tokens `[batch, positions]`, ``int64``."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits
