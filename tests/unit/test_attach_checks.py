"""What attach refuses or warns of: optimizers that do things twice, output layers."""

from __future__ import annotations

import pytest
import torch

from sparsync.errors import ConfigurationError
from sparsync.feedback.correction import Correction
from sparsync.feedback.schedule import Warmup
from sparsync.integrations.attach import check_optimizer
from sparsync.units import output_parameters
from tests.attaching import attach


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, r"momentum is 1.0; give a factor in \[0, 1\)"),
        ({"nesterov": True}, "nesterov=True needs a momentum > 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"clip": 0.0}, "clip is 0.0; give a norm > 0"),
        ({"clip_norm": "next"}, "clip_norm is 'next'"),
    ],
)
def test_bad_corrections_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Correction(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sentinel": 100}, r"sentinel is 100; give a sparsync.Sentinel\(period=100\)"),
        ({"compress": ["bias"]}, r"compress is \['bias'\]; give a function"),
        ({}, "got Linear; wrap it first: torch.distributed.init_process_group"),
    ],
)
def test_wrong_kinds_of_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        attach(torch.nn.Linear(1, 1), **arguments)


def test_bad_warmups_are_refused():
    with pytest.raises(ConfigurationError, match="warmup_steps is -1"):
        Warmup(-1)
    with pytest.raises(ConfigurationError, match="fractions in"):
        Warmup(5, (0.5, 2.0))
    with pytest.raises(ConfigurationError, match="need warmup_steps > 0"):
        Warmup(0, (0.5,))


@pytest.mark.parametrize("what", ["momentum", "weight_decay"])
def test_what_the_optimizer_would_do_again_is_refused(what):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, **{what: 0.5})
    check_optimizer(optimizer, Correction())
    with pytest.raises(ConfigurationError, match=f"build the optimizer with {what}=0"):
        check_optimizer(optimizer, Correction(**{what: 0.5}))


def test_momentum_correction_does_not_go_with_adam():
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    with pytest.raises(ConfigurationError, match="is for SGD, but the optimizer is AdamW"):
        check_optimizer(optimizer, Correction(0.9))


def test_adam_on_sparse_gradients_is_warned_of():
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    with pytest.warns(UserWarning, match="exchange='updates' keeps up with dense"):
        check_optimizer(optimizer, Correction(), sparse=True)
    check_optimizer(optimizer, Correction())  # dense: nothing to say
    check_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1), Correction(), sparse=True)


def test_the_output_layer_is_the_last_one():
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 3, bias=False)}
    )
    assert output_parameters(model) == ["head.weight"]
    assert output_parameters(torch.nn.ReLU()) == []


def test_a_tied_output_layer_is_found_where_it_is_registered():
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 2),
            "norm": torch.nn.LayerNorm(2),
            "head": torch.nn.Linear(2, 5, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    assert output_parameters(model) == ["embedding.weight"]


@pytest.mark.parametrize("given", ["head.weight", ["head.weigth"], ["head"]])
def test_an_unknown_output_layer_is_refused(given):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 3, bias=False)})
    with pytest.raises(ConfigurationError, match=r"give a list of names, e.g. \['head.weight'\]"):
        output_parameters(model, given)
    assert output_parameters(model) == output_parameters(model, ["head.weight"])
