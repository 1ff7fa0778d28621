"""Test shapes, gradients, initial weights and receptive fields of small versions of the models."""

import pytest
import torch
import torch.nn.functional as F

from sparsync.errors import ConfigurationError
from sparsync_papers.models import MODELS

BLOCK = {"width": 8, "layers": 2, "heads": 2, "inner": 16, "vocabulary": 30}
PAIRS = {"source_vocabulary": 30, "target_vocabulary": 30, "width": 8}

SMALL = {
    "vgg16_cifar10": {"width": 2},
    "vgg16_imagenet": {"width": 2, "hidden": 8, "classes": 10},
    "alexnet": {"width": 2, "hidden": 8, "classes": 10},
    "resnet20_cifar10": {"width": 2},
    "resnet44_cifar10": {"width": 2},
    "resnet110_cifar10": {"width": 2},
    "resnet50": {"width": 2, "classes": 10},
    "resnet18x4": {"width": 4, "classes": 10},
    "resnet34x4": {"width": 4, "classes": 10},
    "lstm_an4": {"bins": 41, "width": 8, "layers": 3, "channels": 2, "lookahead": 3},
    "bert": {**BLOCK, "positions": 12},
    "transformer_wmt17": BLOCK,
    "navigation": {"width": 2, "hidden": 8},
    "lstm_ptb": {"vocabulary": 30, "width": 8},
    "lstm_wikitext2": {"vocabulary": 30, "width": 8},
    "encoder_decoder_lstm": PAIRS,
    "encoder_decoder_hansards": PAIRS,
}

every_model = pytest.mark.parametrize("name", sorted(MODELS))


def small(name, *, seed=0, **options):
    torch.manual_seed(seed)
    return MODELS[name].build(**{**SMALL[name], **options})


def tokens(batch, positions):
    return torch.randint(1, 30, (batch, positions))


def inputs_of(name):
    """Return a batch of two, and the shapes of the outputs."""
    torch.manual_seed(1)
    if name == "lstm_an4":
        return (torch.randn(2, 1, 41, 15),), [(2, 8, 29)]
    if name == "bert":
        return (tokens(2, 9), torch.randint(2, (2, 9))), [(2, 9, 30), (2, 2)]
    if name in ("transformer_wmt17", "encoder_decoder_lstm", "encoder_decoder_hansards"):
        return (tokens(2, 7), tokens(2, 5)), [(2, 5, 30)]
    if name in ("lstm_ptb", "lstm_wikitext2"):
        return (tokens(2, 9),), [(2, 9, 30)]
    if name == "navigation":
        return (torch.randn(3, 2, 1, 256, 256), torch.randn(3, 2, 3), torch.randint(5, (3, 2))), [
            (3, 2, 4),
            (3, 2),
        ]
    side = 64 if name == "alexnet" else 32
    return (torch.randn(2, 3, side, side),), [(2, 10)]


def outputs_of(model, inputs):
    outputs = model(*inputs)
    return [o for o in outputs if torch.is_tensor(o)] if isinstance(outputs, tuple) else [outputs]


@every_model
def test_shapes_are_as_documented_and_every_parameter_has_a_gradient(name):
    model = small(name)
    inputs, shapes = inputs_of(name)
    outputs = outputs_of(model, inputs)
    assert [tuple(o.shape) for o in outputs] == shapes
    assert all(o.dtype == torch.float32 for o in outputs)
    sum(o.square().sum() for o in outputs).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_convolutions_start_as_he_says():
    for model in (small("vgg16_cifar10", width=16), small("resnet20_cifar10", width=16)):
        convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        for m in convolutions[1:]:  # the first has few weights
            wanted = (2 / (m.out_channels * m.kernel_size[0] ** 2)) ** 0.5
            assert m.weight.std().item() == pytest.approx(wanted, rel=0.1)
            assert m.bias is None or not m.bias.any()


def test_speech_hears_no_further_than_documented():
    """With a lookahead of 20, the receptive field reaches 27 positions ahead."""
    model = small("lstm_an4", lookahead=3).eval()
    utterance = torch.randn(1, 1, 41, 60)
    padded = torch.cat((utterance, torch.randn(1, 1, 41, 20)), -1)
    differing = (model(utterance) - model(padded)[:, :30]).abs().amax(-1)[0] > 1e-6
    assert not differing[: 30 - 3 - 7].any()
    assert differing[-1]


@pytest.mark.parametrize(
    "name", ["bert", "transformer_wmt17", "encoder_decoder_lstm", "encoder_decoder_hansards"]
)
def test_padding_changes_nothing(name):
    model = small(name).eval()
    (source, second), _ = inputs_of(name)
    longer = F.pad(source, (0, 3))  # token 0
    if name == "bert":
        words, sentences = model(source, second)
        padded_words, padded_sentences = model(longer, F.pad(second, (0, 3)))
        torch.testing.assert_close(padded_words[:, :9], words)
        torch.testing.assert_close(padded_sentences, sentences)
    else:
        torch.testing.assert_close(model(longer, second), model(source, second))


@pytest.mark.parametrize(
    "name", ["transformer_wmt17", "encoder_decoder_lstm", "lstm_ptb", "lstm_wikitext2"]
)
def test_no_position_sees_those_after_it(name):
    model = small(name).eval()
    (*before, target), _ = inputs_of(name)
    changed = target.clone()
    changed[:, 3] = target[:, 3] % 29 + 1
    difference = (model(*before, changed) - model(*before, target)).abs().amax(-1)
    assert (difference[:, :3] < 1e-6).all()
    assert (difference[:, 3] > 0).all()


def test_bert_tells_orders_and_segments_apart():
    model = small("bert").eval()
    (inputs, segments), _ = inputs_of("bert")
    words, _ = model(inputs, segments)
    assert not torch.allclose(model(inputs.flip(1), segments)[0].flip(1), words)
    assert not torch.allclose(model(inputs, 1 - segments)[0], words)
    assert torch.equal(model(inputs)[0], model(inputs, torch.zeros_like(inputs))[0])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigurationError, match="width is 9, expected an even number"):
        small("transformer_wmt17", width=9, heads=3)
    with pytest.raises(ConfigurationError, match="bins is 40, expected at least 41"):
        small("lstm_an4", bins=40)
    with pytest.raises(ConfigurationError, match=r"13 tokens .* at most 12"):
        small("bert")(tokens(1, 13))


def test_the_navigation_policy_remembers_until_an_episode_begins():
    model = small("navigation").eval()
    (images, goals, _), _ = inputs_of("navigation")
    last = torch.tensor([[0, 0], [2, 0], [1, 3]])  # the second row's episode begins at step 1
    logits, values, _ = model(images, goals, last)
    late, late_values, _ = model(images[1:], goals[1:], last[1:])
    torch.testing.assert_close(logits[1:, 1], late[:, 1])
    torch.testing.assert_close(values[1:, 1], late_values[:, 1])
    assert not torch.allclose(logits[1:, 0], late[:, 0])
    _, _, state = model(images[:1], goals[:1], last[:1])
    torch.testing.assert_close(model(images[1:], goals[1:], last[1:], state)[0], logits[1:])


def test_the_navigation_policy_refuses_other_images_and_odd_widths():
    model = small("navigation")
    with pytest.raises(
        ConfigurationError, match=r"images have shape .*expected \(1, 1, 1, 256, 256\)"
    ):
        model(torch.zeros(1, 1, 3, 256, 256), torch.zeros(1, 1, 3), torch.zeros(1, 1).long())
    with pytest.raises(ConfigurationError, match="width is 3"):
        small("navigation", width=3)
