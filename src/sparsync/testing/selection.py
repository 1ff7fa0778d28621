"""Contract checks for a selector."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsync.selection import Selector
from sparsync.selection.selector import reaching
from sparsync.sparse import DenseVector, SparseVector
from sparsync.testing.cases import STEPS, cases, noise, same

__all__ = ["check_selector"]


def check_selector(make: Callable[[], Selector], *, exact: bool = True) -> None:
    """Check a selector's order, values, zeros, NaN and saved state.

    With ``exact``, the selector must select exactly ``min(k, nnz)`` entries at the start of a period.

    Example:
        >>> from sparsync.selection import Exact
        >>> check_selector(Exact)
    """
    for case in cases():
        first, second = make(), make()
        for step in range(STEPS):
            accumulated = case.make(0, 2, step)
            before = accumulated.clone()
            collect, state = first.collect_from(case.k, step, accumulated.dtype), first.state
            selected = first.select(accumulated, case.k, step)
            where = f"{type(first).__name__}, case '{case.name}', step {step}"
            assert torch.equal(accumulated, before), f"{where}: the input was modified"
            assert selected.size == case.size, f"{where}: wrong size"
            # collecting entries while accumulating is an optimisation that must not change the selection
            if collect is not None:
                collected = reaching(accumulated, *collect)
                other = make()
                other.state = state
                again = other.select(accumulated, case.k, step, collected)
                assert same(again, selected), f"{where}: collecting entries changed the selection"
            if isinstance(selected, DenseVector):
                continue
            selected.check()
            assert torch.equal(selected.values, accumulated[selected.indices]), f"{where}: values"
            assert bool((selected.values != 0).all()), f"{where}: a zero was selected"
            if step == 0 and exact:
                expected = min(case.k, int((accumulated != 0).sum()))
                assert selected.nnz == expected, f"{where}: {selected.nnz} entries, not {expected}"
            # the second selector continues from the first one's state, as after a checkpoint within
            # a period
            second.load_state_dict(first.state_dict() if step == 0 else second.state_dict())
            if step == 1:
                again = second.select(accumulated, case.k, step)
                assert isinstance(again, SparseVector)
                assert torch.equal(again.indices, selected.indices), f"{where}: reloaded differs"
    # a NaN must always be selected, because ranks decide only by the total whether to refuse a step
    broken = noise(0, 1, 0)
    broken[17] = float("nan")
    for step in range(2):
        selector = make()
        seen = selector.select(broken, 5, step)
        assert not bool(seen.isfinite().all()), f"{type(selector).__name__}: a NaN was not selected"
