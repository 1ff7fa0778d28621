"""Test that CIFAR-10's two formats agree, broken files are reported, and pickles cannot run code."""

import pickle

import numpy as np
import pytest
import torch

from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.cifar10 import Resnet20Cifar10, read_python

from .data_files import pixels_of, write_cifar10, write_cifar10_binary


@pytest.mark.parametrize("write", [write_cifar10, write_cifar10_binary])
def test_images_and_labels_are_those_of_the_files(write, tmp_path):
    write(tmp_path)
    training, test = Resnet20Cifar10(tmp_path).parts
    assert (len(training), len(test)) == (20, 4)
    pixels, labels = pixels_of(0)
    assert training.labels[:4].tolist() == labels
    first = pixels[0].reshape(3, 32, 32)  # red, green, blue; rows from the top
    assert torch.equal(training.pixels[0], torch.from_numpy(first))
    assert torch.equal(test.pixels[3], torch.from_numpy(pixels_of(5)[0][3].reshape(3, 32, 32)))


def test_images_are_whitened_and_moved_only_while_training(tmp_path):
    write_cifar10(tmp_path)
    training, _ = Resnet20Cifar10(tmp_path).parts
    chosen = torch.arange(20)
    plain, labels = training.batch(chosen, None)
    assert plain.shape == (20, 3, 32, 32) and plain.dtype == torch.float32
    assert plain[0, 0, 0, 0].item() == pytest.approx(
        (training.pixels[0, 0, 0, 0].item() / 255 - 0.4914) / 0.2470, rel=1e-5
    )
    moved, same = training.batch(chosen, np.random.default_rng(0))
    assert torch.equal(same, labels) and not torch.equal(moved, plain)
    for image, original in zip(moved, plain, strict=True):
        both = (torch.nn.functional.pad(side, (4,) * 4) for side in (original, original.flip(-1)))
        windows = [side.unfold(1, 32, 1).unfold(2, 32, 1) for side in both]
        assert any((window == image[:, None, None]).all((0, 3, 4)).any() for window in windows)


class Harmful:
    """An object that writes a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_anything_else_is_refused_and_not_run(tmp_path, protocol):
    victim, file = tmp_path / "written", tmp_path / "data_batch_1"
    content = {b"data": Harmful(victim), b"labels": [1]}
    file.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(
        ConfigurationError, match=r"it names (_?io|builtins).open, which is refused"
    ):
        read_python(file)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a batch of CIFAR-10"),
        (b"\x80\x02}", "is not a batch of CIFAR-10"),
        (pickle.dumps([1, 2]), "is not a batch of CIFAR-10"),
        (pickle.dumps({b"data": b"x", b"labels": [1]}), "data is not an array"),
        (
            pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}, 2),
            "is not an array of unsigned",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 12), np.uint8), b"labels": [1]}, 2),
            r"1 labels and pixels \(1, 12\)",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, 2),
            "label outside of 0 to 9",
        ),
    ],
)
def test_a_broken_pickle_is_one_line(tmp_path, content, said):
    file = tmp_path / "data_batch_1"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_python(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_cut_binary_file_and_a_missing_one_are_told(tmp_path):
    write_cifar10_binary(tmp_path)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ConfigurationError, match=r"data_batch_3.bin has 12,291 bytes, which is not a multiple"
    ):
        Resnet20Cifar10(tmp_path).load()
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"there is no data_batch_3.bin in .*; unpack"):
        Resnet20Cifar10(tmp_path).load()
