"""Test the schemas of saved states: values that are refused, and values that ranks compare."""

import math

import pytest
import torch

from sparsync.errors import ConfigurationError
from sparsync.fields import (
    Common,
    Either,
    Exactly,
    Fields,
    Number,
    Values,
    check_saved,
    common_facts,
)
from sparsync.transports.agree import digest
from tests.tables import cases


@cases(
    (torch.tensor([-5]), 0.0, True, False),
    (torch.tensor([3, 0]), 0.0, True, True),
    (torch.tensor([-5]), -math.inf, True, True),
    (torch.tensor([3, -1], dtype=torch.int8), 0.0, False, False),
    (torch.tensor([0, 9], dtype=torch.uint16), 1.0, True, False),
    (torch.tensor([], dtype=torch.int64), 0.0, True, True),
    (torch.tensor([0.5, -0.5]), 0.0, True, False),
    (torch.tensor([math.nan, -0.5]), 0.0, False, False),
    (torch.tensor([math.nan, math.inf]), 0.0, False, True),
    (torch.tensor([math.nan, 1.0]), 0.0, True, False),
    (torch.tensor([1j * math.inf]), -math.inf, True, False),
)
def test_no_value_is_below_the_least_whatever_its_dtype(values, least, finite, fits):
    kind = Values(tuple(values.shape), values.dtype, least, finite)
    if fits:
        check_saved(values, kind, "state", "load another")
    else:
        with pytest.raises(ConfigurationError, match=r"the saved state is .* expected"):
            check_saved(values, kind, "state", "load another")


def test_ranks_compare_what_is_common_in_the_alternative_that_fits():
    part = Fields({"sum": Common(Values((2,), torch.float32)), "own": Number()})
    kind = Fields({"part": Either((Exactly(None), part, Common(Number())))})

    def facts(value):
        return common_facts({"part": value}, kind, digest)["the saved part"]

    one, other = torch.zeros(2), torch.tensor([0.0, 1.0])
    assert facts({"sum": one, "own": 1}) == facts({"sum": one.clone(), "own": 2})
    found = [facts(None), facts(7), facts(8), *(facts({"sum": x, "own": 1}) for x in (one, other))]
    assert len(set(found)) == 5
