"""Test AN4's three sound formats, spectrograms, and CTC's letters."""

import pytest
import torch

from sparsync.errors import ConfigurationError
from sparsync_papers.models.speech import SpeechLstm
from sparsync_papers.workloads.an4 import (
    LETTERS,
    Ctc,
    LstmAn4,
    heard_texts,
    read_sound,
    spectrogram,
    spelled,
)

from .data_files import tone, write_an4, write_wav


def numbers(text):
    return torch.tensor([LETTERS.index(letter) for letter in text])


def test_utterances_are_read_from_cmus_layout(tmp_path):
    write_an4(tmp_path / "an4")
    training, held_out = LstmAn4(tmp_path).parts
    assert [text for _, text in training.utterances] == ["YES", "GO ON", "RUBOUT"]
    assert [sound.suffix for sound, _ in training.utterances] == [".wav", ".raw", ".raw"]
    assert [text for _, text in held_out.utterances] == ["NO", "O'NEIL"]


def test_a_batch_has_padded_spectrograms_and_letters(tmp_path):
    write_an4(tmp_path)
    inputs, (letters, counts, frames) = LstmAn4(tmp_path).parts[0].batch(torch.tensor([2, 0]), None)
    assert inputs.shape == (2, 1, 161, 61) and frames.tolist() == [61, 41]
    assert inputs[1, 0, :, 41:].abs().max() == 0 < inputs[1, 0, :, 40].abs().max()
    assert counts.tolist() == [6, 3]
    assert torch.equal(letters[1], numbers("YES___")) and torch.equal(letters[0], numbers("RUBOUT"))


def test_all_forms_of_a_sound_are_the_same_sound(tmp_path):
    samples = tone(50)
    write_wav(tmp_path / "a.wav", samples)
    (tmp_path / "b.raw").write_bytes(samples.astype("<i2").tobytes())
    (tmp_path / "c.raw").write_bytes(samples.astype(">i2").tobytes())
    sounds = [read_sound(tmp_path / name) for name in ("a.wav", "b.raw", "c.raw")]
    assert all(torch.equal(sound, sounds[0]) for sound in sounds)
    assert torch.equal(sounds[0], torch.from_numpy(samples / 2**15).float())


def test_a_tone_is_in_its_bin():
    level = spectrogram(torch.from_numpy(tone(50, hertz=1000.0) / 2**15).float())
    assert level.shape == (161, 51)  # 8 kHz in steps of 50 Hz, every 10 ms
    assert level[:, 25].argmax() == 1000 // 50
    assert level.mean().item() == pytest.approx(0, abs=1e-5)
    assert level.std().item() == pytest.approx(1, rel=1e-4)
    assert spectrogram(torch.zeros(3)).isfinite().all()


def test_a_sound_of_another_kind_is_refused(tmp_path):
    for options, kind in (({"rate": 8000}, "1, 2, 8000"), ({"channels": 2}, "2, 2, 16000")):
        write_wav(tmp_path / "a.wav", tone(20), **options)
        with pytest.raises(ConfigurationError, match=rf"\({kind}\); convert it"):
            read_sound(tmp_path / "a.wav")


@pytest.mark.parametrize("content", [b"", b"RIFF", b"\x00" * 101])
@pytest.mark.parametrize("name", ["x.wav", "x.raw"])
def test_a_broken_sound_is_one_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content[:3] if name == "x.raw" and content == b"RIFF" else content)
    with pytest.raises(ConfigurationError, match=f"{name}.*; convert it to 16-bit") as refused:
        read_sound(path)
    assert "\n" not in str(refused.value)


def test_lists_that_do_not_fit_and_strange_texts_are_told(tmp_path):
    write_an4(tmp_path)
    with pytest.raises(ConfigurationError, match=r"a.wav has '4'; use only letters"):
        spelled("4 TIMES", tmp_path / "a.wav")
    with pytest.raises(ConfigurationError, match="is empty; use only letters"):
        spelled(" ", tmp_path / "a.wav")
    with (tmp_path / "etc/an4_test.transcription").open("a") as file:
        file.write("<s> ONE MORE </s> (x)\n")
    with pytest.raises(ConfigurationError, match=r"fileids has 2 lines, and .* has 3; unpack"):
        LstmAn4(tmp_path).load()
    (tmp_path / "wav/an4_train/x/an0-x-b.wav").unlink()
    with pytest.raises(ConfigurationError, match=r"no wav/.*an0-x-b.wav or wav/.*an0-x-b.raw in"):
        LstmAn4(tmp_path).load()


# ---- CTC ---------------------------------------------------------------------------------------------


def logits_of(*texts):
    best = torch.stack([numbers(text) for text in texts])
    return 20 * torch.nn.functional.one_hot(best, len(LETTERS)).float()


def test_repeated_letters_are_one_unless_a_blank_is_between():
    logits = logits_of("_YYEE_S__", "L_LLL A_A")
    assert heard_texts(logits, torch.tensor([9, 9])) == ["YES", "LL AA"]
    assert heard_texts(logits, torch.tensor([4, 3])) == ["YE", "LL"]


def test_ctc_judges_letters_and_words():
    class Heard(torch.nn.Module):
        def forward(self, _):
            return logits_of("GO_ON_", "YE_S_X")

    said = torch.stack([numbers("GO ON"), numbers("YES__")])
    targets = (said, torch.tensor([5, 3]), torch.tensor([12, 8]))  # frames: two per position
    evaluation = Ctc().judge(Heard(), torch.zeros(2), targets)
    assert SpeechLstm.positions(targets[2]).tolist() == [6, 4]
    assert (evaluation.hits, evaluation.count) == (1, 2)
    # "GOON" for two words; "YES" is right
    assert Ctc().figures(evaluation) == {"WER": 2 / 3, "CER": 1 / 8}
    loss = Ctc().loss(Heard()(None), targets)
    assert loss.item() == pytest.approx(evaluation.loss)
    right = (said[1:], targets[1][1:], targets[2][1:])
    assert Ctc().loss(logits_of("YE_S_X"), right).item() == pytest.approx(0, abs=1e-4)
