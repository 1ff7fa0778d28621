"""Test the reports of ``sparsync linear`` on virtual ranks."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.datasets import dump_svmlight_file

from sparsync.cli.app import exit_code, make_app
from sparsync.cli.linear import command as linear
from sparsync.cli.linear.settings import LinearSettings
from sparsync.published.sparcml.linear import LinearModel
from tests.tables import cases
from tests.unit.linear_problems import make_data


@pytest.fixture
def file(tmp_path):
    """Write a data set of 200 rows and 40 columns in svmlight format."""
    features, labels = make_data(200)
    path = tmp_path / "data.svm"
    dump_svmlight_file(csr_matrix(features), labels, str(path))
    return path


@pytest.mark.parametrize("solver", ["sgd", "scd"])
def test_exchanges_are_compared_with_dense(command, file, tmp_path, solver):
    own = ["--batch", 10] if solver == "sgd" else ["--coordinates", 5]
    options = ["--data", file, "--solver", solver, "--ranks", 3, "--epochs", 2, *own]
    more = ["--compare", "dense,ring", "--json", tmp_path / "new" / "l.json"]
    code, out, err = command("linear", "--transport", "sim", *options, *more)
    assert (code, err) == (0, "")
    out = " ".join(out.split())
    assert "3 virtual ranks in one process; logistic by" in out
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
        # virtual seconds are the same on every machine, but the seconds of the computation are not
        for whole, part in zip(result["seconds"], result["seconds_communication"], strict=True):
            assert whole > part > 0
        expected = sum(dense["seconds_communication"]) / result["speedup_communication"] / 2
        assert result["seconds_communication"][0] == pytest.approx(expected, rel=0.1)
        both = zip(result["bytes_updates"], result["bytes_sent"], strict=True)
        assert all(sent < whole for sent, whole in both) == (solver == "scd")


def test_the_losses_do_not_depend_on_the_staleness_of_nothing(command, file, tmp_path):
    def losses(*options):
        path = tmp_path / "l.json"
        own = ["--transport", "sim", "--data", file, "--batch", 10, "--json", path]
        assert command("linear", *own, *options)[0] == 0
        [result] = json.loads(path.read_text())
        return result["objective"]

    synchronous = losses()
    assert losses("--aggregation", "async", "--staleness", 0) == synchronous
    late = losses("--aggregation", "async", "--staleness", 2)
    assert late != synchronous and late[-1] < late[0]


@pytest.mark.slow
def test_sparse_exchanges_of_trigrams_send_a_tenth(tmp_path):
    """SparCML, section 8.2: trigram gradients are sparse."""
    small = {"ranks": 8, "rows": 400, "epochs": 1, "steps": 1, "batch_size": 50}
    exchanges = ("split-allgather", "dense")
    settings = LinearSettings(**small, exchanges=exchanges, transport="sim")
    sparse, dense = linear.train_linear(settings)
    assert sparse.dimensions == 3_231_961
    assert sparse.bytes_ratio > 10 and sparse.speedup_communication > 10
    np.testing.assert_allclose(sparse.objective, dense.objective, rtol=1e-6)


@pytest.mark.slow
def test_sgd_reaches_scds_accuracy_of_trigrams_at_its_defaults():
    """After equally many epochs, about 96 % of 5,000 held-out rows are right (std. error 0.28 %)."""
    chosen = (("sgd", ("split-allgather",)), ("scd", ("allgather",)))
    settings = (LinearSettings(transport="sim", solver=s, exchanges=one) for s, one in chosen)
    (sgd,), (scd,) = map(linear.train_linear, settings)
    # the number of rows depends on the version of Python
    assert sgd.rows == scd.rows > 20_000 and scd.accuracy[-1] > 0.955
    assert sgd.accuracy[-1] > scd.accuracy[-1] - 0.003


# ---- ranks that are real, models that are saved ----------------------------------------------------


def test_ranks_are_real_unless_they_are_asked_to_be_virtual(command, file):
    with pytest.raises(AssertionError, match="ranks were started"):
        command("linear", "--data", file)
    code, out, err = command("linear", "--data", file, "--network", "10gbit,1us")
    assert (code, out) == (2, "") and "--network describes the simulated network" in err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a model of rows with labels 3 and 7 and columns from 1 on; write more rows of this kind."""
    folder = tmp_path_factory.mktemp("saved")
    features, labels = make_data(400)
    labels = np.where(labels > 0, 7, 3)
    for name, rows in (("train", slice(0, 300)), ("test", slice(300, None))):
        path = str(folder / f"{name}.svm")
        dump_svmlight_file(features[rows], labels[rows], path, zero_based=False)
    model = folder / "models" / "m.npz"
    options = ["--transport", "sim", "--ranks", "3", "--data", str(folder / "train.svm")]
    arguments = ["linear", *options, "--save", str(model), "--compare", "dense"]
    assert exit_code(lambda: make_app("linear")(arguments, standalone_mode=False)) == 0
    return model, folder / "test.svm", labels[300:]


@pytest.mark.slow
def test_a_saved_model_predicts_the_labels_of_other_rows(command, saved, tmp_path):
    model, rows, labels = saved
    code, out, err = command("linear", "--predict", model, "--data", rows)
    predicted = np.array(out.split(), float)
    assert code == 0 and set(predicted) == {3, 7}
    right = (predicted == labels).mean()
    assert right > 0.85 and f"100 labels, {100 * right:.2f} % of them equal to --data's" in err
    to = ["--out", tmp_path / "new" / "labels", "--json", tmp_path / "j"]
    code, out, _ = command("linear", "--predict", model, "--data", rows, *to)
    assert (code, out) == (0, "")
    assert (tmp_path / "new" / "labels").read_text().split() == [f"{x:g}" for x in predicted]
    numbers = json.loads((tmp_path / "j").read_text())
    assert numbers == {"rows": 100, "accuracy": pytest.approx(right)}
    trained = LinearModel.load(model)
    assert (trained.labels, trained.positive, trained.base) == ((3, 7), (7,), 1)
    # rows with unknown labels, with a column that the model lacks, and with its last column
    (tmp_path / "odd.svm").write_text("0 1:1.5 400:2\n0 5:1\n")
    code, out, err = command("linear", "--predict", model, "--data", tmp_path / "odd.svm")
    one, two = trained.weights[[0, 4]]
    expected = [1.5 * one + trained.intercept, two + trained.intercept]
    assert out.split() == ["7" if score >= 0 else "3" for score in expected]
    assert code == 0 and err.endswith("2 labels\n")


def write(path, labels):
    path.write_text("".join(f"{label} {1 + row % 3}:1\n" for row, label in enumerate(labels)))
    return path


OF_A_CLASS = "12 labels (1 for 3, -1 for all others), 100.00 % of them of the class of --data's\n"


LONG = [1234566, 1234566, 1234567]


@cases(
    ([1, 2, 3], ["--positive", "3"], ["-1", "-1", "1"], OF_A_CLASS),
    # labels have all of their digits
    (LONG, [], [*map(str, LONG)], "12 labels, 100.00 % of them equal to --data's\n"),
)
def test_predicted_labels_say_what_they_are(labels, given, shown, said, command, tmp_path):
    rows, model = write(tmp_path / "r.svm", labels * 4), tmp_path / "m.npz"
    options = ["--data", rows, "--transport", "sim", "--ranks", 2, "--held-out-every", 0]
    assert command("linear", *options, *given, "--save", model)[0] == 0
    code, out, err = command("linear", "--data", rows, "--predict", model)
    assert (code, out.split()) == (0, shown * 4) and err.endswith(said)


def test_without_held_out_rows_there_is_no_accuracy(command, tmp_path):
    rows = write(tmp_path / "few.svm", [1, 2, 1])  # every tenth row is held out
    code, out, _ = command("linear", "--data", rows, "--transport", "sim", "--ranks", 2)
    assert code == 0 and "nan" not in out and "accuracy" not in out
    assert "too few rows to hold any out" in out


@cases(
    ([1, 1], [], "all rows of r.svm have the label 1; give two classes"),
    ([0, 0], [], "all rows of r.svm have the label 0; give two classes"),
    ([1, 2], ["--positive", "1,2"], "--positive has all labels of r.svm, 1, 2; leave some out"),
)
def test_rows_of_one_class_are_refused(labels, options, said, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.svm", labels)
    code, out, err = command("linear", "--data", "r.svm", "--transport", "sim", *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err


@cases(
    (["--lr", "3"], "--lr is for training; omit it, or --predict"),
    (["--compare", "dense"], "--compare is for training"),
    (["--save", "x.npz"], "--save is for training"),
    (["--staleness", "0"], "--staleness is for training"),
)
def test_options_that_a_prediction_would_ignore_are_refused(options, said, command, saved):
    model, rows, _ = saved
    code, out, err = command("linear", "--predict", model, "--data", rows, *options)
    assert (code, out) == (2, "") and said in err


def npy(save):
    """Return the bytes of a NumPy file that is not a model."""
    file = io.BytesIO()
    save(file, np.ones(3))
    return file.getvalue()


def damaged(path, **arrays):
    with np.load(path) as whole:
        np.savez(path, **{**whole, **arrays})


@cases(
    (lambda p: p.write_text("labels"), "cannot read the model"),
    (lambda p: p.write_bytes(npy(np.save)), "cannot read the model"),
    (lambda p: p.write_bytes(npy(np.savez)), "cannot read the model"),
    (lambda p: p.write_bytes(p.read_bytes()[:-40]), "cannot read the model"),
    (lambda p: damaged(p, format=np.int64(9)), "is not a model of this version"),
    (lambda p: damaged(p, indices=np.array([10**9])), "is not a model of this version"),
    (lambda p: damaged(p, size=np.int64(-1)), "is not a model of this version"),
    (lambda p: damaged(p, values=np.array(["x"])), "is not a model of this version"),
    (lambda p: p.unlink(), "is not a file"),
)
def test_a_file_that_is_no_model_is_one_clear_line(damage, said, command, saved, tmp_path):
    model, rows = shutil.copy(saved[0], tmp_path), saved[1]
    damage(Path(model))
    code, out, err = command("linear", "--predict", model, "--data", rows)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
