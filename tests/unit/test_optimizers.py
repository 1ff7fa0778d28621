"""Test which optimizers ``attach`` accepts, unwraps or refuses, and its messages about them."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import sparsync
from sparsync.accepted_optimizers import check_stepped, plain_optimizers, treatment_of
from sparsync.errors import ConfigurationError
from sparsync.updates import OUTER_SETTINGS, OuterAverager, OuterStep
from tests.tables import cases, refuses


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that holds another one in an attribute of any name, as SAM does."""

    def __init__(self, inner, name="base_optimizer"):
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        setattr(self, name, inner)


class Show:
    """A wrapper that exposes the inner optimizer only through a property."""

    __slots__ = ("_inner",)

    def __init__(self, inner):
        self._inner = inner

    @property
    def optimizer(self):
        return self._inner


class Bare(torch.optim.Optimizer):
    """An optimizer that does not call the constructor of ``Optimizer``."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]


class Free(torch.optim.AdamW):
    """An optimizer with two kinds of weights, like schedule-free optimizers."""

    def train(self):
        """Switch to the weights for training."""

    def eval(self):
        """Switch to the weights for evaluation."""


WRAPS = [lambda one: one, Wrapper, Show, lambda one: [Wrapper(one)]]
WRAPS += [lambda one: Wrapper(Wrapper(one), "deep"), lambda one: Wrapper(one, "optim")]


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_optimizer_that_steps_is_found(wrap):
    inner = torch.optim.AdamW(net().parameters())
    assert plain_optimizers(wrap(inner)) == [inner]
    check_stepped(wrap(inner))


def test_wrappers_may_hold_several_and_know_each_other():
    model = net()
    first, second = torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias])
    outer = Wrapper(first)
    outer.others, second.owner = [first, second], outer
    assert plain_optimizers([outer, first]) == [first, second]


@refuses(
    (lambda p: object(), "optimizer is object; give a torch.optim.Optimizer"),
    (Bare, r"Bare has no hooks.*call super\(\).__init__\(params, defaults\)"),
    (lambda p: [torch.optim.SGD(p), "SGD"], "optimizer is str"),
)
def test_what_is_no_optimizer_is_refused(made):
    sparsync.attach(net(), made(net().parameters()))


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_an_optimizer_of_another_model_is_refused(alone, exchange):
    model = torch.nn.parallel.DistributedDataParallel(net())
    with pytest.raises(ConfigurationError, match="Adam steps none of the 2 parameters of the mode"):
        sparsync.attach(model, torch.optim.Adam(net().parameters()), exchange=exchange)


def part_of(parameters):
    first, second = parameters
    whole = Wrapper(torch.optim.AdamW([first, second]))
    whole.base_optimizer = torch.optim.AdamW([first])  # the other parameter belongs to another rank
    return whole


@cases(
    (part_of, "Wrapper steps 1 of 2 parameters on this rank, .*Give each rank a whole"),
    (Free, r"Free has train\(\) and eval\(\), as schedule-free .*replicas would differ"),
    (torch.optim.LBFGS, "LBFGS compares gradients at the points where its last steps ended"),
    (
        type("MADGRAD", (torch.optim.Adam,), {}),
        "MADGRAD computes the weights from sums or older weights in its own memory",
    ),
)
def test_steps_that_cannot_be_averaged_are_refused(made, message, alone):
    model = net()
    with pytest.raises(ConfigurationError, match=message):
        sparsync.attach(model, made(model.parameters()))
    with pytest.raises(ConfigurationError, match=message):
        check_stepped(Show(made(net().parameters())))


@pytest.mark.parametrize("exchange", ["gradients", "updates"])
def test_training_on_the_cpu_leaves_a_gpu_of_the_machine_alone(alone, exchange, monkeypatch):
    def initialise():
        raise RuntimeError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    replicas = dist.group.WORLD if exchange == "gradients" else None
    with sparsync.attach(net, optimizer, exchange=exchange, replicate=replicas) as sync:
        for _ in range(2):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert sync.stats()["exchanges"] == 2
        sync.load_state_dict(sync.state_dict())
        if exchange == "updates":
            sync.finish()


def test_weights_are_not_averaged_twice(alone):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own: its torch.jit
        from torch.distributed.optim import PostLocalSGDOptimizer
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, warmup_steps=0))
    for exchange in ("auto", "updates"):
        with pytest.raises(ConfigurationError, match="PostLocalSGDOptimizer averages weights over"):
            sparsync.attach(model, outer, exchange=exchange)


def test_a_subclass_of_sgd_gets_gradients_and_a_namesake_does_not(alone, capsys):
    class MySgd(torch.optim.SGD):
        pass

    model = torch.nn.parallel.DistributedDataParallel(net())
    sync = sparsync.attach(model, Wrapper(MySgd(model.parameters(), lr=0.1)))
    assert sync.stats()["exchange"] == "gradients"
    sync.close()
    sgd = type("SGD", (torch.optim.AdamW,), {})
    model = torch.nn.parallel.DistributedDataParallel(net())
    with sparsync.attach(model, sgd(model.parameters())) as sync:
        assert sync.stats()["exchange"] == "updates"


def test_attach_says_once_what_is_done_with_the_steps(alone, capsys):
    small, large = net(), torch.nn.Linear(1_000, 1_000)
    corrected = "AdamW's steps are corrected for the noise of a single rank's gradients"
    eight = f"{corrected}; 8 bits per weight on every step, because in a model this small "
    eight += "rounding costs more than bytes (algorithm= overrides this)"
    for model, given, words in (
        (large, None, corrected),
        (small, None, eight),
        (small, "diloco", "exchanges updates: AdamW's steps are averaged as they are"),
    ):
        with sparsync.attach(model, torch.optim.AdamW(model.parameters()), given):
            said = capsys.readouterr().err.splitlines()
            assert said[0].endswith(words) and not any("exchanges" in line for line in said[1:])


def test_small_models_spare_steps_and_large_ones_bytes(alone):
    """Below a million elements, every step has an exchange, in as many bits as fit into 125 kB."""
    widths = {100: (8, 1), 400: (4, 1), 501: (2, 1), 900: (2, 1), 1_000: (2, 2)}
    for width, found in widths.items():
        model = torch.nn.Linear(width, width)
        for given in (None, "updates", OuterStep(**OUTER_SETTINGS["updates"])):
            with sparsync.attach(model, torch.optim.AdamW(model.parameters()), given) as sync:
                settings = sync.outer.settings
                assert (dict(settings.chosen.options)["bits"], settings.first_period) == found
    averager = OuterAverager(torch.nn.Linear(400, 400), **OUTER_SETTINGS["updates"])
    assert dict(averager.settings.chosen.options)["bits"] == 4 and averager.global_period == 1
    # fragments take turns within a period, and a delay is shorter than a period
    for more in ({"fragments": 2}, {"delay": 1}):
        settings = OuterStep(**{**OUTER_SETTINGS["updates"], **more}).for_size(100)
        assert settings.first_period == 2 and dict(settings.chosen.options)["bits"] == 8
    # given settings are kept
    assert OuterStep(algorithm=None, period=7).for_size(100).first_period == 7
    given = OuterStep(algorithm="quantised")
    assert given.for_size(100) is given


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_the_treatment_of_several_optimizers_is_told_apart():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    several = [getattr(torch.optim, name)(parameters) for name in ("SGD", "AdamW", "Muon")]
    several.append(torch.optim.AdamW(parameters, amsgrad=True))
    assert treatment_of(several, noise_correction=True) == (
        "AdamW's steps are corrected for the noise of a single rank's gradients, Muon's and AdamW's are "
        "lengthened, because averaging them over ranks would shorten them, SGD's are averaged as they are"
    )
    said = "SGD's and AdamW's and Muon's steps are averaged as they are"
    assert treatment_of(several, noise_correction=False) == said
