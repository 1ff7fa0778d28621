"""Metrics against examples worked out by hand."""

import math

import pytest
import torch

from sparsync.cli.workloads.metrics import Mean, Perplexity, top_hits


def test_top_hits_of_more_classes_than_there_are():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 4)
    counts = [top_hits(logits, torch.arange(4), k) for k in (1, 2, 3, 4, 5)]
    assert counts == [1, 2, 3, 4, 4]


def test_perplexity_of_guessing_is_the_vocabulary():
    assert Perplexity(3 * math.log(10_000), 3).value == pytest.approx(10_000)
    assert Perplexity(1e6, 1).value == math.inf


def test_nothing_has_no_value():
    for nothing in (Mean(0, 0), Perplexity(0, 0)):
        assert math.isnan(nothing.value)
