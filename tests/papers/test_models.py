"""The papers' models have the papers' sizes; none of them is held in memory."""

import re
from pathlib import Path

import pytest
import torch

from sparsync_papers.models import MODELS, megabytes, parameter_count

ROOT = Path(__file__).parents[2]

every_model = pytest.mark.parametrize("name", sorted(MODELS))


def on_meta(name: str, **options):
    with torch.device("meta"):
        return MODELS[name].build(**options)


# as the papers print them
STATED_COUNTS = {
    "vgg16_cifar10": 14_728_266,  # Ok-Topk, Table 2
    "lstm_an4": 27_569_568,
    "bert": 133_547_324,
    "resnet50": 25_559_081,  # WAGMA, 5.2
    "transformer_wmt17": 61_362_176,  # 5.3
}
# (size, unit, half a unit of the last digit that is printed)
STATED_SIZES = {
    "resnet44_cifar10": (2.65, 1e6, 0.005),  # RedSync, Table 1
    "vgg16_cifar10": (58.91, 1e6, 0.005),
    "alexnet": (233, 2**20, 0.5),
    "vgg16_imagenet": (528, 2**20, 0.5),
    "lstm_ptb": (264, 1e6, 0.5),
    "lstm_wikitext2": (543.5, 1e6, 0.5),  # "543": cut, not rounded
    "transformer_wmt17": (245, 1e6, 0.5),  # WAGMA, 5.3
    "encoder_decoder_lstm": (80, 1e6, 5),  # SparCML, 8.3: "approximately"
}
# the usual counts of the same networks, from their own papers' followers
KNOWN_VARIANTS = (
    ("resnet50", {"classes": 1000}, 25_557_032),
    ("resnet18x4", {"width": 64}, 11_689_512),
    ("resnet34x4", {"width": 64}, 21_797_672),
)


@every_model
def test_the_table_has_the_counts_of_the_code(name):
    model = on_meta(name)
    assert parameter_count(model) == MODELS[name].parameters
    assert megabytes(model) == pytest.approx(4e-6 * MODELS[name].parameters)
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", sorted(STATED_COUNTS))
def test_a_count_is_the_papers(name):
    assert MODELS[name].parameters == STATED_COUNTS[name]


@pytest.mark.parametrize("name", sorted(STATED_SIZES))
def test_a_size_is_the_papers(name):
    size, unit, half = STATED_SIZES[name]
    assert MODELS[name].parameters * 4 / unit == pytest.approx(size, abs=half)


def test_redsyncs_resnet50_is_its_state_rounded_up():
    model = on_meta("resnet50", classes=1000)
    buffers = sum(b.numel() for b in model.buffers())
    assert 102 < megabytes(model) + buffers * 4e-6 < 103


def test_berts_output_layer_is_not_tied():
    model = on_meta("bert")
    assert MODELS["bert"].parameters - model.token_embedding.weight.numel() == 110_106_428


@pytest.mark.parametrize(("name", "options", "count"), KNOWN_VARIANTS)
def test_variants_have_their_usual_counts(name, options, count):
    assert parameter_count(on_meta(name, **options)) == count


def test_the_document_has_the_table():
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE)
    assert {name: row.split(" | ") for name, row in rows} == {
        name: [
            model.paper,
            model.dataset,
            f"{model.parameters:,}",
            f"{model.parameters * 4e-6:,.2f}",
            model.stated or "not stated",
        ]
        for name, model in MODELS.items()
    }
