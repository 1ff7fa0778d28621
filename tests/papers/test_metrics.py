"""BLEU and error rates against examples worked out by hand; sums of shares are those of the whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.workloads.base import Mean
from sparsync_papers.workloads.an4 import edit_distance, error_rate
from sparsync_papers.workloads.pairs import bleu

words = st.lists(st.sampled_from("abc"), max_size=8)
sentences = st.lists(st.tuples(words, words), max_size=5)


# ---- BLEU --------------------------------------------------------------------------------------------

CAT = ["the", "cat", "sat", "on", "the", "mat"]


def test_a_perfect_translation_has_1_and_a_foreign_one_0():
    assert bleu([CAT], [CAT]).value == 1
    assert bleu([["un", "chat", "noir", "dort", "ici"]], [CAT]).value == 0


def test_the_papers_example_of_clipped_counts():
    """Papineni et al., section 2.1: "the" is clipped at 2 of 7, and no bigram is right."""
    found = bleu([["the"] * 7], [CAT], longest=2)
    assert (found.matches, found.possible) == ((2, 0), (7, 6)) and found.value == 0


def test_precisions_and_brevity_by_hand():
    """5 words of 6: all of them, "cat sat", "sat on", "on the" of 4, and 2 of 3 trigrams are right."""
    candidate = ["cat", "sat", "on", "the", "the"]
    found = bleu([candidate], [CAT], longest=3)
    assert (found.matches, found.possible) == ((5, 3, 2), (5, 4, 3))
    assert found.value == pytest.approx((1 * 3 / 4 * 2 / 3) ** (1 / 3) * math.exp(1 - 6 / 5))


@given(sentences, sentences)
def test_bleu_adds_up_over_shares(first, second):
    def of(pairs):
        return bleu([c for c, _ in pairs], [r for _, r in pairs])

    assert of(first) + of(second) == of([*first, *second])
    value = of(first).value
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
    assert error_rate(heard, said) == Mean(3, 5)
    assert error_rate(["YES"], ["YEAH"]) == Mean(2, 4)  # characters: S for A, H is missing
    assert error_rate([["a"] * 9], [["b"]]).value == 9
