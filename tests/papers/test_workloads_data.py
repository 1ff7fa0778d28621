"""Test that each of the papers' workloads reads its real format, trains, and evaluates in shares."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads import make_workload, workload_class, workload_names
from sparsync.cli.workloads.workload import Draw, Evaluation, outputs_of
from sparsync.errors import ConfigurationError

from .data_files import WRITERS, write_cifar10_binary

IN_NEED = [name for name in workload_names() if workload_class(name).reads_folder]
PLACE = {"seed": 0, "step": 0, "rank": 0, "world_size": 2, "batch_size": 2}
METRICS = {
    "imagenet": {"top-5"},
    "an4": {"WER", "CER"},
    "wikipedia": {"perplexity", "next sentence"},
    "ptb": {"perplexity"},
    "wikitext2": {"perplexity"},
    "wmt17": {"BLEU"},
    "atis": {"BLEU"},
    "hansards": {"BLEU"},
}

every_name = pytest.mark.parametrize("name", IN_NEED)


@pytest.fixture
def workload(name, tmp_path):
    write, sizes = WRITERS[name]
    write(tmp_path)
    return make_workload(name, data=tmp_path, **sizes)


def test_every_workload_that_needs_data_is_tried_here():
    assert sorted(WRITERS) == sorted(IN_NEED)


@every_name
def test_it_trains_and_is_evaluated_in_shares(name, workload):
    model = workload.make_model(seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, targets = workload.batch(Draw(**PLACE))
    loss = workload.loss(outputs_of(model, inputs), targets)
    loss.backward()
    assert loss.item() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.optim.SGD(model.parameters(), 0.01).step()
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))

    # evaluate samples one by one, because padding changes the output of AN4's LSTM
    whole = workload.evaluate(model, batch_size=1)
    assert model.training
    shares = [workload.evaluate(model, rank=rank, world_size=2, batch_size=1) for rank in range(2)]
    total = Evaluation.total(shares)
    assert (total.hits, total.count) == (whole.hits, whole.count) and whole.count
    assert total.loss == pytest.approx(whole.loss, rel=1e-4)
    figures = workload.objective.figures
    assert set(figures(whole)) == METRICS.get(name.split("-")[-1], set())
    assert figures(total) == pytest.approx(figures(whole), rel=1e-4)


@every_name
def test_batches_and_models_are_functions_of_their_arguments(name, workload):
    def flat(**changed):
        inputs, targets = workload.batch(Draw(**{**PLACE, **changed}))
        parts = [p for side in (inputs, targets) for p in (side if type(side) is tuple else [side])]
        return torch.cat([part.flatten().double() for part in parts])

    first = flat()
    assert torch.equal(flat(), first)
    changes = ({"seed": s, "step": t, "rank": r} for s in (0, 3) for t in (0, 1, 2) for r in (0, 1))
    others = [flat(**change) for change in changes]
    assert any(not torch.equal(other, first) for other in others)
    state = torch.random.get_rng_state()
    one, two, other = (next(workload.make_model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


@every_name
def test_an_empty_folder_is_refused_at_once_in_one_line(name, tmp_path):
    with pytest.raises(ConfigurationError, match=re.escape(f" in {tmp_path}; ")) as refused:
        TrainSettings(workload=name, data=tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workload": "lstm-ptb"}, "lstm-ptb needs data, which is not downloaded; give its folder"),
        (
            {"workload": "atis", "data": Path("nowhere")},
            "in nowhere, which is not a folder; give one",
        ),
        (
            {"workload": "bytes", "data": Path("here")},
            "data is here, but bytes has no data; omit it",
        ),
    ],
)
def test_data_that_is_missing_or_not_needed_is_refused(options, said):
    with pytest.raises(ConfigurationError, match=said):
        TrainSettings(**options)


def test_sizes_that_heads_do_not_divide_are_refused(tmp_path):
    for name, options in (("bert-wikipedia", {"width": 100}), ("transformer-wmt17", {"width": 32})):
        WRITERS[name][0](tmp_path)
        with pytest.raises(ConfigurationError, match="give a multiple of 64"):
            make_workload(name, data=tmp_path, **options)
    with pytest.raises(ConfigurationError, match="context is 7; give at least 8"):
        make_workload("bert-wikipedia", data=tmp_path, context=7)


def test_defaults_are_the_papers(tmp_path):
    write_cifar10_binary(tmp_path / "images")
    vgg = TrainSettings(workload="vgg16-cifar10", data=tmp_path / "images")
    assert (vgg.optimizer, vgg.lr, vgg.momentum) == ("sgd", 0.1, 0.9)
    assert (vgg.batch_size, vgg.weight_decay, vgg.clip) == (16, 1e-4, 0)
    WRITERS["bert-wikipedia"][0](tmp_path / "text")
    bert = TrainSettings(workload="bert-wikipedia", data=tmp_path / "text")
    assert (bert.optimizer, bert.lr, bert.batch_size) == ("adamw", 2e-4, 8)
    assert bert.weight_decay == 0.01
    assert (
        TrainSettings(workload="bert-wikipedia", data=bert.data, optimizer="sgd").weight_decay == 0
    )


def test_the_document_tells_of_every_workload():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert [name for name in IN_NEED if f"`{name}`" not in text] == []


@pytest.mark.gloo
@pytest.mark.slow
def test_a_papers_workload_trains_on_its_data(tmp_path):
    write_cifar10_binary(tmp_path / "data")
    command = [sys.executable, "-m", "sparsync", "train", "--workload", "resnet20-cifar10"]
    command += ["--data", str(tmp_path / "data"), "--json", str(tmp_path / "run.json")]
    command += ["--width=4", "--ranks=2", "--steps=2", "--batch-size=2", "--algorithm=budgeted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "resnet20-cifar10" in done.stdout and "loss in nats per image" in done.stdout
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["replicas_equal"] and result["steps"] == 2 and 0 <= result["accuracy"] <= 1
    assert result["weight_decay"] == 1e-4 and result["optimizer"] == "sgd"
