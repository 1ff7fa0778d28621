"""Test that names are found in any spelling and as in the papers, or the nearest are suggested."""

from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import tables
from sparsync.averaging.schemes import SCHEMES, averaged_by
from sparsync.errors import ConfigurationError
from sparsync.names import fold, suggestion
from sparsync.presets import PRESETS, resolve
from sparsync.published.wagma import Wagma
from sparsync.selection import SELECTORS
from sparsync.tables import ALIASES
from sparsync.updates import OUTER_SETTINGS, OuterStep
from sparsync.wire import CODECS
from tests.tables import cases

TABLES = (PRESETS, SCHEMES, CODECS, SELECTORS)
HYPHENS = ("", "_", " ", "\u2010")  # the last as PDFs print it
SPELLINGS = [str, str.upper, str.title]
SPELLINGS += [lambda name, hyphen=hyphen: name.replace("-", hyphen) for hyphen in HYPHENS]

# the names in the papers and the rows for them: Ok-Topk, Table 1; SparCML, section 5.3; RedSync,
# section 6; WAGMA-SGD, section 5
OF_PAPERS = {
    **{"TopkA": "allgather", "TopkDSA": "topkdsa", "gTopk": "gtopk", "gTop-k": "gtopk"},
    **{"Gaussiank": "gaussiank", "Gaussian-k": "gaussiank", "Ok-Topk": "oktopk"},
    **{"Ok-Topk SGD": "oktopk", "Dense": "dense", "DenseOvlp": "dense"},
    **{"SSAR_Recursive_double": "recursive-doubling", "SSAR_Split_allgather": "split-allgather"},
    **{"DSAR_Split_allgather": "dynamic", "Quantized TopK SGD": "sparcml", "SparCML": "sparcml"},
    **{"RedSync": "redsync", "RGC": "redsync", "Quantized-RGC": "redsync-quantized"},
    **{"WAGMA-SGD": "wagma", "D-PSGD": "dpsgd", "AD-PSGD": "adpsgd", "SGP": "sgp"},
    **{"Local SGD": "local", "local-SGD": "local", "Allreduce-SGD": "allreduce"},
    **{"Eager-SGD": "eager-majority", "BMUF": "bmuf", "DiLoCo": "diloco"},
    **{"Qsparse-local-SGD": "qsparse-local"},
}


def row_of(name):
    """Return the name of the preset or of the scheme."""
    [found] = [table.name_of(name) for table in (PRESETS, SCHEMES) if name in table]
    return found


@pytest.mark.parametrize(("theirs", "ours"), OF_PAPERS.items())
def test_a_papers_name_means_its_row_in_every_spelling(theirs, ours):
    assert {row_of(spelt(theirs)) for spelt in SPELLINGS} == {ours}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.group)
def test_a_row_is_found_in_every_spelling(table):
    for name in table:
        assert {table.name_of(spelt(name)) for spelt in SPELLINGS} == {name}
        assert all(table[spelt(name)] is table[name] for spelt in SPELLINGS)


def test_every_alias_means_a_row_and_no_name_means_two():
    rows = [name for table in (PRESETS, SCHEMES) for name in table]
    assert set(ALIASES.values()) <= set(rows) and len(ALIASES) > 15
    folded = [fold(name) for name in [*rows, *ALIASES]]
    assert len(folded) == len(set(folded))
    for table in TABLES:
        assert len({fold(name) for name in table}) == len(table)


def test_names_differ_by_more_than_their_spelling():
    assert fold("Ok-Topk") == fold("ok_topk") == fold("OK TOPK") == "oktopk"
    assert "oktopk+" not in PRESETS and "" not in PRESETS and "-" not in PRESETS


@cases(
    ("oktpk", "oktopk"),
    ("topk", "TopkA"),
    ("SSAR_Recursive_doubling", "SSAR_Recursive_double"),
    ("DSAR_Split_alltoall", "DSAR_Split_allgather"),
    ("redsink", "redsync"),
    ("RCG", "RGC"),
    ("gausian-k", "gaussiank"),
)
def test_an_unknown_name_gets_its_nearest_ones(given, nearest):
    with pytest.raises(ConfigurationError) as caught:
        resolve(given)
    assert str(caught.value).startswith(f"unknown algorithm {given!r} (did you mean {nearest}")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_like_none_gets_all():
    with pytest.raises(ConfigurationError, match="unknown algorithm 'best'; choose one of allg"):
        resolve("best")
    assert suggestion("best", PRESETS) == ""


def test_an_installed_package_declares_aliases(monkeypatch, capsys):
    def points(group):
        named = {"sparsync.aliases": {"Their Method": "sparsync.cli.app:_GROUP", "RGC": "os:sep"}}
        return [EntryPoint(name, value, group) for name, value in named.get(group, {}).items()]

    monkeypatch.setattr(tables, "_points", points)
    assert ALIASES["their-method"] == "sparsync.commands"
    assert ALIASES["rgc"] == "redsync"  # the rooms come first
    assert "Their Method" in list(ALIASES) and list(ALIASES).count("RGC") == 1
    taken = EntryPoint("topk-a", "sparsync.presets:PRESETS", "sparsync.algorithms")
    monkeypatch.setattr(tables, "_points", lambda group: [taken] * (group == taken.group))
    assert "topk-a" not in list(PRESETS)
    said = capsys.readouterr().err
    assert "'RGC' = 'os:sep'" in said and "'topk-a'" in said and said.count("exists already") == 2


def test_the_candidates_of_auto_may_be_the_papers():
    made = resolve("auto", candidates=("Dense", "TopkA")).make_collective()
    assert made.candidates == ("dense", "allgather")


# ---- attach -----------------------------------------------------------------------------------------


@pytest.fixture
def attach(alone):
    """Attach to a model of one rank; return the handle."""
    handles = []

    def call(algorithm=None, optimizer="SGD", **more):
        model = DistributedDataParallel(torch.nn.Linear(6, 3))
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        handles.append(sparsync.attach(model, made, algorithm, **more))
        return handles[-1]

    yield call
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("name", ["TopkA", "SSAR_Split_allgather", "RGC", "Budgeted"])
def test_attach_takes_a_papers_name(attach, name):
    assert attach(name, density=0.5).reducer.algorithm.name == PRESETS.name_of(name)


@pytest.mark.parametrize("name", ["DiLoCo", "Qsparse-local-SGD"])
def test_attach_takes_a_member_of_the_family_in_every_spelling(attach, name):
    outer = OuterStep(**OUTER_SETTINGS[SCHEMES.name_of(name)])
    assert attach(name).reducer.algorithm.name == outer.chosen.name


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in OUTER_SETTINGS])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_attach_says_in_one_line_how_a_scheme_is_called(attach, name, optimizer):
    with pytest.raises(ConfigurationError) as caught:
        attach(name.upper(), optimizer)
    said = str(caught.value)
    assert said == averaged_by(name) and "\n" not in said and "docs/averaging.md" in said
    expression = said[said.index("sparsync.averaging") : said.index("(model)")]
    assert eval(expression) is SCHEMES[name]


def test_attach_names_the_nearest_of_all_that_it_takes(attach):
    with pytest.raises(ConfigurationError, match=r"'diloko' \(did you mean diloco\?\)"):
        attach("diloko")


@cases(
    (None, {"bits": 2}, r"no option bits \(an option of quantised, sparcml\); it has model, opt"),
    ("SparCML", {"bits": 2}, r"give algorithm=sparsync.presets.resolve\('sparcml', bits=...\)"),
    ("diloco", {"period": 9}, r"OUTER_SETTINGS\['diloco'\] \| {'period': ...}\)\); it has"),
    (None, {"warmup_steps": 9}, r"compression=sparsync.Compression\(warmup_steps=...\)"),
    (None, {"timeout": 9}, r"transport=sparsync.Transport\(timeout=...\)"),
    (None, {"nonfinite": "skip"}, r"monitoring=sparsync.Monitoring\(nonfinite=...\)"),
    (None, {"momentum": 0.9}, r"correction=sparsync.Correction\(momentum=...\)"),
    (None, {"desnity": 0.1}, r"no option desnity \(did you mean density\?\); it has .*density, "),
    ("oktopk", {"qux": 1, "xyz": 2}, r"qux, xyz; it has .*; oktopk has threshold_period, "),
)
def test_attach_lists_its_options_and_where_others_belong(algorithm, options, says, attach):
    with pytest.raises(ConfigurationError, match=says) as caught:
        attach(algorithm, **options)
    assert "\n" not in str(caught.value) and "monitoring" in str(caught.value)


# ---- averagers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_an_averager_lists_its_options(name):
    with pytest.raises(ConfigurationError, match="has no option taw; it has ") as caught:
        SCHEMES[name](taw=8)
    listed = str(caught.value).partition("; it has ")[2].split(", ")
    assert {"buffers", "comm", "moments", "nonfinite", "optimizer"} < {*listed, "none"}
    assert not {"model", "unknown", "binding", "given"} & set(listed)


@cases(
    ("tau", "sync_period"), ("S", "group_size"), ("groupsize", "group_size"), ("value", "values")
)
def test_the_nearest_option_is_named_also_by_the_papers_letter(option, nearest):
    with pytest.raises(ConfigurationError, match=rf"no option {option} \(did you mean {nearest}\b"):
        Wagma(torch.nn.Linear(2, 1), **{option: 8})


@pytest.mark.parametrize(
    ("settings", "given", "meant"),
    [
        (sparsync.Compression, "warmup_step", "warmup_steps"),
        (sparsync.Transport, "time_out", "timeout or connect_timeout"),
        (sparsync.Monitoring, "non_finite", "nonfinite"),
        (sparsync.Correction, "nestrov", "nesterov"),
        (sparsync.Sentinel, "periods", "period"),
        (OuterStep, "perod", "period"),
    ],
    ids=str,
)
def test_unknown_settings_get_the_nearest_and_all_others(
    settings: type, given: str, meant: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(**{given: 1})
    said = str(caught.value)
    assert said.startswith(
        f"{settings.__name__} has no option {given} (did you mean {meant}?); it has "
    )
    assert all(field.name in said for field in fields(settings))
