"""Write the example program for each algorithm's or scheme's page, and run it."""

from __future__ import annotations

import contextlib
import io
from typing import Any

__all__ = ["algorithm_program", "output_of", "scheme_program"]

_ALGORITHM = """\
import torch

import sparsync
from sparsync.presets import resolve
from sparsync.feedback.reducer import Reducer
from sparsync.units import plan_units

RANKS, N, K = 8, 100_000, 1_000


async def program(comm):
    gradient = torch.randn(N, generator=torch.Generator().manual_seed(comm.rank))
    reducer = Reducer(comm, plan_units([("w", gradient)]), resolve("NAME"), density=K / N)
    (average,) = await reducer.reduce([gradient])  # accumulate, select, exchange, commit
    return average.to_dense()


ran = sparsync.simulate(program, world_size=RANKS)  # virtual ranks, gigabit Ethernet
assert all(torch.equal(average, ran.results[0]) for average in ran.results)
busiest = max(max(ledger.total().sent, ledger.total().received) for ledger in ran.ledgers)
print(f"{int(ran.results[0].count_nonzero())} entries in the average, equal on {RANKS} ranks")
print(f"{busiest:,} bytes through the busiest port, {1e3 * ran.seconds:.2f} ms by the virtual clock")
"""

_SCHEME = """\
import torch

import sparsync
from sparsync.averaging.schemes import SCHEMES

RANKS, STEPS = 8, 4


async def program(comm):
    averager, model = SCHEMES["NAME"](), torch.zeros(3)
    await averager.begin(comm, model, 0)
    for step in range(STEPS):
        await comm.compute(0.010 + 0.020 * (comm.rank == step))  # one rank is late, another each step
        model = await averager.average(comm, model + comm.rank, step)
    return await averager.conclude(comm, model, STEPS)


ran = sparsync.simulate(program, world_size=RANKS)  # virtual ranks, gigabit Ethernet
assert all(torch.equal(model, ran.results[0]) for model in ran.results)
print(f"models of all ranks: {[round(x, 3) for x in ran.results[0].tolist()]}")
print(f"{1e3 * ran.seconds:.1f} ms by the virtual clock; without communication at most 60.0")
"""


def algorithm_program(name: str) -> str:
    """Return a program that runs one step of a preset on eight virtual ranks."""
    return _ALGORITHM.replace("NAME", name)


def scheme_program(name: str) -> str:
    """Return a program that averages on eight virtual ranks; on each step, a different rank is late."""
    return _SCHEME.replace("NAME", name)


def output_of(program: str) -> str:
    r"""Run a program and return its output.

    Example:
        >>> output_of("print(1 + 1)")
        '2\n'
    """
    printed = io.StringIO()
    scope: dict[str, Any] = {"__name__": "example"}
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "example", "exec"), scope)
    return printed.getvalue()
