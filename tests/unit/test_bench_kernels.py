from dataclasses import asdict

from rich.console import Console

from sparsync.cli.bench import kernels as bench


def test_every_kernel_is_compared_and_equal():
    rows = bench.bench_kernels("cpu", 20_000, 0.01, repetitions=1)
    assert {row.kernel: row.equal for row in rows} == {row.kernel: True for row in rows}
    assert {row.kernel.split()[0] for row in rows} >= {"accumulate_", "top", "merge", "pack"}
    for row in rows:
        assert row.speedup == row.seconds_torch / row.seconds
        assert row.over_add > 0
    assert next(iter(asdict(rows[0]))) == "kernel"


def test_the_table_says_which_kernel_is_wrong():
    rows = bench.bench_kernels("cpu", 3000, 0.01, repetitions=1)
    wrong = type(rows[0])(**{**asdict(rows[0]), "kernel": "sorted", "equal": False})
    console = Console(width=120)
    with console.capture() as capture:
        console.print(bench.kernel_table([*rows, wrong]))
    lines = capture.get().splitlines()
    assert [line.split()[0] for line in lines if line.rstrip().endswith("NO")] == ["sorted"]
    assert sum(line.rstrip().endswith("yes") for line in lines) == len(rows)
