"""Lines grouped by length, so that the cost of a step differs between ranks and between steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from sparsync.cli.workloads.stdlib_text import BytesWorkload, ByteText, ByteTransformer
from sparsync.cli.workloads.workload import PADDING, Defaults, Draw, Workload
from sparsync.errors import ConfigurationError

_NEWLINE = 10


def bucket_lengths(lengths: Tensor, width: int) -> Tensor:
    """Return, for each line, the longest length in its bucket; bucket b starts at ``b * width + 1``."""
    return (lengths + width - 1) // width * width


def draw_from_bucket(
    padded_lengths: Tensor, generator: np.random.Generator, count: int
) -> tuple[Tensor, int]:
    """Draw a bucket in proportion to its size, then samples from it; all samples are equally likely.

    Returns:
        Numbers of samples, `[count]`, and the bucket's padded length.
    """
    padded_length = padded_lengths[int(generator.integers(len(padded_lengths)))]
    first, last = (
        int(torch.searchsorted(padded_lengths, padded_length, right=right))
        for right in (False, True)
    )
    return torch.from_numpy(generator.integers(first, last, size=count)), int(padded_length)


@final
class LineBuckets:
    r"""The lines of a text, sorted by length and divided into buckets of similar lengths.

    Every byte of a line is predicted: the line's tokens begin with the previous newline, and its
    targets end with the newline that ends the line.

    Args:
        text: `[bytes]` with ``torch.uint8``.
        longest: bytes of the longest line, including its newline; empty and longer lines are
            omitted.
        width: bucket b holds the lengths from ``b * width + 1`` to ``(b + 1) * width``.

    Attributes:
        starts: `[lines]`, the position in the text at which the tokens of each line begin.
        lengths: `[lines]`, ascending: each line's number of tokens, which equals its number of targets.
        padded_lengths: `[lines]`: the longest length in each line's bucket.
        mean_length: mean of ``padded_lengths``.

    Raises:
        ConfigurationError: all lines are empty or too long.

    Example:
        >>> text = torch.tensor(list(b"#\nif a:\n  b\n"), dtype=torch.uint8)
        >>> buckets = LineBuckets(text, longest=7, width=4)
        >>> buckets.lengths.tolist(), buckets.padded_lengths.tolist()
        ([4, 6], [4, 7])
        >>> tokens, targets = buckets.padded(torch.tensor([0]), 5)
        >>> bytes(tokens[0].tolist()), targets[0].tolist()
        (b'\n  b\x00', [32, 32, 98, 10, -100])
    """

    def __init__(self, text: Tensor, *, longest: int, width: int) -> None:
        newlines = (text == _NEWLINE).nonzero().flatten()
        lengths = newlines.diff()
        kept = ((lengths > 1) & (lengths <= longest)).nonzero().flatten()
        if not len(kept):
            raise ConfigurationError(
                f"no line of the text has 2 to {longest} bytes; give a larger context, or a Python "
                "that has its source files"
            )
        kept = kept[lengths[kept].argsort(stable=True)]
        self.text, self.starts, self.lengths = text, newlines[kept], lengths[kept]
        self.padded_lengths = bucket_lengths(self.lengths, width).clamp(max=longest)
        self.mean_length = self.padded_lengths.double().mean().item()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Tensor, int]:
        """Draw lines from one bucket; see ``draw_from_bucket``."""
        return draw_from_bucket(self.padded_lengths, generator, count)

    def padded(self, lines: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of lines, `[lines, length]`, padded with 0 and ``PADDING``."""
        columns = torch.arange(length)
        inside = columns < self.lengths[lines, None]
        at = torch.where(inside, self.starts[lines, None] + columns, 0)
        tokens, targets = self.text[at].long(), self.text[at + 1].long()
        return tokens.where(inside, 0), targets.where(inside, PADDING)


@final
@dataclass(frozen=True)
class LinesWorkload(Workload):
    """A byte-level transformer on lines of Python's source: a small form of WAGMA's section 5.3.

    For each step, every rank draws a bucket, and fills its batch with a fixed number of lines from
    it. So the time of a step varies with the lengths in the bucket. A batch's loss is the mean over
    its bytes.
    """

    # bytes of the longest line, including its newline; 1 line in 800 is longer than 96
    context: int = 96
    width: int = 160  # width of the residual stream; a multiple of 32, the width of a head
    layers: int = 4  # blocks
    bucket_width: int = 16  # bytes by which neighbouring buckets' lengths differ
    # the largest number of tokens in a local batch, including padding (the paper's number); a
    # larger batch is cut
    max_tokens: int = 8192

    name: ClassVar[str] = "lines"
    target: ClassVar[str] = "byte"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=16)

    def __post_init__(self) -> None:
        # refuses settings that the model cannot have
        BytesWorkload(self.context, self.width, self.layers)
        if self.max_tokens < self.context:
            raise ConfigurationError(
                f"max_tokens is {self.max_tokens}, less than a line of context {self.context}; "
                "give at least as many"
            )
        if self.bucket_width < 1:
            raise ConfigurationError(f"bucket_width is {self.bucket_width}; give at least 1")

    @cached_property
    def parts(self) -> tuple[LineBuckets, LineBuckets]:
        """The training lines and the held-out lines, read on first use."""
        text = ByteText.of_standard_library(context=self.context)
        return self.buckets(text.training), self.buckets(text.held_out)

    def buckets(self, text: Tensor) -> LineBuckets:
        """Sort the lines of a text."""
        return LineBuckets(text, longest=self.context, width=self.bucket_width)

    def make_model(self, seed: int) -> ByteTransformer:
        """See ``Workload``."""
        return BytesWorkload(self.context, self.width, self.layers).make_model(seed)

    def batch(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return a batch; every rank draws from the whole text, however many ranks there are."""
        count = min(draw.batch_size, self.max_tokens // self.context)
        return self.parts[0].padded(*self.parts[0].draw(draw.generator(), count))

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return held-out lines of all lengths, with each length as frequent as in the held-out files."""
        last = len(self.parts[1].lengths) - 1
        chosen = torch.arange(1024) * last // 1023
        return self.parts[1].padded(chosen, self.context)

    def relative_cost(self, *, seed: int, step: int, rank: int) -> float:
        """Return the number of tokens in a rank's padded batch, relative to the mean.

        A simulator multiplies a step's computation time by this number, which depends only on the
        arguments.
        """
        training = self.parts[0]
        _, length = training.draw(np.random.default_rng([seed, step, rank]), 1)
        return length / training.mean_length
