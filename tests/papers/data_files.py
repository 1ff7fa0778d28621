"""Write data sets of a few samples in the formats of the real ones."""

from __future__ import annotations

import pickle
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
SENTENCE = "the cat sat on the mat"


def pixels_of(number: int, count: int = 4) -> tuple[np.ndarray, list[int]]:
    """Return images and labels for a CIFAR-10 file."""
    generator = np.random.default_rng(number)
    pixels = generator.integers(256, size=(count, 3072), dtype=np.uint8)
    return pixels, generator.integers(10, size=count).tolist()


def write_cifar10(folder: Path) -> None:
    """Write the Python format: pickles of protocol 2, as Python 2 wrote them."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels, labels = pixels_of(number)
        content = {b"data": pixels, b"labels": labels, b"batch_label": name.encode()}
        (inner / name).write_bytes(pickle.dumps(content, protocol=2))


def write_cifar10_binary(folder: Path) -> None:
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels, labels = pixels_of(number)
        records = np.column_stack([np.array(labels, dtype=np.uint8), pixels])
        (inner / f"{name}.bin").write_bytes(records.tobytes())


def tone(frames: int, hertz: float = 440.0) -> np.ndarray:
    """Return a sound at 16 kHz; a frame has 10 ms."""
    return (8000 * np.sin(2 * np.pi * hertz / 16_000 * np.arange(160 * frames))).astype(np.int16)


def write_wav(path: Path, samples: np.ndarray, *, rate: int = 16_000, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def write_an4(folder: Path) -> None:
    """Write CMU's layout, with a .wav file and raw sounds in both byte orders."""
    (folder / "etc").mkdir(parents=True)
    texts = {"train": ["YES", "GO ON", "RUBOUT"], "test": ["NO", "O'NEIL"]}
    for part, spoken in texts.items():
        files = [f"an4_{part}/x/an{number}-x-b" for number in range(len(spoken))]
        lines = [f"<s> {t} </s> ({Path(f).name})\n" for f, t in zip(files, spoken, strict=True)]
        (folder / f"etc/an4_{part}.fileids").write_text("".join(f"{file}\n" for file in files))
        (folder / f"etc/an4_{part}.transcription").write_text("".join(lines))
        for number, file in enumerate(files):
            samples, path = tone(40 + 10 * number), folder / "wav" / file
            write_wav(path.with_suffix(".wav"), samples)
            if number:
                path.with_suffix(".wav").unlink()
                order = "<i2" if number == 2 else ">i2"
                path.with_suffix(".raw").write_bytes(samples.astype(order).tobytes())


def write_words(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ptb.train.txt").write_text(f" {SENTENCE} \n a dog <unk> N \n" * 20)
    (folder / "ptb.valid.txt").write_text(f" {SENTENCE} \n a zebra \n" * 10)


def write_documents(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *["the", "cat", "sat", "on", "mat", "a", "dog", "##s", "run", "##ning", "."]]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    for name, documents in (("train.txt", 6), ("valid.txt", 3)):
        blocks = [f"The cats sat on the mat.\nA dog {'runs ' * n}.\n" for n in range(documents)]
        (folder / name).write_text("\n".join(blocks))


def write_images(folder: Path, classes: Sequence[str] = ("n01", "n02", "n03")) -> None:
    from PIL import Image

    for part, count in (("train", 3), ("val", 2)):
        for number, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for image in range(count):
                colour = (60 * number, 40 * image, 90)
                suffix = "png" if image == 1 else "JPEG"
                Image.new("RGB", (90 + 10 * image, 80), colour).save(
                    folder / part / name / f"{name}_{image}.{suffix}"
                )


def pair_writer(source: str, target: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part, count in (("train", 12), ("valid", 6)):
            lines = [" ".join(SENTENCE.split()[: 1 + n % 6]) + "\n" for n in range(count)]
            (folder / f"{part}.{source}").write_text("".join(lines))
            (folder / f"{part}.{target}").write_text("".join(lines).upper())

    return write


# workload that needs data -> writer of its folder, and sizes that train quickly
WRITERS = MappingProxyType(
    {
        **{
            f"{model}-cifar10": (write_cifar10, {"width": 2})
            for model in ("vgg16", "resnet20", "resnet44", "resnet110")
        },
        **{
            f"{model}-imagenet": (write_images, {"width": 2, "side": 64})
            for model in ("resnet50", "alexnet", "vgg16", "resnet18x4", "resnet34x4")
        },
        "lstm-an4": (write_an4, {"width": 16, "layers": 2}),
        "bert-wikipedia": (write_documents, {"width": 64, "layers": 1, "context": 16}),
        "lstm-ptb": (write_words, {"width": 16, "context": 5}),
        "lstm-wikitext2": (write_words, {"width": 16, "context": 5}),
        "transformer-wmt17": (pair_writer("en", "de"), {"width": 64, "layers": 1}),
        "atis": (pair_writer("in", "out"), {"width": 16}),
        "hansards": (pair_writer("en", "fr"), {"width": 16}),
    }
)
