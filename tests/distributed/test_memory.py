"""Check ``attach``'s memory besides the residual, as counted by the kernel (``benchmarks/memory.py``)."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import memory

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc"),
]

P = 2
WORDS_PER_ENTRY = (
    24  # words per entry, for the entries held at once: selected, dealt, summed, chosen
)
VIEW = {"gradient_as_bucket_view": True}


def test_peak_memory_over_dense_is_the_residual_and_little_more():
    n = memory.elements(memory.WIDTH)
    k = memory.DENSITY * n
    plain = memory.Case(ddp=VIEW, malloc=memory.FIXED)
    attached = replace(plain, attached={"algorithm": "budgeted", "density": memory.DENSITY})
    more = memory.measure(P, attached) - memory.measure(P, plain)
    words = more / memory.WORD_BYTES
    assert words > 0.9 * n, f"the residual alone is {n} words; the measurement misses it"
    # a second copy of n elements would stand out
    assert words <= n + n / P + WORDS_PER_ENTRY * k, f"{words / n:.2f} n"
