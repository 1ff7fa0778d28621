"""AN4, a set of recordings of spelled names and addresses, and the LSTM that recognises the letters.

The folder has CMU's layout: ``etc/an4_train.fileids``, ``etc/an4_train.transcription``, and sounds
below ``wav``.
"""

from __future__ import annotations

import re
import wave
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.workload import (
    Batch,
    Defaults,
    Evaluation,
    Objective,
    Tensors,
    mean,
    outputs_of,
)
from sparsync.errors import ConfigurationError
from sparsync_papers.models.speech import SpeechLstm
from sparsync_papers.workloads.folders import (
    FolderWorkload,
    Samples,
    existing,
    padded,
    read_lines,
    seeded,
)

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # the first is CTC's blank (Deep Speech 2)
BLANK = 0

_RATE = 16_000  # samples per second
_ADVICE = "unpack AN4 (CMU's raw archive) there"
_SUFFIXES = (".wav", ".raw")


Utterance = tuple[Path, str]  # sound file and spoken text
Words = Sequence[Hashable]


@final
class Spoken(Samples):
    """Utterances; sound files are read on demand."""

    def __init__(self, utterances: list[Utterance]) -> None:
        self.utterances = utterances

    def __len__(self) -> int:
        """Return the number of utterances."""
        return len(self.utterances)

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """See ``Samples``.

        Returns:
            Spectrograms `[batch, 1, 161, frames]`, padded with 0; letters `[batch, longest]`,
            padded with ``BLANK``; the number of letters `[batch]`; and the number of frames
            `[batch]`.
        """
        utterances = [self.utterances[number] for number in chosen.tolist()]
        heard = [spectrogram(read_sound(sound)).T for sound, _ in utterances]
        said = [spelled(text, sound) for sound, text in utterances]
        frames, letters = (torch.tensor([len(row) for row in rows]) for rows in (heard, said))
        inputs = padded(heard, 0.0).transpose(1, 2)[:, None].contiguous()
        return inputs, (padded(said, BLANK), letters, frames)


def _utterances(names: Path) -> list[Utterance]:
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


def spelled(text: str, place: Path) -> Tensor:
    """Convert a text to upper case and return the numbers of its letters in ``LETTERS``.

    Raises:
        ConfigurationError: the text is empty, or contains a character that is not in ``LETTERS``.
    """
    letters = " ".join(text.upper().split())
    strange = sorted(set(letters) - set(LETTERS[1:]))
    if strange or not letters:
        why = f"has {strange[0]!r}" if strange else "is empty"
        raise ConfigurationError(
            f"the text of {place} {why}; use only letters from A to Z and apostrophes in words"
        )
    return torch.tensor([LETTERS.index(letter) for letter in letters])


def read_sound(path: Path) -> Tensor:
    """Read a sound of 16-bit mono samples at 16 kHz: a .wav file, or raw numbers in either byte order.

    Returns:
        `[samples]`, ``float32`` in [-1, 1).

    Raises:
        ConfigurationError: the file has neither format.
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
    """Return the size of the jumps between samples, which are large if the byte order is wrong."""
    return float(np.abs(np.diff(samples.astype(np.float64))).sum())


def spectrogram(samples: Tensor, *, window: int = 320, stride: int = 160) -> Tensor:
    """Return log(1 + magnitude), `[bins, frames]`, scaled to mean 0 and deviation 1.

    Args:
        samples: the sound, `[samples]`.
        window: samples per frame (20 ms, which gives 161 frequencies).
        stride: samples between frames (10 ms).

    References: Amodei et al., `Deep Speech 2 <https://arxiv.org/abs/1512.02595>`_, 2015.
    """
    shape = torch.hamming_window(window)
    filled = F.pad(samples, (window // 2, window // 2))  # so that frames are centred on their times
    heard = torch.stft(filled, window, stride, window=shape, center=False, return_complex=True)
    level = heard.abs().log1p()
    return (level - level.mean()) / level.std().clamp(min=1e-6)


def edit_distance(hypothesis: Words, reference: Words) -> int:
    """Return the smallest number of insertions, deletions and substitutions (Levenshtein distance).

    Example:
        >>> edit_distance("kitten", "sitting")
        3

    Cost: one Python iteration per pair of elements.
    """
    row = list(range(len(reference) + 1))
    for i, heard in enumerate(hypothesis, start=1):
        diagonal, row[0] = row[0], i
        for j, said in enumerate(reference, start=1):
            substituted = diagonal + (heard != said)
            diagonal, row[j] = row[j], min(substituted, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def errors(hypotheses: Sequence[Words], references: Sequence[Words]) -> tuple[int, int]:
    """Return the total number of edits, and the total number of words or characters in the references.

    Example:
        >>> heard, said = "the cat sat", "a cat sat down"
        >>> errors([heard.split()], [said.split()])  # one substituted, one missing, of 4
        (2, 4)
    """
    pairs = zip(hypotheses, references, strict=True)
    return sum(edit_distance(h, r) for h, r in pairs), sum(map(len, references))


@final
@dataclass(frozen=True)
class Ctc(Objective):
    """Connectionist temporal classification: nats per utterance, and WER and CER of greedy decoding.

    Targets are the letters `[batch, longest]`, and each utterance's numbers of letters and frames.
    An utterance that is too short for its letters counts as 0 nats.

    References: Graves et al., `Connectionist Temporal Classification
    <https://www.cs.toronto.edu/~graves/icml_2006.pdf>`_, 2006.
    """

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        assert isinstance(outputs, Tensor)
        return self._nats(outputs, targets) / len(outputs)

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``; a hit is an utterance transcribed without error."""
        logits, (letters, counts, frames) = outputs_of(model, inputs), targets
        assert isinstance(logits, Tensor)
        said = [
            _text(row[:count]) for row, count in zip(letters.tolist(), counts.tolist(), strict=True)
        ]
        heard = heard_texts(logits, SpeechLstm.positions(frames))
        hits = sum(one == other for one, other in zip(heard, said, strict=True))
        in_words, words = errors([text.split() for text in heard], [text.split() for text in said])
        in_letters, characters = errors(heard, said)
        more = Counter(in_words=in_words, words=words, in_letters=in_letters, characters=characters)
        return Evaluation(self._nats(logits, targets).item(), hits, len(said), more)

    def figures(self, whole: Evaluation) -> dict[str, float]:
        """Return the number of edits per word and per letter; either may exceed 1."""
        more = whole.more
        return {
            "WER": mean(more["in_words"], more["words"]),
            "CER": mean(more["in_letters"], more["characters"]),
        }

    def _nats(self, logits: Tensor, targets: Tensors) -> Tensor:
        letters, counts, frames = targets
        return F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            letters,
            SpeechLstm.positions(frames),
            counts,
            blank=BLANK,
            reduction="sum",
            zero_infinity=True,
        )


def heard_texts(logits: Tensor, positions: Tensor) -> list[str]:
    """Return each utterance's text: the likeliest letters, without repetitions and blanks.

    Args:
        logits: `[batch, positions, letters]`.
        positions: number of valid positions, `[batch]`.
    """
    texts = []
    for row, count in zip(logits.argmax(-1), positions.tolist(), strict=True):
        best = row[:count].unique_consecutive()
        texts.append(_text(best[best != BLANK].tolist()))
    return texts


def _text(letters: list[int]) -> str:
    return "".join(LETTERS[letter] for letter in letters)


@final
@dataclass(frozen=True)
class LstmAn4(FolderWorkload[Spoken]):
    """The LSTM as in Ok-Topk, section 5, with the settings of its published runs (density 0.02)."""

    width: int = 800  # hidden units per layer
    layers: int = 5  # stacked LSTM layers

    name: ClassVar[str] = "lstm-an4"
    target: ClassVar[str] = "utterance"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=1e-3, adam_lr=3e-4, batch_size=2)

    @property
    def objective(self) -> Ctc:
        """See ``Workload``."""
        return Ctc()

    def find(self) -> tuple[Path, Path]:
        """Return the files that list the training and the held-out utterances."""
        names = ["etc/an4_train.fileids", "an4/etc/an4_train.fileids"]
        first = existing(self.data, names, what="the utterances of AN4", advice=_ADVICE)
        what = "the held-out utterances of AN4"
        return first, existing(first.parent, ["an4_test.fileids"], what=what, advice=_ADVICE)

    def load(self) -> tuple[Spoken, Spoken]:
        """See ``FolderWorkload``."""
        training, held_out = (Spoken(_utterances(path)) for path in self.find())
        return training, held_out

    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(SpeechLstm, seed, width=self.width, layers=self.layers)
