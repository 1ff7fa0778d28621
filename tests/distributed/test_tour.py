"""The notebook runs from the first cell to the last, and its results match its text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


# this runs in a separate process, because the client of a kernel handles signals
EXECUTE = """
import sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_the_tour_trains_twice_and_draws_both(tmp_path):
    words = [sys.executable, "-c", EXECUTE, str(NOTEBOOK)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    text = "".join(one.get("text", "") for one in outputs)
    found = re.findall(
        r"^(\w+): held-out loss ([\d.]+), .* ([\d.]+) bytes per parameter$", text, re.M
    )
    (dense, loss, sent), (attached, other_loss, other_sent) = found
    assert (dense, attached, float(sent)) == ("dense", "attached", 4.0)  # 2 (P - 1) / P floats
    # every step sends 4 bits for each of 197,000 weights, in both directions
    assert 0.45 < float(other_sent) < 0.55
    assert float(other_loss) < 1.1 * float(loss) < 3.5  # from 5.5, the logarithm of 256
    assert any("image/png" in one.get("data", {}) for one in outputs)


def test_the_tour_holds_no_output_of_errors_and_no_path_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    assert all(one["output_type"] != "error" for one in outputs)
    assert not re.search(r"/(home|root|tmp|work|usr)/", "".join(str(one) for one in outputs))
