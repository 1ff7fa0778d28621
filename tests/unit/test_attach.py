"""Test refusals and warnings of ``attach``, and that a closed handle leaves no trace in training."""

from __future__ import annotations

import copy
import gc
import io
import json
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import sparsync
from sparsync.attach import check_optimizer
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.correction import Correction
from sparsync.feedback.schedule import Warmup
from sparsync.gradients.buckets import Bucket
from sparsync.gradients.replicas import ReplicaStep
from sparsync.units import output_parameters
from sparsync.wire import CODECS
from tests.attaching import attach
from tests.tables import cases, refuses


@refuses(
    ({"momentum": 1.0}, r"momentum is 1.0; give a factor in \[0, 1\)"),
    ({"nesterov": True}, "nesterov=True needs a momentum > 0"),
    ({"weight_decay": -1.0}, "weight_decay is -1.0"),
    ({"clip": 0.0}, "clip is 0.0; give a norm > 0"),
    ({"clip_norm": "next"}, "clip_norm is 'next'"),
)
def test_bad_corrections_are_refused(arguments):
    Correction(**arguments)


@refuses(
    ({"sentinel": 100}, r"sentinel is 100; give a sparsync.Sentinel\(period=100\)"),
    ({"compress": ["bias"]}, r"compress is \['bias'\]; give a function"),
    ({}, "got Linear; wrap it first: torch.distributed.init_process_group"),
)
def test_wrong_kinds_of_arguments_are_refused(arguments):
    attach(torch.nn.Linear(1, 1), **arguments)


@refuses(
    ((-1,), "warmup_steps is -1"),
    ((5, (0.5, 2.0)), "fractions in"),
    ((0, (0.5,)), "need warmup_steps > 0"),
)
def test_bad_warmups_are_refused(arguments):
    Warmup(*arguments)


@pytest.mark.parametrize("what", ["momentum", "weight_decay"])
def test_what_the_optimizer_would_do_again_is_refused(what):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, **{what: 0.5})
    check_optimizer(optimizer, Correction())
    with pytest.raises(ConfigurationError, match=f"build the optimizer with {what}=0"):
        check_optimizer(optimizer, Correction(**{what: 0.5}))


@refuses(
    (None, "density is 0.01, but algorithm= .* omit density="),
    ("diloco", "density is 0.01, but algorithm= .* omit density="),
)
def test_a_density_that_updates_would_ignore_is_refused(algorithm):
    net = torch.nn.Linear(2, 2)
    sparsync.attach(net, torch.optim.AdamW(net.parameters()), algorithm, density=0.01)


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


NESTEROV = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01}
CLIPPED = {"correction": Correction(clip=1.0)}


@cases(
    ("redsync", {"momentum": 0.9}, {}, r"momentum 0.9 .*Correction\(0.9\)"),
    ("redsync-quantized", NESTEROV, CLIPPED, r"\(0.5, nesterov=True, weight_decay=0.01\)"),
    ("redsync", {}, {"correction": Correction(0.9)}, None),
    ("redsync", {}, {}, None),
    ("redsync", {"momentum": 0.9}, {"density": 0.1}, r"momentum 0.9 .*Correction\(0.9\)"),
    ("redsync", {"momentum": 0.9}, {"density": 0.11}, None),  # entries hardly wait
    ("redsync", {"momentum": 0.9}, {"density": None}, None),  # 36 % of 90,300
    ("redsync", {"momentum": 0.9}, {"density": 1.0}, None),
    ("oktopk", {"momentum": 0.9}, {}, None),
)
def test_momentum_that_a_paper_corrects_is_warned_of_once(algorithm, sgd, given, said, alone):
    ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **sgd)
    given = {"density": 0.01, "transport": "torch", **given}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(ddp, algorithm, optimizer=[optimizer], **given).close()
    texts = [str(one.message) for one in caught]
    assert len(texts) == (said is not None) and all(re.search(said, text) for text in texts)


def test_the_output_layer_is_the_last_one():
    parts = {"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 3, bias=False)}
    assert output_parameters(torch.nn.ModuleDict(parts)) == ["head.weight"]
    assert output_parameters(torch.nn.ReLU()) == []


def test_a_tied_output_layer_is_found_where_it_is_registered():
    embedding, head = torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False)
    parts = {"embedding": embedding, "norm": torch.nn.LayerNorm(2), "head": head}
    head.weight = embedding.weight
    assert output_parameters(torch.nn.ModuleDict(parts)) == ["embedding.weight"]


@pytest.mark.parametrize("given", ["head.weight", ["head.weigth"], ["head"]])
def test_an_unknown_output_layer_is_refused(given):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 3, bias=False)})
    with pytest.raises(ConfigurationError, match=r"give a list of names, e.g. \['head.weight'\]"):
        output_parameters(model, given)
    assert output_parameters(model) == output_parameters(model, ["head.weight"])


def test_the_output_layer_of_updates_is_the_given_one(alone):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"algorithm": "redsync-quantized", "density": 0.1, "exchange": "updates"}
    named = sparsync.Compression(output_layer=["0.weight"], compress=lambda *_: True)
    with sparsync.attach(model, optimizer, **how, compression=named) as sync:
        found = [slot.name for u in sync.reducer.units if u.output for slot in u.slots]
        assert found == ["0.weight"]
    unknown = sparsync.Compression(output_layer=["0.wieght"])
    with pytest.raises(ConfigurationError, match=r"output_layer has '0\.wieght'"):
        sparsync.attach(model, optimizer, **how, compression=unknown)


@cases(
    ("sparcml", {"bits": 2}, {"bits": 2}),
    ("oktopk", {"codec": "packed", "cap": None}, {"cap": None, "codec": str(CODECS["packed"])}),
    ("dense", {}, {}),
)
def test_stats_have_the_options_that_were_given(algorithm, given, shown, alone):
    net = DistributedDataParallel(torch.nn.Linear(9, 9))
    with attach(net, algorithm, density=0.5, transport="torch", **given) as sync:
        stats = sync.stats()
    assert stats["options"] == shown and stats["algorithm"] == algorithm
    assert json.loads(json.dumps(stats)) == stats


def backward_twice(model):
    loss = model(torch.ones(3, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_closed_model_trains_as_plain_ddp(alone):
    plain = torch.nn.Linear(4, 1)
    net = DistributedDataParallel(plain)
    with attach(net, density=0.1, transport="torch") as sync:
        net(torch.ones(3, 4)).sum().backward()
        with pytest.raises(ConfigurationError, match="a second backward pass"):
            backward_twice(net)
    plain.zero_grad()
    other = DistributedDataParallel(plain)  # while the old one lives
    backward_twice(other)
    assert plain.weight.grad.tolist() == [[6.0] * 4]
    plain.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    assert plain.weight.grad.tolist() == [[3.0] * 4]
    with attach(net, density=0.5, transport="torch") as again, again.shared():  # the model's own
        net(torch.ones(3, 4)).sum().backward()
        again.finish()
    assert again.stats()["exchanges"] == 1
    assert sync.stats()["exchanges"] >= 1


def hooks_of(model):
    """Return all hooks of a module, its submodules and its parameters."""
    kinds = [its for part in model.modules() for name, its in vars(part).items() if "hook" in name]
    of_parameters = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    return [its for its in (*kinds, *sum(of_parameters, ())) if its]


@pytest.mark.parametrize("wrap", [lambda net: net, DistributedDataParallel], ids=["plain", "ddp"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_copies_of_a_closed_model_are_as_if_nothing_had_been_attached(alone, wrap, kind):
    net = wrap(torch.nn.Linear(4, 1))
    optimizer = kind(net.parameters(), lr=0.1)
    where = {} if wrap is DistributedDataParallel else {"replicate": dist.group.WORLD}
    before = set(vars(net))
    for _ in range(2):  # a model may be attached and closed any number of times
        with sparsync.attach(net, optimizer, transport=sparsync.Transport("torch"), **where):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert set(vars(net)) == before and not optimizer._optimizer_step_post_hooks
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert hooks_of(twin) == []
        twin.zero_grad()
        twin(torch.ones(3, 4)).sum().backward()
        with attach(twin, density=0.5, transport="torch", **where) as sync:
            twin(torch.ones(3, 4)).sum().backward()
            assert sync.stats()["exchanges"] == 1  # DDP calls its hook


def test_a_handle_that_goes_leaves_no_hook_on_the_optimizers_of_others(alone):
    """The hook that refuses other optimizers' steps is called for all optimizers of the process."""
    before = len(_global_optimizer_pre_hooks)
    for close in (True, False):
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        sync = sparsync.attach(net, optimizer, transport=sparsync.Transport("torch"))
        net(torch.ones(3, 4)).sum().backward()
        with pytest.raises(ConfigurationError, match="AdamW is about to step 'weight'"):
            torch.optim.AdamW(net.parameters()).step()
        optimizer.step()
        if close:
            sync.close()
        del sync, net, optimizer
        gc.collect()
        assert len(_global_optimizer_pre_hooks) == before


class TwoLosses(torch.nn.Module):
    """A module that runs two backward passes in its forward pass, like Lightning's manual mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(600, 600) for _ in range(2))  # a bucket each

    def forward(self, net, x):
        for child in (self.second, self.first):  # the first bucket is unused by the last pass
            loss = child(x).sum()
            net().reducer.prepare_for_backward([loss])
            loss.backward()
        net().require_backward_grad_sync = False


def test_two_backward_passes_within_a_forward_pass_are_two_steps(alone):
    both = TwoLosses()
    net = DistributedDataParallel(both, find_unused_parameters=True)
    with attach(net, density=1.0, transport="torch") as sync:
        for _ in range(2):
            net(lambda: net, torch.ones(1, 600))
            net.require_backward_grad_sync = True
        assert sync.stats()["exchanges"] == 4
    assert both.first.bias.grad.tolist() == [2.0] * 600


class Whole(torch.nn.Module):
    """A module with one weight that is too large to be joined with others."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 40_000))

    def forward(self, x):
        return x * self.weight.square().sum()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("wrap", [lambda net: net, DistributedDataParallel], ids=["plain", "ddp"])
def test_a_refused_step_keeps_no_gradients(alone, wrap, policy):
    """Gradients that were kept would take memory besides new gradients and DDP's buckets."""
    net = wrap(Whole())
    where = {} if wrap is DistributedDataParallel else {"replicate": dist.group.WORLD}
    with attach(net, density=0.5, transport="torch", nonfinite=policy, **where):
        raises = pytest.raises(NonFiniteGradientError) if policy == "raise" else nullcontext()
        with raises:
            net(torch.tensor(torch.nan)).backward()
        del raises  # its traceback
        kept = [one for one in gc.get_objects() if type(one) in (Bucket, ReplicaStep)]
        assert not any(type(one) is Bucket or one.taken or one.gradients for one in kept)


def test_attach_names_what_was_given_as_the_model_and_where_it_was_called():
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    for model in (optimizer, net.parameters()):
        with pytest.raises(ConfigurationError, match=f"given {type(model).__name__} as the model"):
            sparsync.attach(model, net)
    with pytest.raises(ConfigurationError, match="is not initialised"):
        sparsync.attach(net, optimizer)
    with torch.inference_mode(), pytest.raises(ConfigurationError, match="call it outside"):
        sparsync.attach(net, optimizer)
