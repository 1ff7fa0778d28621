"""Test how BERT's documents become word pieces, pairs of passages, and masks."""

import numpy as np
import pytest
import torch

from sparsync.cli.workloads.workload import PADDING
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.documents import BertWikipedia, MaskedPairs, word_pieces
from sparsync_papers.workloads.words import Vocabulary

from .data_files import write_documents

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def named_documents(folder, count=40, sentences=6):
    """Write documents; sentence s of document d is "d.s d.s d.s", so every token shows its origin."""
    names = [f"d{d}s{s}" for d in range(count) for s in range(sentences)]
    blocks = [
        "\n".join(" ".join([f"d{d}s{s}"] * 3) for s in range(sentences)) for d in range(count)
    ]
    (folder / "text.txt").write_text("\n\n\n".join(blocks) + "\n\n")
    vocabulary = Vocabulary([*SPECIAL, *names], unknown="[UNK]")
    return MaskedPairs(folder / "text.txt", vocabulary, context=32)


def test_pieces_are_the_longest_that_fit():
    vocabulary = Vocabulary([*SPECIAL, "run", "##ning", "##n", "cafe", ","], unknown="[UNK]")
    assert word_pieces("Running,  CAFÉ", vocabulary) == ["run", "##ning", ",", "cafe"]
    assert word_pieces("runn runx x" + "y" * 200, vocabulary) == ["run", "##n", "[UNK]", "[UNK]"]


def test_documents_are_blocks_of_lines(tmp_path):
    write_documents(tmp_path)
    training, held_out = BertWikipedia(tmp_path, context=16).parts
    assert (len(training), len(held_out)) == (6, 3) and len(training.vocabulary) == 16
    assert training.sentences(2) == ["The cats sat on the mat.", "A dog runs runs ."]
    assert len(named_documents(tmp_path)) == 40  # more empty lines change nothing


def test_passages_follow_each_other_in_half_of_the_pairs(tmp_path):
    pairs = named_documents(tmp_path)
    words = pairs.vocabulary.words
    generator = np.random.default_rng(0)
    follow = 0
    for _ in range(5):
        (tokens, segments), (masked, others) = pairs.batch(torch.arange(40), generator)
        assert tokens.shape == segments.shape == masked.shape == (40, 32)
        original = torch.where(masked == PADDING, tokens, masked)
        for row, segment, other in zip(original, segments, others, strict=True):
            length = int((row != 0).sum())
            said = [words[number] for number in row[:length].tolist()]
            cut = said.index("[SEP]")
            assert said[0] == "[CLS]" and said[-1] == "[SEP]" and said.count("[SEP]") == 2
            first_and_second = [0] * (cut + 1) + [1] * (length - cut - 1)
            assert segment.tolist() == first_and_second + [0] * (32 - length)
            first, second = said[1:cut], said[cut + 1 : -1]
            document = first[0].split("s")[0]
            if other:
                assert {word.split("s")[0] for word in second} != {document}
            else:
                follow += 1
                places = [int(word.split("s")[1]) for word in (first[-1], second[0])]
                assert second[0].startswith(f"{document}s") and places[1] == places[0] + 1
    assert 70 < follow < 130  # of 200


def test_15_percent_are_masked_80_10_10(tmp_path):
    pairs = named_documents(tmp_path)
    generator = np.random.default_rng(1)
    masked = same = replaced = ordinary = 0
    for _ in range(30):
        (tokens, _), (words, _) = pairs.batch(torch.arange(40), generator)
        chosen = words != PADDING
        assert (words[chosen] >= len(SPECIAL)).all()  # never a separator
        masked += int((tokens[chosen] == pairs.mask).sum())
        same += int((tokens[chosen] == words[chosen]).sum())
        ordinary += int((torch.where(chosen, words, tokens) >= len(SPECIAL)).sum())
        replaced += int(chosen.sum())
    assert replaced / ordinary == pytest.approx(0.15, abs=0.01)
    assert masked / replaced == pytest.approx(0.8, abs=0.02)
    assert same / replaced == pytest.approx(0.1, abs=0.02)


def test_a_document_of_one_sentence_goes_with_another(tmp_path):
    pairs = named_documents(tmp_path, sentences=1)
    _, (_, others) = pairs.batch(torch.arange(40), np.random.default_rng(0))
    assert others.tolist() == [1] * 40


def test_files_that_cannot_be_used_are_told(tmp_path):
    write_documents(tmp_path)
    (tmp_path / "valid.txt").write_text("one line\nand one more\n")
    with pytest.raises(ConfigurationError, match=r"valid.txt has fewer than two documents; give"):
        BertWikipedia(tmp_path, context=16).load()
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot read .*train.txt .*; give documents"):
        BertWikipedia(tmp_path, context=16).load()
    (tmp_path / "vocab.txt").write_text("[UNK]\n[PAD]\n[SEP]\n")
    with pytest.raises(ConfigurationError, match=r"vocab.txt has no \[CLS\]; add a line"):
        BertWikipedia(tmp_path, context=16).load()
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"there is no vocab.txt in .*; put BERT's there"):
        BertWikipedia(tmp_path, context=16).load()
