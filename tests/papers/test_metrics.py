"""Compare BLEU and error rates with worked examples, and ranks' shares with the whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync_papers.workloads.an4 import edit_distance, errors
from sparsync_papers.workloads.pairs import bleu, ngrams

words = st.lists(st.sampled_from("abc"), max_size=8)
sentences = st.lists(st.tuples(words, words), max_size=5)


# ---- BLEU --------------------------------------------------------------------------------------------

CAT = ["the", "cat", "sat", "on", "the", "mat"]


def precisions(sums, longest):
    return [(sums[f"right {n}"], sums[f"found {n}"]) for n in range(1, longest + 1)]


def test_a_perfect_translation_has_1_and_a_foreign_one_0():
    assert bleu(ngrams([CAT], [CAT])) == 1
    assert bleu(ngrams([["un", "chat", "noir", "dort", "ici"]], [CAT])) == 0


def test_the_papers_example_of_clipped_counts():
    """In Papineni et al., section 2.1, "the" is clipped at 2 of 7, and no bigram is right."""
    found = ngrams([["the"] * 7], [CAT], longest=2)
    assert precisions(found, 2) == [(2, 7), (0, 6)] and bleu(found, longest=2) == 0


def test_precisions_and_brevity_by_hand():
    """Five words are right; so are 3 bigrams of 4 ("cat sat", "sat on", "on the") and 2 trigrams of 3."""
    candidate = ["cat", "sat", "on", "the", "the"]
    found = ngrams([candidate], [CAT], longest=3)
    assert precisions(found, 3) == [(5, 5), (3, 4), (2, 3)]
    expected = (1 * 3 / 4 * 2 / 3) ** (1 / 3) * math.exp(1 - 6 / 5)
    assert bleu(found, longest=3) == pytest.approx(expected)


@given(sentences, sentences)
def test_bleu_adds_up_over_shares(first, second):
    def of(pairs):
        return ngrams([c for c, _ in pairs], [r for _, r in pairs])

    assert of(first) + of(second) == +of([*first, *second])
    value = bleu(of(first))
    assert math.isnan(value) or 0 <= value <= 1


# ---- errors of words and letters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heard", "said", "edits"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("sunday", "saturday", 3), ("ab", "ba", 2)],
)
def test_edit_distances_by_hand(heard, said, edits):
    assert edit_distance(heard, said) == edits


def test_error_rates_weigh_sentences_by_their_lengths():
    heard, said = [["a", "b"], ["c"]], [["a", "b", "c", "d"], ["x"]]
    assert errors(heard, said) == (3, 5)
    assert errors(["YES"], ["YEAH"]) == (2, 4)  # characters: S for A, H is missing
    assert errors([["a"] * 9], [["b"]]) == (9, 1)
