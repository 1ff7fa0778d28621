"""Test the classes and crops of image folders, and the errors for missing files."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.imagenet import AlexnetImagenet, centre_box, random_box

from .data_files import write_images

Image = pytest.importorskip("PIL.Image")


def load(folder):
    return AlexnetImagenet(folder, side=16).parts


def test_classes_are_the_folders_by_the_alphabet(tmp_path):
    write_images(tmp_path, classes=("n02", "n01"))
    (tmp_path / "train" / "readme.txt").write_text("no class")
    (tmp_path / "train" / "n01" / "list.txt").write_text("no image")
    training, held_out = load(tmp_path)
    assert training.classes == ["n01", "n02"] and (len(training), len(held_out)) == (6, 4)
    images, labels = training.batch(torch.arange(6), None)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    red = (images[:, 0, 8, 8] * 0.229 + 0.485) * 255  # n02 was written first: red is 0
    assert red.tolist() == pytest.approx([60] * 3 + [0] * 3, abs=2)


def test_the_centre_is_evaluated_on_and_random_parts_trained_on(tmp_path):
    ramp = np.tile(np.linspace(0, 255, 128, dtype=np.uint8)[None, :, None], (96, 1, 3))
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(ramp).save(tmp_path / part / "a" / "ramp.png")
    training, held_out = load(tmp_path)
    one = torch.zeros(1, dtype=torch.int64)
    image, _ = held_out.batch(one, None)
    assert image.shape == (1, 3, 16, 16) and image.dtype == torch.float32
    level = (image[0, 1, 0] * 0.224 + 0.456) * 128  # columns of the original
    left, _, right, _ = centre_box(128, 96)
    assert (left, right) == (22, 106)
    assert level[0].item() == pytest.approx(left + 84 / 32, abs=2)
    assert level[-1].item() == pytest.approx(right - 84 / 32, abs=2)
    drawn = [training.batch(one, np.random.default_rng(seed))[0] for seed in (0, 0, 1, 2, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert len({float(image.mean()) for image in drawn}) == 5
    rising = {bool(image[0, 0, 0, -1] > image[0, 0, 0, 0]) for image in drawn}
    assert rising == {True, False}  # some are mirrored


@given(width=st.integers(1, 900), height=st.integers(1, 900), seed=st.integers(0, 99))
def test_random_parts_lie_inside(width, height, seed):
    left, top, right, bottom = random_box(width, height, np.random.default_rng(seed))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_without_pillow_it_says_what_to_install(tmp_path, monkeypatch):
    write_images(tmp_path)
    training, _ = load(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparsync-papers\[images\]'"):
        training.batch(torch.tensor([0]), None)


def test_broken_images_and_strange_folders_are_told(tmp_path):
    write_images(tmp_path)
    broken = tmp_path / "train" / "n01" / "n01_0.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(ConfigurationError, match=r"cannot read the image .*n01_0.JPEG") as refused:
        load(tmp_path)[0].batch(torch.tensor([0]), None)
    assert "\n" not in str(refused.value)
    (tmp_path / "val" / "n09").mkdir()
    with pytest.raises(ConfigurationError, match=r"n09 belongs to a class without training images"):
        load(tmp_path)
    for image in (tmp_path / "train").rglob("*.*"):
        image.unlink()
    with pytest.raises(ConfigurationError, match=r"there is no image in .*train; give folders"):
        load(tmp_path)
