"""A reducer of three small parameters, and its inputs."""

import torch

from sparsync.feedback.reducer import Reducer
from sparsync.published.oktopk import oktopk
from sparsync.units import plan_units

SIZES = {"a": 30, "b": 1, "c": 19}


def reducer_on(comm, algorithm=None, unit_bytes=None, correction=None):
    named = [(name, torch.zeros(size)) for name, size in SIZES.items()]
    units = plan_units(named, unit_bytes)
    return Reducer(comm, units, algorithm or oktopk(), 0.1, correction=correction)


def gradients(reducer, step, integers=False):
    generator = torch.Generator().manual_seed(1000 * step + reducer.comm.rank)
    drawn = [torch.randn(unit.size, generator=generator) for unit in reducer.units]
    return [(9 * g).round() for g in drawn] if integers else drawn
