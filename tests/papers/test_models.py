"""Check that the papers' models have the stated sizes, without allocating them."""

import re
from pathlib import Path

import pytest
import torch

from sparsync_papers.models import MODELS, parameter_count

ROOT = Path(__file__).parents[2]

every_model = pytest.mark.parametrize("name", sorted(MODELS))


def on_meta(name: str, **options):
    with torch.device("meta"):
        return MODELS[name].build(**options)


# the usual parameter counts of the same networks in other implementations
KNOWN_VARIANTS = (
    ("resnet50", {"classes": 1000}, 25_557_032),
    ("resnet18x4", {"width": 64}, 11_689_512),
    ("resnet34x4", {"width": 64}, 21_797_672),
)


@every_model
def test_the_table_has_the_counts_of_the_code(name):
    model = on_meta(name)
    assert parameter_count(model) == MODELS[name].parameters
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


@every_model
def test_a_size_is_the_papers(name):
    """Papers state counts, or sizes in 10^6 or 2^20 bytes, rounded up, down or "approximately"."""
    count = MODELS[name].parameters
    for stated in filter(None, MODELS[name].stated.split("; ")):
        number, *unit = stated.split()
        if not unit:
            assert f"{count:,}" == number
            continue
        last = 10.0 ** -len(number.partition(".")[2])
        sizes = [count / 1e6] if unit == ["M"] else [4 * count / 1e6, 4 * count / 2**20]
        assert any(abs(size - float(number)) < last for size in sizes), stated


def test_redsyncs_resnet50_is_its_state_rounded_up():
    model = on_meta("resnet50", classes=1000)
    buffers = sum(b.numel() for b in model.buffers())
    assert 102 < 4e-6 * (parameter_count(model) + buffers) < 103


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
