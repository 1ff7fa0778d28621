"""Test the grammar of algorithms with options on every row of the tables and every option."""

import json

import pytest

from sparsync.algorithm import Algorithm
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.bench.command import BenchSettings
from sparsync.cli.named_algorithms import algorithm_of, labels, named
from sparsync.cli.simulate import SimulationSettings
from sparsync.cli.train.exchanges import attached_as, check_algorithms, labels_of
from sparsync.cli.train.settings import TrainSettings
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS, resolve
from sparsync.published.sparcml.presets import DECIDED, EXCHANGES
from sparsync.updates import OuterStep
from tests.tables import cases, refuses

OF_PRESETS = [(name, option) for name, row in PRESETS.items() for option in row.options]
OF_SCHEMES = [(name, option) for name in SCHEMES for option in options_of(name)]
HOSTILE = ["", "0", "-1", "1.5", "nan", "inf", "-inf", "9" * 20, "1e-320"]
HOSTILE += ["none", "true", "x" * 5000]


def written(value):
    """Format a value for the command line; an ``Algorithm`` becomes its name."""
    if isinstance(value, Algorithm):
        return value.name
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ---- the grammar ------------------------------------------------------------------------------------


GROUPS = "wagma:group_size=4,dynamic=false,sync_period=none"


@cases(
    ("dense", ["dense"]),
    ("Dense, Ok-Topk ,TopkA", ["dense", "oktopk", "allgather"]),
    ("oktopk-paper:threshold_period=128", ["oktopk-paper:threshold_period=128"]),
    ("sparcml:bits=none", ["sparcml:bits=none"]),
    ("RGC:compress_thd=0", ["redsync:compress_thd=0"]),
    (GROUPS, [GROUPS]),
    (f"dense,{GROUPS},local", ["dense", GROUPS, "local"]),
    ("oktopk:cap=2,oktopk:cap=1 , floor = none", ["oktopk:cap=2", "oktopk:cap=1,floor=none"]),
    ("oktopk:Threshold-Period=8", ["oktopk:threshold_period=8"]),
    ("budgeted:codec=packed-int8", ["budgeted:codec=packed-int8"]),
    ("auto:candidates=TopkA+Dense,gain=0.2", ["auto:candidates=TopkA+Dense,gain=0.2"]),
    ("PowerSGD,FP16", ["powersgd", "fp16"]),
)
def test_a_list_is_divided_into_algorithms_and_options(text, expected):
    found = labels_of(text)
    assert list(found) == expected
    assert labels_of(",".join(found)) == found, "a label reads as itself"


@refuses(
    ("", "unknown algorithm ''; choose one of "),
    ("dense,,oktopk", "unknown algorithm ''"),
    ("cap=2", "'cap=2' follows no NAME: of an algorithm; write NAME:cap=2"),
    ("dense,cap=2", "'cap=2' follows no NAME:"),
    ("oktopk:", "oktopk: '' is not OPTION=VALUE"),
    ("oktopk:cap", "oktopk: 'cap' is not OPTION=VALUE"),
    ("oktopk:cap=1,CAP=2", "oktopk: cap is given twice"),
    ("oktopk:capp=1", r"no option capp \(did you mean cap\?\); it has balance \(true or false\), "),
    ("oktopk:capp=1", r", rotate \(true or false\), threshold_period \(a whole number or auto\)"),
    ("oktopk-paper:tau=8", r"oktopk-paper has no option tau \(did you mean repartition_period\?\)"),
    ("wagma:tau=8", r"no option tau \(did you mean sync_period\?\); it has deadline \(a number"),
    ("oktopk:threshold_period=1.5", "threshold_period is '1.5'; give a whole number or auto"),
    ("oktopk:rotate=2", "oktopk: rotate is '2'; give true or false"),
    ("sparcml:bits=3", "sparcml: bits is '3'; give 2 or 4 or 8 or none"),
    ("wagma:grouping=sync", "grouping is 'sync'; give wait-avoiding or synchronous"),
    ("budgeted:codec=whole", "budgeted: codec is 'whole'; give coo or packed or packed-int8 or "),
    ("dynamic:op=max", r"dynamic has no option op; it has always_dense \(true or false\)"),
    ("auto:machine=fast", "auto: machine is 'fast'; give none"),
    ("wagna:tau=8", r"unknown algorithm 'wagna' \(did you mean wagma or WAGMA-SGD\?\)"),
)
def test_what_cannot_be_read_is_one_line_that_lists_what_can(text):
    labels_of(text)


def test_a_scheme_among_presets_says_where_it_lives():
    with pytest.raises(ConfigurationError, match=r"wagma averages models.* sparsync train --alg"):
        labels("dense,wagma:group_size=4", PRESETS)


# ---- every row and option ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "option"), OF_PRESETS)
def test_every_option_of_a_preset_is_read_as_in_python(name, option):
    default = PRESETS[name].options[option].default
    text = f"{name}:{option}={written(default)}"
    if option == "op":  # an option of ``allreduce`` alone
        with pytest.raises(ConfigurationError, match="has no option op"):
            algorithm_of(text)
        return
    found = named(text, PRESETS)
    assert found.options == {option: default} and found.label == text
    # ``==`` alone would take 1 for True
    assert type(found.options[option]) is type(default) or isinstance(default, int | float)
    made, own = algorithm_of(text), resolve(name, **{option: default})
    assert (made.name, made.options, made.source) == (own.name, own.options, own.source)
    assert type(made.make_collective()) is type(own.make_collective())


@pytest.mark.parametrize(("name", "option"), OF_SCHEMES)
def test_every_option_of_a_scheme_is_read_as_in_python(name, option):
    default = options_of(name)[option]
    found = named(f"{name}:{option}={written(default)}", SCHEMES)
    if not isinstance(default, Algorithm):
        assert found.options == {option: default}
        SCHEMES[name](**found.options)


@pytest.mark.parametrize(("name", "option"), [*OF_PRESETS, *OF_SCHEMES])
def test_a_value_of_another_type_names_the_option_and_its_types(name, option):
    if option in ("op", "algorithm", "candidates"):
        return  # names, which are looked up where they are used
    with pytest.raises(ConfigurationError, match=rf"^{name}: {option} is 'x!'; give \w") as caught:
        labels_of(f"{name}:{option}=x!")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_bad_number_is_refused_before_the_first_step(name):
    """Each number is accepted, or refused in one line, and no other error is raised."""
    for option in PRESETS[name].options:
        for value in HOSTILE:
            try:
                algorithm_of(f"{name}:{option}={value}")
            except ConfigurationError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_bad_number_of_a_scheme_is_refused_before_ranks_start(name):
    settings = TrainSettings(optimizer="adamw")
    for option in options_of(name):
        for value in HOSTILE:
            try:
                check_algorithms(settings, [f"{name}:{option}={value}"])
            except ConfigurationError as error:
                assert "\n" not in str(error)


@refuses(
    ("allgather:cap=inf", "cap is inf; give a factor > 0"),
    ("bmuf:density=1e-320", "density is 1e-320; give the fraction"),
    ("bmuf:warmup_steps=4294967296", "warmup_steps is 4294967296; give at most 1000000"),
    ("auto:budget=nan", "budget is nan; give a number"),
    ("quantised:block=0", "block=0 entries cannot share a scale"),
    ("sparcml:block=99999999999999999999", "give at least 1 element, at most 2147483647"),
)
def test_numbers_that_would_fail_in_the_first_step_fail_at_once(text):
    attached_as(TrainSettings(), text)


@pytest.mark.parametrize("name", EXCHANGES)
def test_options_of_exchanges_are_those_that_solvers_leave_open(name):
    own = {*PRESETS[name].options} - {*DECIDED}
    open_ = {"dynamic": {"always_dense"}, "topkdsa": {"always_dense"}, "ring": {"dense"}}
    assert own == open_.get(name, set())


# ---- the commands -----------------------------------------------------------------------------------


def test_options_reach_what_they_are_options_of():
    collective = algorithm_of("Ok-Topk:threshold_period=7,cap=none,buckets=3").make_collective()
    assert (collective.threshold_period, collective.cap, collective.buckets) == (7, None, 3)
    assert algorithm_of("budgeted:codec=packed-fp32").make_collective().codec.values == "fp32"
    outer = attached_as(TrainSettings(), "DiLoCo:period=100,nesterov=false,momentum=none")
    assert isinstance(outer, OuterStep)
    assert (outer.period, outer.nesterov, outer.momentum, outer.outer_lr) == (100, False, None, 0.7)
    assert attached_as(TrainSettings(), "sparcml:bits=8").options == (("bits", 8),)


def test_labels_are_the_names_of_rows(command, tmp_path):
    both = "TopkA,oktopk-paper:threshold_period=2"
    expected = ["allgather", "oktopk-paper:threshold_period=2"]
    small = ("--ranks", 2, "--network", "1gbit,50us")
    run = ("--steps", 1, "--warmup", 0)
    files = ("--json", tmp_path / "b.json")
    code, out, err = command("bench", *small, *run, "--size", 2000, "--collectives", both, *files)
    assert (code, err) == (0, "sparsync: TopkA is allgather here\n")
    assert "oktopk-paper:threshold_period=2" in out
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [row["collective"] for row in rows] == expected
    more = ("--algorithm", both, "--model-size", 2000, "--json")
    code, out, _ = command("simulate", *small, *run, *more)
    assert [row["algorithm"] for row in json.loads(out)] == ["Dense", "DenseOvlp", *expected]
    code, out, _ = command("plan", *small, *more, "-")
    assert sorted(row["collective"] for row in json.loads(out)["table"]) == expected


def test_the_baselines_of_simulate_are_not_shown_twice(command):
    small = ("--ranks", 2, "--model-size", 2000, "--steps", 1, "--warmup", 0, "--json")
    names = lambda out: [row["algorithm"] for row in json.loads(out)]  # noqa: E731
    out = command("simulate", *small, "--algorithm", "Dense,DenseOvlp,TopkA")[1]
    assert names(out) == ["Dense", "DenseOvlp", "allgather"]
    out = command("simulate", *small, "--algorithm", "dense", "--buckets", 2)[1]
    assert names(out) == ["Dense", "DenseOvlp", "dense"]


def test_settings_made_in_python_take_the_same_text():
    cases = BenchSettings(("TopkA", "oktopk:cap=2")).cases()
    assert [case.name for case in cases] == ["allgather", "oktopk:cap=2"]
    made = SimulationSettings(("TopkA", resolve("oktopk")), baselines=False).contenders()
    assert [row.name for row in made] == ["allgather", "oktopk"]
    checked = check_algorithms(TrainSettings(), ["Dense", "WAGMA-SGD:sync_period=none"])
    assert checked == ("dense", "wagma:sync_period=none")
