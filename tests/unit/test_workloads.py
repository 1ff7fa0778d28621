"""Test that data and models depend only on their arguments, and the small VGG learns digits."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.workloads import make_workload, workload_class, workload_names
from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.cli.workloads.stdlib_text import ByteText, standard_library_files
from sparsync.cli.workloads.workload import (
    PADDING,
    CrossEntropy,
    Draw,
    Evaluation,
    is_hidden_matrix,
)
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.length_buckets import LineBuckets

OFFLINE = [name for name in workload_names() if not workload_class(name).reads_folder]


@pytest.fixture
def library(tmp_path):
    """Make forty files of twenty bytes each, and some that must not be read."""
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
    # "dangling.py" sorts first and counts, so files 20 and 40 of the list are modules 19 and 39
    assert bytes(text.held_out.tolist()) == b"19" * 10 + b"39" * 10
    assert text.training.numel() == 38 * 20


def test_a_python_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="too short"):
        ByteText.of_standard_library(root=tmp_path)


def test_targets_are_the_next_bytes_and_every_one_can_be_a_target(text):
    for tokens, targets in (text.batch(Draw(0, 0, 0, 1, 4)), text.evaluation(5)):
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    shortest = replace(text, training=text.training[:9])
    tokens, targets = shortest.batch(Draw(0, 0, 0, 1, 2))
    assert torch.equal(targets[0], shortest.training[1:].long())
    assert torch.equal(tokens[0], shortest.training[:8].long())


def test_evaluation_spans_the_held_out_text(text):
    tokens, targets = text.evaluation(5)
    assert torch.equal(tokens[0], text.held_out[:8].long())
    assert torch.equal(targets[-1], text.held_out[-8:].long())
    assert text.evaluation(1)[0].shape == (1, 8)


# ---- the seam ----------------------------------------------------------------------------------------

WORKLOADS = [make_workload(name, context=8 if name == "lines" else None) for name in OFFLINE]
every_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=OFFLINE)
DRAW = Draw(seed=0, step=0, rank=0, world_size=4, batch_size=3)


@pytest.fixture(autouse=True)
def little_text(text, monkeypatch):
    """Use a short text, because reading the standard library takes a second."""
    for kind in ("bytes", "lstm"):
        monkeypatch.setattr(workload_class(kind), "text", replace(text, context=8))
    lined = text.training.clone()
    lined[::7] = lined[::13] = 10  # newlines
    lines = LineBuckets(lined, longest=8, width=4)
    monkeypatch.setattr(workload_class("lines"), "parts", (lines, lines))


@every_workload
def test_models_are_functions_of_the_seed_and_of_the_size_that_is_needed(workload):
    def flat(seed):
        return torch.cat([p.detach().flatten() for p in workload.make_model(seed).parameters()])

    first = flat(3)
    before = torch.random.get_rng_state()
    assert torch.equal(flat(3), first) and not torch.equal(flat(4), first)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert 600_000 < first.numel() < 1_400_000


@every_workload
def test_batches_are_functions_of_seed_step_and_rank(workload):
    inputs, targets = workload.batch(DRAW)
    again = workload.batch(DRAW)
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    for changed in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(inputs, workload.batch(replace(DRAW, **changed))[0]), changed
    logits = workload.make_model(0)(inputs)
    assert logits.shape[:-1] == targets.shape and len(targets) == 3
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    assert torch.equal(workload.loss(logits, targets), loss)


@pytest.mark.fast(2)
@every_workload
def test_the_ranks_shares_of_the_evaluation_make_the_whole(workload):
    model = workload.make_model(0)
    whole = workload.evaluate(model)
    shares = [workload.evaluate(model, rank=rank, world_size=3) for rank in range(3)]
    total = Evaluation.total(shares)
    assert (total.hits, total.count) == (whole.hits, whole.count)
    assert total.loss == pytest.approx(whole.loss, rel=1e-5)
    inputs, targets = workload.held_out()
    with torch.no_grad():
        logits = model(inputs)
    assert whole.loss == pytest.approx(workload.loss(logits, targets).item(), rel=1e-5)
    hits = (logits.argmax(-1) == targets)[targets != PADDING]
    assert whole.accuracy == pytest.approx(hits.double().mean().item())


@every_workload
def test_hidden_matrices_are_neither_ends_nor_vectors(workload):
    model = workload.make_model(0)
    hidden = {name for name, p in model.named_parameters() if is_hidden_matrix(name, p)}
    shapes = {name: p.dim() for name, p in model.named_parameters()}
    left = {name for name, dim in shapes.items() if dim >= 2} - hidden
    assert left <= {"byte_embedding.weight", "position_embedding.weight", "head.weight"}
    assert "head.weight" in left and len(hidden) >= 4


def test_an_unknown_workload_or_option_is_refused():
    with pytest.raises(ConfigurationError, match="unknown workload 'mnist'"):
        make_workload("mnist")
    with pytest.raises(ConfigurationError, match="context is 8, but digits has no context"):
        make_workload("digits", context=8)
    assert make_workload("lstm", width=32, layers=None).width == 32


@pytest.mark.parametrize("name", ["bytes", "lstm"])
def test_language_models_remember_the_past_and_do_not_see_the_future(name):
    model = make_workload(name, width=32, layers=1).make_model(seed=0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5]) and not torch.equal(before[7], after[7])


def test_metrics_by_hand():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 4)
    for k, hits in zip((1, 2, 4, 5), (1, 2, 4, 4), strict=True):
        judge = CrossEntropy(top=k)
        judged = judge.judge_outputs(logits[None], torch.arange(4)[None])
        assert judge.figures(judged) == {f"top-{k}": hits / 4}
    judge = CrossEntropy(top=5, perplexity=True)
    for nats, count, expected in ((3 * math.log(10_000), 3, 10_000), (1e6, 1, math.inf)):
        found = judge.figures(Evaluation(nats, count=count))
        assert found == {"top-5": 0, "perplexity": pytest.approx(expected)}
    assert all(map(math.isnan, judge.figures(Evaluation()).values()))


@pytest.fixture(scope="module")
def digits():
    return DigitsWorkload()


def test_the_images_are_split_once_and_whole(digits):
    (training, labels), (held_out, _) = digits.parts
    assert (len(training), len(held_out)) == (1438, 359)
    assert training.min() == 0 and training.max() == 1 and set(labels.tolist()) == set(range(10))
    assert torch.equal(DigitsWorkload().held_out()[0], held_out)


@given(world_size=st.integers(1, 7), batch_size=st.integers(1, 500), epoch=st.integers(0, 3))
def test_an_epoch_of_all_ranks_is_every_sample_once(world_size, batch_size, epoch):
    seen = []
    for rank in range(world_size):
        shard = len(range(rank, 1438, world_size))
        start, end = epoch * shard, (epoch + 1) * shard
        steps = range(start // batch_size, -(-end // batch_size))
        place = {"seed": 1, "rank": rank, "world_size": world_size, "batch_size": batch_size}
        order = torch.cat([Draw(step=step, **place).samples(1438) for step in steps])
        offset = start - steps.start * batch_size
        mine = order[offset : offset + shard]
        assert set((mine % world_size).tolist()) == {rank}
        seen.append(mine)
    assert torch.cat(seen).sort().values.tolist() == list(range(1438))


def test_images_are_shifted_by_at_most_a_pixel(digits):
    draw = Draw(seed=0, step=0, rank=1, world_size=4, batch_size=60)
    images, targets = digits.batch(draw)
    originals, expected = (part[draw.samples(1438)] for part in digits.parts[0])
    assert torch.equal(targets, expected)
    shifts = set()
    for image, original in zip(images, originals, strict=True):
        around = F.pad(original, (1, 1, 1, 1))
        possible = {(y, x): around[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)}
        made = {shift for shift, window in possible.items() if torch.equal(image, window)}
        assert made
        shifts |= made
    assert len(shifts) == 9


def test_more_ranks_than_images_are_refused():
    with pytest.raises(ConfigurationError, match="rank 1438 has none; use at most 1438 ranks"):
        Draw(seed=0, step=0, rank=1438, world_size=1439, batch_size=1).samples(1438)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sparsync\[linear\]'"):
        DigitsWorkload().held_out()


def test_the_small_vgg_learns_the_digits(digits):
    model = digits.make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(40):
        images, targets = digits.batch(Draw(0, step, 0, 1, 64))
        optimizer.zero_grad()
        digits.loss(model(images), targets).backward()
        optimizer.step()
    assert digits.evaluate(model).accuracy > 0.5  # by chance: 0.1
