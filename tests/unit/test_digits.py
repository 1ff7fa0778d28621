"""Digits: how images are split, dealt to ranks and shifted; and that the small VGG learns them."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.workloads.base import Draw
from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.errors import ConfigurationError


@pytest.fixture(scope="module")
def digits():
    return DigitsWorkload()


def test_the_images_are_split_once_and_whole(digits):
    (training, labels), (held_out, _) = digits.parts
    assert (len(training), len(held_out)) == (1438, 359)
    assert training.min() == 0 and training.max() == 1 and set(labels.tolist()) == set(range(10))
    assert torch.equal(DigitsWorkload().held_out()[0], held_out)


@given(world_size=st.integers(1, 7), batch_size=st.integers(1, 500), epoch=st.integers(0, 3))
def test_an_epoch_of_all_ranks_is_every_sample_once(world_size, batch_size, epoch):
    seen = []
    for rank in range(world_size):
        shard = len(range(rank, 1438, world_size))
        start, end = epoch * shard, (epoch + 1) * shard
        steps = range(start // batch_size, -(-end // batch_size))
        place = {"seed": 1, "rank": rank, "world_size": world_size, "batch_size": batch_size}
        order = torch.cat([Draw(step=step, **place).samples(1438) for step in steps])
        offset = start - steps.start * batch_size
        mine = order[offset : offset + shard]
        assert set((mine % world_size).tolist()) == {rank}
        seen.append(mine)
    assert torch.cat(seen).sort().values.tolist() == list(range(1438))


def test_images_are_shifted_by_at_most_a_pixel(digits):
    draw = Draw(seed=0, step=0, rank=1, world_size=4, batch_size=60)
    images, targets = digits.batch(draw)
    originals, expected = (part[draw.samples(1438)] for part in digits.parts[0])
    assert torch.equal(targets, expected)
    shifts = set()
    for image, original in zip(images, originals, strict=True):
        around = F.pad(original, (1, 1, 1, 1))
        possible = {(y, x): around[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)}
        made = {shift for shift, window in possible.items() if torch.equal(image, window)}
        assert made
        shifts |= made
    assert len(shifts) == 9


def test_more_ranks_than_images_are_refused():
    with pytest.raises(ConfigurationError, match="rank 1438 has none; use at most 1438 ranks"):
        Draw(seed=0, step=0, rank=1438, world_size=1439, batch_size=1).samples(1438)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparsync\[linear\]'"):
        DigitsWorkload().held_out()


def test_the_small_vgg_learns_the_digits(digits):
    model = digits.make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(40):
        images, targets = digits.batch(Draw(0, step, 0, 1, 64))
        optimizer.zero_grad()
        digits.loss(model(images), targets).backward()
        optimizer.step()
    assert digits.evaluate(model).accuracy > 0.5  # by chance: 0.1
