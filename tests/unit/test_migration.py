"""Run docs/migration.md's examples on two ranks: every "after", and PyTorch's "before"."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsync

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()

# a bold marker, at most one sentence, then a code block
JOBS = re.compile(
    r"^(## .+?)$|^\*\*((?:Before|After)[^*]*)\*\*[^\n]*\n\n```python\n(.*?)^```$", re.M | re.S
)
BEGINNING = re.search(r'^```python title="job.py, the beginning"\n(.*?)^```$', PAGE, re.M | re.S)[1]

# runs an example, and prints whether it learns and whether ranks end with the same weights
CHECKED = """
def check(name, code):
    namespace = dict(globals())
    x, y = loader[0]
    first = loss_function(Net()(x), y).item()
    exec(compile(code, name, "exec"), namespace)
    model, sync = namespace["model"], namespace.get("sync")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(everyone, flat)
    equal = all(torch.equal(theirs, flat) for theirs in everyone)
    last = loss_function(model(x), y).item()
    if rank == 0:
        print(f"{name} | equal {equal} | learns {last < 0.8 * first} | {first:.3f} {last:.3f}")
    if sync is not None:
        sync.close()


for name, code in JOBS.items():
    check(name, code)
dist.destroy_process_group()
"""


def jobs() -> dict[str, str]:
    """Return every example of the page, by heading and marker."""
    found, heading = {}, ""
    for title, marker, code in JOBS.findall(PAGE):
        if title:
            heading = title.removeprefix("## ")
        else:
            assert (heading, marker) not in found
            found[f"{heading} / {marker}"] = code
    return found


def runs_here(name: str) -> bool:
    return "After" in name or name.startswith("PyTorch")


def test_the_page_has_a_before_and_an_after_of_everything():
    headings = re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    assert [h.split(":")[0] for h in headings] == ["DeepSpeed", "PyTorch", "Horovod", "Horovod"]
    for heading in headings:
        mine = [name.split(" / ")[1] for name in jobs() if name.startswith(heading)]
        assert mine[0] == "Before", heading
        assert any(marker.startswith("After") for marker in mine), heading
    blocks = len(re.findall(r"^```python", PAGE, flags=re.MULTILINE))
    assert blocks == len(jobs()) + 1, "a block without a marker is not run"
    assert PAGE.count("**Stay**") == len(headings)


def test_every_before_is_a_program():
    for name, code in jobs().items():
        ast.parse(code, name)


@pytest.mark.gloo
@pytest.mark.slow
def test_every_after_trains_on_two_ranks(tmp_path):
    mine = {name: code for name, code in jobs().items() if runs_here(name)}
    script = tmp_path / "job.py"
    script.write_text(f"{BEGINNING}\nJOBS = {mine!r}\ntorch.set_num_threads(1)\n{CHECKED}")
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    command = [*launcher, "--nproc-per-node", "2", script]
    captured = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    process = subprocess.run(command, cwd=tmp_path, **captured)
    assert process.returncode == 0, process.stderr
    lines = [line.split(" | ") for line in process.stdout.splitlines() if " | " in line]
    assert [name for name, *_ in lines] == list(mine)
    # the warning of attach about an unsuitable optimizer
    assert "UserWarning" not in process.stderr
    for name, equal, learns, losses in lines:
        assert (equal, learns) == ("equal True", "learns True"), (name, losses)
    assert all((tmp_path / name).is_dir() for name in ("onebit", "checkpoints"))


def test_what_the_page_names_is_there():
    names = set(re.findall(r"sparsync\.(\w+)", PAGE)) - {"presets", "wire"}
    assert {name for name in names if not hasattr(sparsync, name)} == set()
