"""Linear models on real ranks get the same bits as on virtual ones."""

import numpy as np
import pytest
import torch.distributed as dist
from sklearn.datasets import dump_svmlight_file

import sparsync
from sparsync.cli.launch import launch
from sparsync.cli.linear.command import train_linear
from sparsync.cli.linear.settings import LinearSettings
from sparsync.published.sparcml.linear import SparseLinearClassifier
from tests.unit.linear_problems import make_data, shares

pytestmark = pytest.mark.gloo


def test_real_ranks_have_the_losses_of_virtual_ones(tmp_path):
    dump_svmlight_file(*make_data(300), str(tmp_path / "rows.svm"))
    options = {"data": str(tmp_path / "rows.svm"), "ranks": 2, "epochs": 2, "batch_size": 20}
    options |= {"exchanges": ("split-allgather", "dense"), "l2": 1e-3, "staleness": 2}
    virtual = train_linear(LinearSettings(**options, transport="sim"))
    real = train_linear(LinearSettings(**options, transport="torch"))
    assert real[0].objective == virtual[0].objective  # in the background, but exactly 2 steps late
    assert real[0].accuracy == virtual[0].accuracy
    assert real[1].objective == pytest.approx(virtual[1].objective, rel=1e-6)
    for ours, theirs in zip(real, virtual, strict=True):
        assert ours.replicas_equal and theirs.replicas_equal
        assert (ours.transport, theirs.transport) == ("torch", "sim")
        assert ours.seconds[0] > ours.seconds_communication[0] > 0


def fit_shares():
    data = make_data()
    labels = np.where(data[1] > 0, "yes", "no")
    rows, mine = shares((data[0], labels), dist.get_world_size())[dist.get_rank()]
    ours = SparseLinearClassifier(batch_size=7).fit(rows, mine, comm=sparsync.connect())
    return ours.classes_.tolist(), ours.score(data[0], labels)


def test_an_estimator_on_two_ranks():
    classes, accuracy = launch(fit_shares, 2)
    assert classes == ["no", "yes"] and accuracy > 0.8


def fit_without_rows():
    features, labels = make_data()
    mine = slice(60) if dist.get_rank() == 0 else slice(0)
    names = np.where(labels > 0, "yes", "no")[mine]
    given = names if len(names) else []  # an empty list has no strings
    ours = SparseLinearClassifier().fit(features[mine], given, comm=sparsync.connect())
    alone = SparseLinearClassifier().fit(features, np.where(labels > 0, "yes", "no"))
    return ours.classes_.tolist(), float(abs(ours.coef_ - alone.coef_).max())


def test_a_rank_without_rows_takes_part_in_an_estimator():
    classes, difference = launch(fit_without_rows, 2)
    assert classes == ["no", "yes"] and difference < 1e-9
