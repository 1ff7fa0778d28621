"""Test that length buckets lose no line, ignore padding, and know their costs in advance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.workloads.workload import PADDING, Draw
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.length_buckets import LineBuckets, LinesWorkload

PLACE = {"seed": 0, "step": 0, "rank": 0}


def text_of(*lines: bytes) -> torch.Tensor:
    return torch.tensor(list(b"\n" + b"".join(line + b"\n" for line in lines)), dtype=torch.uint8)


def line_of(tokens, targets) -> bytes:
    """Return the predicted line, after checking its padding."""
    inside = targets != PADDING
    count = int(inside.sum())
    assert inside[:count].all() and not tokens[count:].any()
    assert tokens[0] == 10 and torch.equal(tokens[1:count], targets[: count - 1])
    return bytes(targets[:count].tolist())


@pytest.fixture(scope="module")
def workload():
    """Write equally many lines of each length from 1 to 40; every line states its length."""
    made = LinesWorkload(context=32, width=32, layers=1, bucket_width=8)
    buckets = made.buckets(text_of(*(bytes([64 + n]) * n for n in range(1, 41) for _ in range(3))))
    object.__setattr__(made, "parts", (buckets, buckets))
    return made


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=30))
def test_every_line_that_fits_is_there_once(lines):
    expected = sorted(line + b"\n" for line in lines if 2 <= len(line) + 1 <= 12)
    if not expected:
        with pytest.raises(ConfigurationError, match="no line of the text has 2 to 12 bytes"):
            LineBuckets(text_of(*lines), longest=12, width=5)
        return
    buckets = LineBuckets(text_of(*lines), longest=12, width=5)
    tokens, targets = buckets.padded(torch.arange(len(expected)), 12)
    assert sorted(line_of(*pair) for pair in zip(tokens, targets, strict=True)) == expected
    for length, padded in zip(buckets.lengths, buckets.padded_lengths, strict=True):
        assert padded == min(b for b in (5, 10, 12) if b >= length)


def test_a_batch_has_equally_many_lines_of_one_bucket(workload):
    widths = set()
    for step in range(60):
        tokens, targets = workload.batch(Draw(1, step, 2, 4, 6))
        width = tokens.shape[1]
        lengths = (targets != PADDING).sum(1)
        assert tokens.shape == targets.shape == (6, width)
        assert (lengths > width - 8).all() and (lengths <= width).all()
        widths.add(width)
    assert widths == {8, 16, 24, 32}


def test_every_line_is_equally_likely(workload):
    buckets, generator = workload.parts[0], np.random.default_rng(0)
    drawn = torch.cat([buckets.draw(generator, 4)[0] for _ in range(10_000)])
    counts = drawn.bincount(minlength=93).double()
    assert len(counts) == 93  # lengths 2 to 32, three lines of each
    # about 430 each are expected; a batch has lines of one bucket, so counts vary twice as much
    assert (counts / counts.mean() - 1).abs().max() < 0.2


def test_the_relative_cost_is_that_of_the_batch_and_1_on_average(workload):
    places = [{"seed": 5, "step": s, "rank": r} for s in range(100) for r in range(8)]
    costs = [workload.relative_cost(**place) for place in places]
    tokens = [workload.batch(Draw(**p, world_size=8, batch_size=4))[0].numel() for p in places]
    unit = tokens[0] / costs[0]
    assert costs == pytest.approx([count / unit for count in tokens])
    assert sum(costs) / len(costs) == pytest.approx(1, rel=0.05)


def test_padding_changes_neither_loss_nor_gradient(workload):
    """More padding in a batch changes nothing."""
    lines, results = torch.tensor([0, 5, 20]), []
    for width in (8, 32):
        model = workload.make_model(0)
        tokens, targets = workload.parts[0].padded(lines, width)
        loss = workload.loss(model(tokens), targets)
        loss.backward()
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, gradient), (padded_loss, padded_gradient) = results
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_the_evaluation_counts_bytes_and_no_padding(workload):
    tokens, targets = workload.held_out()
    assert tokens.shape == (1024, 32)
    lengths = (targets != PADDING).sum(1)
    assert lengths[0] == 2 and lengths[-1] == 32
    evaluation = workload.evaluate(workload.make_model(0))
    assert evaluation.count == lengths.sum() < targets.numel()


def test_the_real_lines_vary_as_much_as_is_said():
    workload = LinesWorkload()
    assert len(workload.parts[0].lengths) > 100_000
    costs = [workload.relative_cost(seed=0, step=s, rank=r) for s in range(50) for r in range(8)]
    assert max(costs) / min(costs) >= 4 and 0.3 < np.std(costs) < 0.5


@pytest.mark.parametrize("options", [{"width": 33}, {"max_tokens": 95}, {"bucket_width": 0}])
def test_what_no_batch_can_have_is_refused(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} is"):
        LinesWorkload(**options)
