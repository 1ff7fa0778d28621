"""Test the command line's table of schemes, and the requirements of the command."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from sparsync.averaging import LocalSgd
from sparsync.averaging.averager import Averager
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.train.exchanges import HOOKS, check_algorithms, make_exchange
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS
from sparsync.updates.sync import UpdateSync
from tests.tables import cases, refused

ADAMW = {"workload": "digits", "optimizer": "adamw", "transport": "torch"}


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_a_scheme_is_made_without_arguments_and_has_its_defaults(name):
    assert isinstance(SCHEMES[name](), Averager)
    assert not set(options_of(name)) & {"model", "comm", "buffers", "optimizer", "moments"}
    check_algorithms(TrainSettings(optimizer="adamw"), [name])


@cases(
    ("--density", {"density": 0.1}, ["dense", "powersgd", "wagma", "quantised"], "oktopk"),
    ("--density", {"density": 0.1}, ["qsparse-local:density=0.2"], "qsparse-local"),
    ("--warmup-steps", {"warmup_steps": 7}, ["dense", "local"], "budgeted"),
    ("--momentum-correction", {"momentum_correction": True}, ["fp16", "wagma"], "redsync"),
    ("--buffers local", {"buffers": "local"}, ["dense", "oktopk"], "local"),
    ("--curve-keys", {"curve_keys": Path(), "transport": "zmq"}, ["dense"], "sparcml"),
)
def test_a_flag_without_effect_on_any_algorithm_is_refused(flag, given, without, having, capsys):
    settings = TrainSettings(workload="digits", optimizer="sgd", **given)
    with pytest.raises(ConfigurationError, match=f"^{flag} has no effect on {', '.join(without)};"):
        check_algorithms(settings, without)
    check_algorithms(settings, [*without, having])
    # its exchange takes them, dense included
    check_algorithms(replace(settings, space="local"), ["dense"])
    told = "which --curve-keys does not encrypt" in capsys.readouterr().err
    assert told == ("curve_keys" in given)


def test_a_name_means_one_thing():
    assert not set(SCHEMES) & {*PRESETS, *HOOKS}


def test_an_option_goes_to_the_schemes_that_have_it(alone):
    settings = TrainSettings(workload="digits", period=3, density=0.1, transport="torch")
    # one of them has a period, and another one a density
    check_algorithms(settings, ["dense", "allreduce", "local", "qsparse-local"])
    own, workload = "qsparse-local:period=5,density=0.2", settings.make_workload()
    names = "allreduce", "Local SGD", "qsparse-local", own
    made = {name: make_exchange(settings, name, workload.make_model(0)) for name in names}
    assert isinstance(made["Local SGD"].after_step.__self__, LocalSgd)
    assert made["allreduce"].options == {"buffers": "average"}
    assert made["Local SGD"].options == {"buffers": "average", "period": 3}
    chosen = made["qsparse-local"].options
    assert (chosen["period"], chosen["density"]) == (3, 0.1)
    assert (made[own].options["period"], made[own].options["density"]) == (5, 0.2)
    assert [made[name].sparse for name in made] == [False, False, True, True]
    for exchange in made.values():
        exchange.close()


def test_the_outer_steps_family_is_attached_unless_buffers_stay_local(alone):
    for buffers, attached in (("average", True), ("local", False)):
        settings = TrainSettings(**ADAMW, buffers=buffers)
        model = settings.make_workload().make_model(0)
        made = make_exchange(settings, "updates", model)
        assert isinstance(made.finish.__self__, UpdateSync) is attached
        made.close()


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_what_moves_by_signs_runs_sgd_at_the_rate_that_is_scheduled(alone, buffers):
    settings = TrainSettings(**ADAMW, lr=0.003, buffers=buffers)
    workload = settings.make_workload()
    model = workload.make_model(0)
    made = make_exchange(settings, "demo", model)
    (optimizer,) = made.optimizers
    assert type(optimizer) is torch.optim.SGD and optimizer.defaults["momentum"] == 0
    assert made.options["optimizer"] == "sgd" and made.options["sign"]
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    optimizer.param_groups[0]["lr"] = 0.002  # as a schedule does
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made.after_step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    moved = moved[moved != 0].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.002), rtol=1e-3, atol=0)
    made.close()
    with pytest.raises(ConfigurationError, match=r"demo moves weights by signs.*--optimizer adamw"):
        check_algorithms(TrainSettings(workload="digits", optimizer="sgd"), ["dense", "demo"])


def test_the_default_exchange_of_updates_may_train_to_a_target():
    settings = TrainSettings(optimizer="adamw", steps=20, target_step=9)
    assert check_algorithms(settings, ["dense", "updates"]) == ("dense", "updates")
    with pytest.raises(ConfigurationError, match="leave it out for diloco, and compare the losses"):
        check_algorithms(settings, ["dense", "updates", "diloco"])


def test_an_option_that_no_algorithm_has_is_refused():
    check_algorithms(TrainSettings(period=3, space="local"), ["oktopk"])
    with refused("period is 3, but none of oktopk, allreduce has it"):
        check_algorithms(TrainSettings(period=3), ["oktopk", "allreduce"])


def test_an_installed_package_adds_a_scheme(monkeypatch):
    def points(group):
        found = [EntryPoint("theirs", "sparsync.averaging.averager:LocalSgd", group),
                 EntryPoint("wrong", "sparsync.averaging.averager:__doc__", group)]  # fmt: skip
        return found if group == "sparsync.schemes" else []

    monkeypatch.setattr("sparsync.tables._points", points)
    assert [*SCHEMES][-2:] == ["theirs", "wrong"] and SCHEMES["theirs"] is LocalSgd
    assert options_of("theirs") == {"period": 8}
    with pytest.raises(ConfigurationError, match="is a str; name a subclass of"):
        SCHEMES["wrong"]
    with pytest.raises(KeyError):
        SCHEMES["nobody's"]


def test_two_packages_with_one_name_are_refused(monkeypatch, capsys):
    """The path decides which package comes first, and ranks may have different paths."""

    def points(group):
        found = [EntryPoint(name, f"sparsync.averaging.averager:{one}", group)
                 for name, one in (("theirs", "LocalSgd"), ("Theirs", "Averager"))]  # fmt: skip
        return found if group == "sparsync.schemes" else []

    monkeypatch.setattr("sparsync.tables._points", points)
    with pytest.raises(ConfigurationError, match=r"'Theirs'.*a name that another package has"):
        SCHEMES["theirs"]
    assert not {"theirs", "Theirs"} & {*SCHEMES}
    assert capsys.readouterr().err.count("a name that another package has taken") == 2
