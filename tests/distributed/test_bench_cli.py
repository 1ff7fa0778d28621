"""Run ``sparsync bench`` on real processes: over gloo, over ZeroMQ, in the lab, under a launcher."""

import dataclasses
import json

import pytest

from sparsync.cli.bench.command import BenchSettings, bench
from sparsync.cli.bench.rows import ratios
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS

from .commands import run_well, torchrun

pytestmark = pytest.mark.gloo

SETTINGS = BenchSettings(
    tuple(PRESETS), ranks=3, sizes=(6000,), densities=(0.05,), steps=3, warmup=1, transport="torch"
)

COMPARED = ("dense", "allgather", "budgeted", "halving", "oktopk", "topkdsa", "ring", "sparcml")


@pytest.mark.slow
def test_processes_and_simulator_agree():
    settings = dataclasses.replace(SETTINGS, collectives=COMPARED)
    measured = bench(settings)
    # the processes repeat the steps to time the exchange alone
    simulated = bench(dataclasses.replace(settings, transport="sim", steps=6))
    for real, virtual in zip(measured, simulated, strict=True):
        assert real.correct and real.transport == "torch"
        assert (real.steps_verified, real.steps_total) == (7, 7)
        assert 0 < real.seconds_25 <= real.seconds_median <= real.seconds_75
        assert real.seconds_exchange_median > 0 and real.seconds_add_median > 0
        assert real.processor_exchange_median > 0 and real.processor_add_median > 0
        assert real.entries_min == virtual.entries_min
        # a native allreduce is booked by its formula, and gloo pads the messages of budgeted
        most = 3.0 if real.collective == "budgeted" else 1.02
        for volume in ("bytes_sent_max", "bytes_received_max"):
            padded = getattr(real, volume) / getattr(virtual, volume)
            assert 0.98 <= padded <= most, (real.collective, volume)


@pytest.mark.slow
def test_large_vectors_are_verified_at_their_ends_and_compared_on_every_step():
    pytest.importorskip("zmq")
    settings = dataclasses.replace(
        SETTINGS, collectives=("dense", "oktopk"), transport="zmq", verify="ends", steps=None
    )
    dense, sparse = bench(settings)
    assert (dense.transport, sparse.transport) == ("torch", "zmq")
    for row in (dense, sparse):
        assert row.correct
        assert (row.steps_verified, row.steps_total) == (2, row.warmup + 2 * row.steps + 1)
        assert 3 <= row.steps <= 20
        assert row.lab is row.wire_seconds is row.bytes_kernel_max is None


def test_the_lab_counts_what_crosses_its_links():
    options = {"steps": 3, "warmup": 1, "transport": "torch", "lab": "1gbit"}
    try:
        rows = bench(BenchSettings(("dense", "oktopk"), 2, (300_000,), **options))
    except ConfigurationError as error:
        pytest.skip(str(error))
    for row in rows:
        assert row.lab == 1e9 and row.correct
        # the link also counts headers and acknowledgements; evidence and barriers hardly matter
        payload = max(row.bytes_sent_max, row.bytes_received_max)
        assert payload < row.bytes_kernel_max < 1.2 * payload + 20_000
    assert rows[0].wire_seconds <= rows[0].seconds_exchange_median
    assert ratios(rows[1], rows)["speedup"] > 0


@pytest.mark.slow
def test_the_command_under_a_launcher(tmp_path):
    collective = ["--collectives", "Ok-Topk:cap=2"]
    options = ["--transport", "torch", *collective, "--size", "5000", "--steps", "2"]
    written = ["--json", f"{tmp_path}/b.json"]
    out = run_well(*torchrun(2), "-m", "sparsync", "bench", *options, *written)
    # only rank 0 prints: three tables
    assert sum("oktopk:cap=2" in line for line in out.splitlines()) == 3
    (row,) = json.loads((tmp_path / "b.json").read_text())
    assert (row["ranks"], row["transport"], row["wrong"]) == (2, "torch", 0)
