"""Test the scikit-learn estimator's contract, its accuracy beside scikit-learn's own, and its ranks."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model import SGDClassifier
from sklearn.utils.estimator_checks import check_estimator

from sparsync import simulate
from sparsync.errors import DisagreementError
from sparsync.published.sparcml.linear import SparseLinearClassifier
from sparsync.published.sparcml.linear.estimator import _all_classes
from tests.tables import cases, refuses


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"solver": "scd", "epochs": 30}], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_scikit_learns_checks(options):
    check_estimator(SparseLinearClassifier(**options), on_skip=None)


@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_it_is_as_accurate_as_scikit_learns(model):
    drawn = {"n_informative": 20, "class_sep": 1.5, "random_state": 0}
    features, labels = make_classification(2000, 50, **drawn)
    features = csr_matrix(features / np.linalg.norm(features, axis=1, keepdims=True))
    training, held_out = slice(None, 1500), slice(1500, None)
    loss = {"logistic": "log_loss", "svm": "hinge"}[model]
    theirs = SGDClassifier(loss=loss, alpha=1e-4, random_state=0, max_iter=50)
    ours = SparseLinearClassifier(model, l2=1e-4, epochs=25)
    fitted = (one.fit(features[training], labels[training]) for one in (theirs, ours))
    expected, accuracy = (one.score(features[held_out], labels[held_out]) for one in fitted)
    assert expected > 0.8
    assert accuracy >= expected - 0.005


@pytest.mark.slow
def test_many_classes_are_told_one_from_the_rest():
    features, labels = (array[:600] for array in load_digits(return_X_y=True))
    names = np.array(["zero", "one", "two", "three", "4", "5", "6", "7", "8", "9"])[labels]
    ours = SparseLinearClassifier().fit(csr_matrix(features), names)
    assert ours.score(features, names) > 0.93
    shares = ours.predict_proba(features)
    assert shares.shape == (len(labels), 10)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert (ours.classes_[shares.argmax(axis=1)] == ours.predict(features)).all()


def test_an_svm_has_no_probabilities():
    assert not hasattr(SparseLinearClassifier("svm"), "predict_proba")
    assert hasattr(SparseLinearClassifier(), "predict_proba")


@refuses(
    ({"model": "ridge"}, "unknown model 'ridge'"),
    ({"solver": "lbfgs"}, "unknown solver 'lbfgs'"),
    ({"epochs": 0}, "epochs is 0"),
    ({"dtype": "float16"}, "dtype is float16"),
)
def test_bad_options_are_one_clear_line(options):
    SparseLinearClassifier(**options).fit([[0.0], [1.0]], [0, 1])


# ---- labels of several ranks -----------------------------------------------------------------------


@cases(
    ([np.array([0, 1], np.int8), np.array([300])], [0, 1, 300], np.int64),
    ([np.array([0, 1]), np.array([1.0, 2.0])], [0, 1, 2], np.float64),
    ([np.array([True, False]), np.array([True])], [False, True], np.bool_),
    ([np.array(["b"]), np.array(["long", "a"])], ["a", "b", "long"], np.dtype("U4")),
    ([np.array(["b"], object), np.array(["a"])], ["a", "b"], object),
    ([np.array(["b", "a"]), np.array([])], ["a", "b"], np.dtype("U1")),  # a rank without rows
    ([np.array([]), np.array([])], [], np.float64),
)
def test_classes_are_those_of_all_ranks_in_one_dtype(labels, classes, dtype):
    results = simulate(lambda comm: _all_classes(comm, labels[comm.rank]), 2).results
    assert [(found.tolist(), found.dtype) for found in results] == [(classes, dtype)] * 2


def test_ranks_with_numbers_and_strings_as_labels_all_say_so():
    labels = [np.array([]), np.array([3, 4]), np.array(["a", "b"]), np.array([3])]

    async def program(comm):
        with pytest.raises(DisagreementError) as caught:
            await _all_classes(comm, labels[comm.rank])
        return str(caught.value)

    said = "type of the labels: rank 1 has numbers, rank 2 has strings; give all ranks the same"
    assert simulate(program, 4).results == [f"ranks disagree on the {said}"] * 4
