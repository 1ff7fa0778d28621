"""Test that numeric arguments refuse other values in one line, before anything starts."""

import math
from dataclasses import fields, is_dataclass
from inspect import signature

import pytest

from sparsync import Compression, Correction, Monitoring, Sentinel
from sparsync.averaging.schemes import SCHEMES
from sparsync.errors import ConfigurationError, check_numbers
from sparsync.presets import PRESETS, resolve
from sparsync.updates import OuterStep

SETTINGS = [Compression, Correction, Monitoring, OuterStep, Sentinel]


def numbers(types):
    """Return the names of arguments annotated as numbers."""
    found = []
    for name, annotation in types.items():
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        parts = {part.strip() for part in (text or str(annotation)).split("|")} - {"None"}
        found += [name] if parts in ({"int"}, {"float"}) else []
    return found


def cases():
    for one in SETTINGS:
        assert is_dataclass(one)
        for name in numbers({field.name: field.type for field in fields(one)}):
            yield pytest.param(one, name, id=f"{one.__name__}.{name}")
    for preset in PRESETS:
        kinds = {name: option.annotation for name, option in PRESETS[preset].options.items()}
        for name in numbers(kinds):
            yield pytest.param(lambda preset=preset, **of: resolve(preset, **of), name,
                               id=f"{preset}.{name}")  # fmt: skip
    for scheme, averager in SCHEMES.items():
        parameters = signature(averager).parameters.values()
        for name in numbers({p.name: p.annotation for p in parameters}):
            yield pytest.param(averager, name, id=f"{scheme}.{name}")


CASES = list(cases())


def test_the_table_knows_settings_presets_and_schemes():
    known = {case.id for case in CASES}
    assert known >= {"Correction.clip", "OuterStep.outer_lr", "oktopk.cap", "wagma.deadline"}
    assert len(known) > 80


@pytest.mark.parametrize("value", [True, "3", math.nan, 1j])
@pytest.mark.parametrize(("make", "name"), CASES)
def test_what_is_no_number_is_refused(make, name, value):
    with pytest.raises(ConfigurationError, match=name) as caught:
        make(**{name: value})
    assert repr(value) in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_other_libraries_pass():
    numpy = pytest.importorskip("numpy")
    types = {"a": "int", "b": float, "c": "float | None", "d": "str"}
    check_numbers("f", types, {"a": numpy.int64(3), "b": 2, "c": None, "d": True})
    check_numbers("f", types, {"b": numpy.float32(0.5), "c": math.inf})
