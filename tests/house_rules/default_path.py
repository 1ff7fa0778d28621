"""List the files whose functions run when two ranks train with the defaults, and their lines of code.

"attach" marks files whose code runs only on attaching and closing.

``python -m tests.house_rules.default_path``
"""

import sys
import threading
from functools import partial
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.cli.launch import launch

from .size import lines_of_code

SOURCE = Path(sparsync.__file__).parent
STEPS = 4  # of AdamW two exchanges
AIMS = {"SGD": (22, 3_000), "AdamW": (28, 3_800)}  # files and lines of the steps


def train(name: str) -> tuple[set[str], set[str]]:
    """Train for a few steps; return the files whose functions ran, at all and within steps."""
    seen: set[str] = set()
    in_steps: set[str] = set()
    steps = False

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_name not in ("<module>", "<lambda>"):
            seen.add(frame.f_code.co_filename)
            if steps:
                in_steps.add(frame.f_code.co_filename)

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    given = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **given)
    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else None
    threading.setprofile(note)
    sys.setprofile(note)
    parallel = DistributedDataParallel(model)
    # by default, such a small network would exchange all gradients and select none
    sync = sparsync.attach(parallel, optimizer, density=0.01 if name == "SGD" else None)
    steps = True
    for _ in range(STEPS):
        optimizer.zero_grad()
        parallel(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    steps = False
    sync.close()
    sys.setprofile(None)
    threading.setprofile(None)
    return _ours(seen), _ours(in_steps)


def _ours(names: set[str]) -> set[str]:
    return {name for name in names if Path(name).is_relative_to(SOURCE)}


def lines_of(files: set[str]) -> dict[str, int]:
    """Count the lines of code of every file, by its path inside the package."""
    paths = [Path(name) for name in sorted(files)]
    library = [path for path in paths if path.relative_to(SOURCE).parts[0] != "cli"]
    return {str(path.relative_to(SOURCE)): lines_of_code(path.read_text()) for path in library}


def told(lines: dict[str, int]) -> str:
    """Sum up files and their lines of code."""
    zmq = [count for name, count in lines.items() if name.startswith("transports/zmq/")]
    return f"{len(lines)} files, {sum(lines.values())} lines of code; zmq's {len(zmq)}, {sum(zmq)}"


if __name__ == "__main__":
    for name, (files, code) in AIMS.items():
        everything, steps = map(lines_of, launch(partial(train, name), 2, timeout=60.0))
        print(name)
        for path, count in everything.items():
            print(f"{count:5}  {'      ' if path in steps else 'attach'}  {path}")
        print(f"all: {told(everything)}")
        print(f"training steps alone: {told(steps)}; the aim is {files} files, {code} lines")
