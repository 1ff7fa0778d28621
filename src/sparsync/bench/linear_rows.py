"""The rows of ``sparsync linear``: loaded, and cut into what is trained on and what is held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparsync.bench.linear_settings import TRIGRAMS, LinearSettings
from sparsync.linear.data import Shard, load_shard, trigram_shard
from sparsync.linear.losses import Penalty, loss_named
from sparsync.linear.problem import Problem
from sparsync.linear.shard import row_range
from sparsync.linear.trigrams import URL_DIMENSIONS

__all__ = ["load", "problems", "share"]


def load(
    settings: LinearSettings, rank: int, world_size: int, advance: Callable[[float], None]
) -> Shard:
    """Load the rows of a rank; ``advance`` is told the fraction that is done."""
    if settings.data == TRIGRAMS:
        return trigram_shard(
            dimensions=settings.dimensions or URL_DIMENSIONS,
            rank=rank,
            world_size=world_size,
            rows=settings.rows,
            positive=settings.positive,
            cache=settings.cache,
            progress=advance,
        )
    return load_shard(
        settings.data,
        rank=rank,
        world_size=world_size,
        dimensions=settings.dimensions,
        cache=settings.cache,
        positive=settings.positive_labels(),
        progress=advance,
    )


def share(whole: Shard, rank: int, world_size: int) -> Shard:
    """Return what ``load`` gives that rank, out of all rows."""
    first, stop = row_range(whole.rows_total, rank=rank, world_size=world_size)
    return replace(
        whole,
        features=whole.features[first:stop],
        labels=whole.labels[first:stop],
        first_row=first,
    )


def problems(settings: LinearSettings, shard: Shard) -> tuple[Problem, Problem]:
    """Return what is trained on, and what is held out (the training itself, if nothing is)."""
    loss, penalty = loss_named(settings.model), Penalty(settings.l1, settings.l2)
    if settings.held_out_every == 0:
        everything = Problem(shard.features, shard.labels, loss, penalty)
        return everything, everything
    # by the row's number in the whole, so that it does not depend on the number of ranks
    numbers = shard.first_row + np.arange(len(shard.labels))
    out = numbers % settings.held_out_every == settings.held_out_every - 1
    training, held_out = (
        Problem(shard.features[chosen], shard.labels[chosen], loss, penalty)
        for chosen in (np.flatnonzero(~out), np.flatnonzero(out))
    )
    return training, held_out
