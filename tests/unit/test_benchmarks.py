"""Check that every script in ``benchmarks/`` answers ``--help`` and does nothing else."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# one process asks all scripts, because importing torch takes most of the time
ASK = """
import contextlib, io, os, runpy, sys

root, *scripts = sys.argv[1:]
written = []

def watch(event, given):
    writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
    if (writes or event == "os.mkdir") and str(given[0]).startswith(root):
        written.append(given[0])

sys.addaudithook(watch)
sys.path.insert(0, root)
for script in scripts:
    sys.argv, said, end = [script, "--help"], io.StringIO(), "no exit"
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            end = error.code
    if end or "usage: " not in said.getvalue() or written:
        print(script, "ended with", end, "said", said.getvalue()[:200], "and wrote", written)
        written.clear()
"""


def test_the_reproductions_are_counted_and_keep_the_rows_of_an_earlier_run(monkeypatch):
    pytest.importorskip("sparsync_papers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    reproduced = importlib.import_module("reproduced")
    compared = {"stated": {"what": "w | x", "says": "2", "where": "section 1"}, "ours": "3"}
    new = {"name": "wagma-fig5", "seconds": 60.0, "seeds": 3, "steps": 240}
    new["comparisons"] = [{**compared, "same": False, "why": "short"}]
    before = reproduced.kept(
        "| `wagma-fig5` | gone | p | o | yes |\n"
        "| `oktopk-table1` | words | p | o | yes |\n"
        "| `oktopk-fig8` | halving | (not in the paper) (ours) | o | yes | 2, 50 |\n"
    )
    text = reproduced.report([new], before)
    assert "| `wagma-fig5` | w / x | 2 (section 1) | 3 | **no**: short | 3, 240 |" in text
    assert "| `oktopk-table1` | words | p | o | yes | 1, - |" in text and "gone" not in text
    assert "| o | yes | 2, 50 |" in text
    assert "**1 of 2 conclusions agree" in text
    assert reproduced.count(text) == {"yes": 1, "no": 1, "yes, of this project alone": 1}


@pytest.mark.slow
def test_every_script_answers_help_and_writes_nothing(tmp_path):
    files = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]
    assert len(files) > 30
    command = [sys.executable, "-B", "-c", ASK, *map(str, (BENCHMARKS, *files))]
    where = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, **where)
    assert told.returncode == 0 and not told.stdout, told.stdout + told.stderr[-2000:]
