"""AN4: people spell their names and addresses; 16-bit sound at 16 kHz, and what was said.

Two layouts are read: that of CMU (``etc/an4_train.fileids`` and ``.transcription``, sound below
``wav``) and lists of "sound file,text file" (``an4_train_manifest.csv``), as Ok-Topk's experiments
had them.
"""

from __future__ import annotations

import re
import wave
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import Batch
from sparsync.workloads.data.base import Samples, existing, padded, read_lines

__all__ = [
    "BLANK",
    "LETTERS",
    "Spoken",
    "find_an4",
    "load_an4",
    "read_sound",
    "spectrogram",
    "spelled",
]

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # the first is CTC's blank (Deep Speech 2)
BLANK = 0

_RATE = 16_000  # samples per second
_NUMBERS = MappingProxyType({letter: number for number, letter in enumerate(LETTERS)})
_ADVICE = "unpack AN4 (CMU's raw archive) there"
_SUFFIXES = (".wav", ".raw")


@dataclass(frozen=True)
class _Utterance:
    sound: Path
    text: str


@final
class Spoken(Samples):
    """Utterances; sound is read when it is asked for.

    Args:
        utterances: sound files, and what is said in them.
    """

    def __init__(self, utterances: list[tuple[Path, str]]) -> None:
        self.utterances = [_Utterance(*utterance) for utterance in utterances]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.utterances)

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """See ``Samples``.

        Returns:
            Spectrograms `[batch, 1, 161, frames]`, short ones padded with 0; letters `[batch, longest]`,
            padded with ``BLANK``, how many they are `[batch]`, and how many frames `[batch]`.
        """
        utterances = [self.utterances[number] for number in chosen.tolist()]
        heard = [spectrogram(read_sound(utterance.sound)).T for utterance in utterances]
        said = [spelled(utterance.text, utterance.sound) for utterance in utterances]
        frames, letters = (torch.tensor([len(row) for row in rows]) for rows in (heard, said))
        inputs = padded(heard, 0.0).transpose(1, 2)[:, None].contiguous()
        return inputs, (padded(said, BLANK), letters, frames)


def find_an4(folder: Path) -> tuple[Path, Path]:
    """Return the list of the utterances to train on, and that of those to evaluate on.

    Args:
        folder: has ``etc`` and ``wav`` (or ``an4``, which has them), or two manifests.

    Raises:
        ConfigurationError: a list is missing.
    """
    names = ["etc/an4_train.fileids", "an4/etc/an4_train.fileids", "an4_train_manifest.csv"]
    first = existing(folder, names, what="the utterances of AN4", advice=_ADVICE)
    others = ["an4_test.fileids"]
    if first.suffix == ".csv":
        others = ["an4_val_manifest.csv", "an4_test_manifest.csv"]
    what = "the held-out utterances of AN4"
    return first, existing(first.parent, others, what=what, advice=_ADVICE)


def load_an4(lists: tuple[Path, Path]) -> tuple[Spoken, Spoken]:
    """Read which utterances there are.

    Args:
        lists: see ``find_an4``.

    Raises:
        ConfigurationError: a file is missing, or a line of a list cannot be read.
    """
    training, held_out = (
        Spoken(_of_manifest(path) if path.suffix == ".csv" else _of_cmu(path)) for path in lists
    )
    return training, held_out


def _of_cmu(names: Path) -> list[tuple[Path, str]]:
    root, texts = names.parent.parent, names.with_suffix(".transcription")
    files, lines = list(read_lines(names)), list(read_lines(texts))
    if len(files) != len(lines):
        raise ConfigurationError(
            f"{names} has {len(files)} lines, and {texts} has {len(lines)}; {_ADVICE} again"
        )
    found = []
    for file, line in zip(files, lines, strict=True):
        sounds = [f"wav/{file.strip()}{suffix}" for suffix in _SUFFIXES]
        sound = existing(root, sounds, what="an utterance of AN4", advice=_ADVICE)
        text = re.sub(r"</?s>|\([^()]*\)\s*$", "", line)  # <s> HELLO </s> (an4-file-name)
        found.append((sound, text.strip()))
    return found


def _of_manifest(manifest: Path) -> list[tuple[Path, str]]:
    found = []
    for number, line in enumerate(read_lines(manifest), start=1):
        parts = [manifest.parent / part.strip() for part in line.split(",")]
        if len(parts) != 2 or not all(part.is_file() for part in parts):
            raise ConfigurationError(
                f"{manifest}:{number} is {line!r}; give a sound file and a text file that exist, with a "
                "comma"
            )
        found.append((parts[0], " ".join(read_lines(parts[1])).strip()))
    return found


def spelled(text: str, place: Path) -> Tensor:
    """Return the numbers of a text's letters, upper case.

    Args:
        text: of letters, apostrophes and spaces.
        place: where it is from, for the error.

    Raises:
        ConfigurationError: it has another character, or none at all.
    """
    letters = " ".join(text.upper().split())
    strange = sorted(set(letters) - set(LETTERS[1:]))
    if strange or not letters:
        why = f"has {strange[0]!r}" if strange else "is empty"
        raise ConfigurationError(
            f"the text of {place} {why}; write words in letters from A to Z, and apostrophes"
        )
    return torch.tensor([_NUMBERS[letter] for letter in letters])


def read_sound(path: Path) -> Tensor:
    """Read 16-bit samples at 16 kHz, one channel: a .wav file, or bare numbers in either byte order.

    Returns:
        `[samples]`, ``float32`` in [-1, 1).

    Raises:
        ConfigurationError: it is anything else.
    """
    advice = "convert it to 16-bit samples at 16 kHz, one channel"
    try:
        if path.suffix == ".raw":
            content = path.read_bytes()
        else:
            with wave.open(str(path)) as file:
                kind = (file.getnchannels(), file.getsampwidth(), file.getframerate())
                if kind != (1, 2, _RATE):
                    raise ConfigurationError(
                        f"{path} has (channels, bytes per sample, samples per second) {kind}; {advice}"
                    )
                content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigurationError(
            f"cannot read the sound {path} ({error or 'it ends early'}); {advice}"
        ) from error
    if not content or len(content) % 2:
        raise ConfigurationError(f"{path} has {len(content)} bytes of sound; {advice}")
    samples = np.frombuffer(content, "<i2")
    if path.suffix == ".raw":
        samples = min(samples, np.frombuffer(content, ">i2"), key=_roughness)
    return torch.from_numpy(samples.astype(np.float32) / 2**15)


def _roughness(samples: np.ndarray) -> float:
    """Measure jumps: sound in the wrong byte order is noise, and CMU has AN4 in both."""
    return float(np.abs(np.diff(samples.astype(np.float64))).sum())


def spectrogram(samples: Tensor, *, window: int = 320, stride: int = 160) -> Tensor:
    """Return log(1 + magnitude), with mean 0 and deviation 1 over an utterance, `[bins, frames]`.

    Args:
        samples: of sound, `[samples]`.
        window: samples of a frame: 20 ms, which have 161 frequencies.
        stride: samples between frames: 10 ms.

    References: Amodei et al., `Deep Speech 2 <https://arxiv.org/abs/1512.02595>`_, 2015.
    """
    shape = torch.hamming_window(window)
    filled = F.pad(samples, (window // 2, window // 2))  # so that frames are centred
    heard = torch.stft(filled, window, stride, window=shape, center=False, return_complex=True)
    level = heard.abs().log1p()
    return (level - level.mean()) / level.std().clamp(min=1e-6)
