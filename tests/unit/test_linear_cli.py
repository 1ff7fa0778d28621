"""``sparsync linear`` on virtual ranks: what it reports."""

import json

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.datasets import dump_svmlight_file

from sparsync.cli.linear import command as linear
from sparsync.cli.linear.settings import LinearSettings
from tests.unit.linear_problems import make_data


@pytest.fixture
def file(tmp_path):
    """A data set of 200 rows and 40 columns in svmlight form."""
    features, labels = make_data(200)
    path = tmp_path / "data.svm"
    dump_svmlight_file(csr_matrix(features), labels, str(path))
    return path


@pytest.mark.parametrize("solver", ["sgd", "scd"])
def test_exchanges_are_compared_with_dense(command, file, tmp_path, solver):
    own = ["--batch", 10] if solver == "sgd" else ["--coordinates", 5]
    options = ["--data", file, "--solver", solver, "--ranks", 3, "--epochs", 2, *own]
    more = ["--compare", "dense,ring", "--json", tmp_path / "new" / "l.json"]
    code, out, err = command("linear", *options, *more)
    assert (code, err) == (0, "")
    out = " ".join(out.split())
    assert "ratio" in out and "bit-identical" in out and "180 rows, 37 weights" in out
    results = json.loads((tmp_path / "new" / "l.json").read_text())
    first = "allgather" if solver == "scd" else "split-allgather"
    assert [result["exchange"] for result in results] == [first, "dense", "ring"]
    dense = results[1]
    assert dense["speedup"] == dense["bytes_ratio"] == 1 and dense["objective_difference"] == 0
    for result in results:
        assert result["replicas_equal"] and result["transport"] == "sim"
        assert len(result["objective"]) == 3 > len(result["bytes_sent"])
        assert result["objective"] == pytest.approx(dense["objective"], rel=1e-6)
        assert result["objective"][2] < result["objective"][0]
        assert result["accuracy_on"] == "held-out rows" and 0.5 < result["accuracy"][-1] <= 1
        # virtual seconds are the same on every machine; those of the computation are not
        for whole, part in zip(result["seconds"], result["seconds_communication"], strict=True):
            assert whole > part > 0
        assert result["seconds_communication"][0] == pytest.approx(
            sum(dense["seconds_communication"]) / result["speedup_communication"] / 2, rel=0.1
        )
        updates = [
            sent < whole
            for sent, whole in zip(result["bytes_updates"], result["bytes_sent"], strict=True)
        ]
        assert all(updates) == (solver == "scd")


def test_the_losses_do_not_depend_on_the_staleness_of_nothing(command, file, tmp_path):
    def losses(*options):
        path = tmp_path / "l.json"
        assert command("linear", "--data", file, "--batch", 10, "--json", path, *options)[0] == 0
        [result] = json.loads(path.read_text())
        return result["objective"]

    synchronous = losses()
    assert losses("--aggregation", "async", "--staleness", 0) == synchronous
    late = losses("--aggregation", "async", "--staleness", 2)
    assert late != synchronous and late[-1] < late[0]


@pytest.mark.slow
def test_sparse_exchanges_of_trigrams_send_a_tenth(tmp_path):
    """SparCML, section 8.2: trigram gradients are sparse."""
    settings = LinearSettings(
        ranks=8, rows=400, epochs=1, steps=1, batch_size=50, exchanges=("split-allgather", "dense")
    )
    sparse, dense = linear.train_linear(settings)
    assert sparse.dimensions == 3_231_961
    assert sparse.bytes_ratio > 10 and sparse.speedup_communication > 10
    np.testing.assert_allclose(sparse.objective, dense.objective, rtol=1e-6)
