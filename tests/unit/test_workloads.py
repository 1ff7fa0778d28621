"""Text and model: a function of their arguments, of nothing else."""

from dataclasses import replace

import pytest
import torch

from sparsync.errors import ConfigurationError
from sparsync.workloads.byte_transformer import ByteTransformer
from sparsync.workloads.text import ByteText, standard_library_files

SMALL = {"context": 8, "width": 16, "layers": 1, "heads": 2}


@pytest.fixture
def library(tmp_path):
    """Forty files of twenty bytes each, and some that are not to be read."""
    for number in range(1, 41):
        (tmp_path / f"module_{number:02}.py").write_bytes(f"{number:02}".encode() * 10)
    for skipped in ("test/a.py", "json/tests/b.py", "site-packages/c.py", "notes.txt"):
        path = tmp_path / skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("never read this")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    return tmp_path


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in (900, 90))
    return ByteText(*parts, context=8)


def test_every_twentieth_file_is_held_out(library):
    text = ByteText.of_standard_library(root=library, context=8)
    read = [p for p in standard_library_files(library) if p.exists()]
    assert [p.name for p in read] == [f"module_{n:02}.py" for n in range(1, 41)]
    # "dangling.py" sorts first and counts: files 20 and 40 of the list are modules 19 and 39
    assert bytes(text.held_out.tolist()) == b"19" * 10 + b"39" * 10
    assert text.training.numel() == 38 * 20


def test_max_bytes_cuts_the_text(library):
    text = ByteText.of_standard_library(root=library, context=8, max_bytes=433)
    assert text.training.numel() + text.held_out.numel() == 433


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="too short"):
        ByteText.of_standard_library(root=tmp_path)


def test_the_real_library_is_there_and_real_text():
    text = ByteText.of_standard_library(max_bytes=2_000_000)
    assert text.training.numel() + text.held_out.numel() == 2_000_000
    assert b"def __init__(self" in bytes(text.training.tolist())


def test_a_batch_is_a_function_of_seed_step_and_rank(text):
    def batch(**changed):
        return text.batch(**{"seed": 0, "step": 0, "rank": 0, "batch_size": 4, **changed})[0]

    assert torch.equal(batch(), batch())
    for changed in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(batch(), batch(**changed)), changed
    assert batch(batch_size=3).shape == (3, 8)


def test_targets_are_the_next_bytes(text):
    for tokens, targets in (text.batch(seed=0, step=0, rank=0, batch_size=4), text.evaluation(5)):
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_every_byte_of_the_training_text_can_be_a_target(text):
    shortest = replace(text, training=text.training[:9])
    tokens, targets = shortest.batch(seed=0, step=0, rank=0, batch_size=2)
    assert torch.equal(targets[0], shortest.training[1:].long())
    assert torch.equal(tokens[0], shortest.training[:8].long())


def test_evaluation_spans_the_held_out_text(text):
    tokens, targets = text.evaluation(5)
    assert torch.equal(tokens[0], text.held_out[:8].long())
    assert torch.equal(targets[-1], text.held_out[-8:].long())
    assert text.evaluation(1)[0].shape == (1, 8)


def weights(**options):
    return torch.cat([p.detach().flatten() for p in ByteTransformer(**options).parameters()])


def test_weights_are_a_function_of_the_seed():
    first = weights(seed=3, **SMALL)
    torch.rand(7)  # the global generator has no part in it
    assert torch.equal(weights(seed=3, **SMALL), first)
    assert not torch.equal(weights(seed=4, **SMALL), first)


def test_the_model_is_of_the_size_that_the_demo_needs():
    assert 1_000_000 < weights().numel() < 2_000_000


def test_the_model_does_not_see_the_future():
    model = ByteTransformer(**SMALL)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigurationError, match="heads"):
        ByteTransformer(width=10, heads=3)
