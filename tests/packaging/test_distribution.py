"""Test that a wheel built from a clean copy has the right files and runs without the checkout."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import sparsync

ROOT = Path(__file__).parents[2]
LARGEST_WHEEL = 2 * 2**20  # bytes

SMOKE = """
import torch, sparsync
from sparsync import kernels
reduced = sparsync.allreduce(torch.arange(1000.0), sparsync.connect(), k=3)
print(sparsync.__version__, reduced.total.indices.tolist(), sparsync.__file__)
"""


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build an sdist from the files in git, and a wheel from the sdist, as pip would."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    environment = {
        **os.environ,
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_BUILD_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), env=environment)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_sdist_has_all_that_builds_tests_and_documents_it(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("LICENSE", "README.md", "native/CMakeLists.txt", "src/sparsync/py.typed"):
        assert needed in names
    assert {"tests", "docs", "examples"} <= {name.partition("/")[0] for name in names}
    assert not {n for n in names if n.endswith((".so", ".pyc")) or n.startswith((".venv", "build"))}


@pytest.mark.slow
def test_the_wheel_is_small_and_pins_no_torch(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
    assert built[1].stat().st_size < LARGEST_WHEEL
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"sparsync"}
    needs = [need for need in about.get_all("Requires-Dist") if "extra ==" not in need]
    assert "torch>=2.7" in needs and len(needs) == 5
    assert not [need for need in needs if "<" in need or "==" in need]
    assert {"linear", "mpi", "report"} <= set(about.get_all("Provides-Extra"))


@pytest.mark.slow
def test_the_wheel_runs_where_there_is_no_checkout(built, tmp_path):
    """The wheel may use torch and other dependencies of this environment, but not its sparsync."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    lent = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "lent.pth").write_text(f"import sys; sys.path.append({str(lent)!r})\n")
    version, *found = run(python, "-I", "-c", SMOKE, cwd=tmp_path).split(maxsplit=1)
    assert version == sparsync.__version__
    assert found[0].startswith("[997, 998, 999]") and str(site) in found[0]
    assert "doctor" in run(python, "-m", "sparsync", cwd=tmp_path)
