"""Test vocabularies, windows of texts, and sentence pairs."""

import numpy as np
import pytest
import torch

from sparsync.cli.workloads import make_workload
from sparsync.cli.workloads.workload import PADDING, Draw, outputs_of
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.pairs import (
    END,
    PAD,
    SPECIAL,
    START,
    Atis,
    TransformerWmt17,
    Translation,
    greedy,
)
from sparsync_papers.workloads.words import LstmPtb, Vocabulary

from .data_files import WRITERS, pair_writer, write_words


def test_the_vocabulary_is_that_of_the_training_text(tmp_path):
    write_words(tmp_path)
    training, held_out = LstmPtb(tmp_path, context=5).parts
    vocabulary = training.vocabulary
    assert vocabulary.words[:2] == ("<unk>", "<eos>")
    assert set(vocabulary.words[2:]) == set(["the", "cat", "sat", "on", "mat", "a", "dog", "N"])
    assert vocabulary.words[2] == "the"  # the most frequent
    said = [vocabulary.words[number] for number in training.numbers[:12].tolist()]
    assert said == [
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
        "<eos>",
        "a",
        "dog",
        "<unk>",
        "N",
        "<eos>",
    ]
    assert held_out.numbers[7:10].tolist() == vocabulary.numbers(["a", "zebra", "<eos>"])
    assert vocabulary.numbers(["zebra"]) == [0]


def test_windows_are_the_text_and_targets_are_the_next_words(tmp_path):
    write_words(tmp_path)
    training, _ = LstmPtb(tmp_path, context=5).parts
    assert len(training) == (20 * 12 - 1) // 5
    tokens, targets = training.batch(torch.arange(len(training)), None)
    assert torch.equal(tokens.flatten(), training.numbers[: 5 * len(training)])
    assert torch.equal(targets.flatten(), training.numbers[1 : 5 * len(training) + 1])


def test_wikitext_and_any_text_have_other_names(tmp_path):
    for name in ("wiki.train.tokens", "wiki.valid.tokens"):
        (tmp_path / name).write_text(" = Title = \n\n some words here \n")
    training, _ = LstmPtb(tmp_path, context=3).parts
    assert len(training.numbers) == 4 + 1 + 4 and "=" in training.vocabulary
    (tmp_path / "wiki.valid.tokens").unlink()
    with pytest.raises(ConfigurationError, match=r"validation text: there is no wiki.valid.tokens"):
        LstmPtb(tmp_path)


def test_texts_that_cannot_be_used_are_told_in_one_line(tmp_path):
    write_words(tmp_path)
    with pytest.raises(ConfigurationError, match="has 240 words, a window of context 240 needs"):
        LstmPtb(tmp_path, context=240).load()
    (tmp_path / "ptb.train.txt").write_bytes(b"caf\xe9 " * 9)
    with pytest.raises(ConfigurationError, match=r"ptb.train.txt is not text in UTF-8"):
        LstmPtb(tmp_path, context=5).load()


def test_a_vocabulary_is_without_doubt():
    with pytest.raises(ConfigurationError, match="has 'a' more than once"):
        Vocabulary(["<unk>", "a", "a"])
    with pytest.raises(ConfigurationError, match="has no '<unk>'"):
        Vocabulary(["a"])


# ---- pairs -------------------------------------------------------------------------------------------


def translations(folder, *, context=128):
    workload = TransformerWmt17(folder, context=context)
    return (*workload.load(), workload.vocabularies)


def words_of(vocabulary, row):
    return " ".join(vocabulary.words[number] for number in row.tolist() if number != PADDING)


def test_a_pair_is_source_target_before_and_after(tmp_path):
    pair_writer("en", "de")(tmp_path)
    _, held_out, (source, target) = translations(tmp_path)
    (sources, before), after = held_out.batch(torch.tensor([0, 2]), None)
    assert source is target and source.words[:4] == SPECIAL
    assert words_of(source, sources[0]) == "the </s> <pad> <pad>"
    assert words_of(source, sources[1]) == "the cat sat </s>"
    assert words_of(target, before[1]) == "<s> THE CAT SAT"
    assert words_of(target, after[1]) == "THE CAT SAT </s>"
    assert after[0].tolist()[2:] == [PADDING] * 2
    assert before[0].tolist()[2:] == [SPECIAL.index(PAD)] * 2


def test_vocabularies_are_read_or_built_joint_or_apart(tmp_path):
    pair_writer("en", "de")(tmp_path)
    for part in ("train", "valid"):
        for suffix, name in (("en", "in"), ("de", "out")):
            (tmp_path / f"{part}.{name}").write_text((tmp_path / f"{part}.{suffix}").read_text())
    source, target = Atis(tmp_path).vocabularies
    assert source.words[:6] == (*SPECIAL, "the", "cat") and target.words[4:6] == ("THE", "CAT")
    (tmp_path / "vocab.txt").write_text("the\n<unk>\nTHE\n")
    _, _, (source, target) = translations(tmp_path)
    assert source is target and source.words == (*SPECIAL, "the", "THE")


def test_batches_are_of_one_bucket_and_of_the_ranks_own_pairs(tmp_path):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, size=300)
    for suffix in ("en", "de"):
        lines = [" ".join(["w"] * n) + "\n" for n in lengths]
        for part in ("train", "valid"):
            (tmp_path / f"{part}.{suffix}").write_text("".join(lines))
    training, held_out, _ = translations(tmp_path, context=32)
    assert len(training) == (lengths < 32).sum() and len(held_out) == 300
    seen = [set(), set(), set()]
    for rank in range(3):
        for step in range(40):
            chosen = training.chosen(Draw(0, step, rank, 3, 16))
            assert set((chosen % 3).tolist()) == {rank} and len(chosen) == 16
            (sources, _), _ = training.batch(chosen, None)
            ends = (sources == SPECIAL.index(END)).nonzero()[:, 1]
            assert len({int(end) // 8 for end in ends}) == 1  # all of one bucket
            seen[rank].add(sources.shape[1] // 8)
    assert all(len(buckets) > 2 for buckets in seen)
    few = training.chosen(Draw(0, 0, 0, 1, 10**6))
    assert len(few) == 8192 // 32


def test_files_that_do_not_fit_are_told(tmp_path):
    pair_writer("en", "de")(tmp_path)
    with pytest.raises(ConfigurationError, match="no pair of 1 to 1 tokens; give others"):
        translations(tmp_path, context=1)
    with (tmp_path / "train.en").open("a") as file:
        file.write("one more\n")
    with pytest.raises(ConfigurationError, match=r"train.de ends before line 13 of .*train.en;"):
        translations(tmp_path)
    (tmp_path / "valid.de").unlink()
    with pytest.raises(ConfigurationError, match=r"there is no valid.de in .*; put files there"):
        translations(tmp_path)


# ---- what is written ---------------------------------------------------------------------------------


class Shouting(torch.nn.Module):
    """A model that solves these tests' sentence pairs by copying the source and then ending."""

    def forward(self, source, written):
        following = source[:, : written.shape[1]]
        return torch.nn.functional.one_hot(following, 9).float() * 30


def test_greedy_writes_until_the_last_sentence_ends():
    end, pad = SPECIAL.index(END), SPECIAL.index(PAD)
    source = torch.tensor([[5, 6, end, pad], [7, 5, 6, end]])
    assert greedy(Shouting(), source, longest=9).tolist() == source.tolist()
    assert greedy(Shouting(), source, longest=2).tolist() == [[5, 6], [7, 5]]


def test_bleu_of_pieces_is_that_of_words_and_unknown_ones_are_never_right():
    vocabulary = (*SPECIAL, "ein", "Ver@@", "such", "ist", "es")
    judge = Translation(vocabulary)
    start, end, unknown = (SPECIAL.index(w) for w in (START, END, "<unk>"))
    for row, matches in (([4, 5, 6, 7, 8, end], (4, 3, 2, 1)), ([4, unknown, end], (1, 0, 0, 0))):
        source = torch.tensor([row])
        before = torch.tensor([[start, *row[:-1]]])
        found = judge.judge(Shouting(), (source, before), source)
        assert tuple(found.more[f"right {n}"] for n in range(1, 5)) == matches
        assert found.hits == found.count == len(row) and found.loss < 1e-6


@pytest.mark.parametrize(
    "name", ["atis", pytest.param("transformer-wmt17", marks=pytest.mark.slow)]
)
def test_models_learn_to_write_what_follows(tmp_path, name):
    write, sizes = WRITERS[name]
    write(tmp_path)
    torch.manual_seed(0)  # of dropout
    workload = make_workload(name, data=tmp_path, **{**sizes, "width": 64})
    model = workload.make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    figures = workload.objective.figures
    assert figures(workload.evaluate(model))["BLEU"] < 0.1
    for step in range(120):
        inputs, targets = workload.batch(Draw(0, step, 0, 1, 12))
        optimizer.zero_grad()
        workload.loss(outputs_of(model, inputs), targets).backward()
        optimizer.step()
    assert figures(workload.evaluate(model))["BLEU"] > 0.9
