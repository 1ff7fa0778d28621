"""Run one function on P local processes that ``mpiexec`` starts, and bring back what they return.

As a program (``python -m sparsync.cli.mpiexec FOLDER``) it is one of these processes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync.errors import ConfigurationError, SparsyncError
from sparsync.transports.launchers import destroy_process_group, detect, init_process_group

__all__ = ["in_group", "main", "mpiexec_command", "run_under_mpiexec"]

_CALL = "call.pickle"


def in_group(function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    """Call ``function(*args)`` in a launcher's rank, in a gloo group; None on other ranks than 0."""
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; mpiexec and srun do not
        here = detect()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (here.world_size if here else 1)))
    init_process_group(timeout=timeout)
    try:
        result = function(*args)
        return result if dist.get_rank() == 0 else None
    finally:
        destroy_process_group()


def mpiexec_command(ranks: int) -> list[str]:
    """Return the command that starts this many local processes, however many cores there are.

    The ``mpiexec`` next to this Python is preferred: it belongs to the MPI library of the same
    environment.

    Raises:
        ConfigurationError: there is no ``mpiexec``.
    """
    own = Path(sys.executable).parent / "mpiexec"
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise ConfigurationError(
            "no mpiexec here; pip install 'sparsync[mpi]' brings one, or install an MPI and put its "
            "mpiexec on PATH"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    command = [found, "-n", str(ranks)]
    if "Open MPI" in version.stdout or "OpenRTE" in version.stdout:
        command.append("--oversubscribe")
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


def run_under_mpiexec(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    grace: float,
) -> tuple[dict[int, Any], dict[int, str]]:
    """Call ``function(*args)`` on every rank; their output goes where this process's goes.

    Returns:
        Per rank what it returned (rank 0) or None, and per failed rank what it said.
    """
    command = mpiexec_command(world_size)
    with tempfile.TemporaryDirectory(prefix="sparsync-mpi-") as name:
        folder = Path(name)
        with (folder / _CALL).open("wb") as file:  # twice: the second needs the path to be read
            pickle.dump((sys.path, world_size, timeout, grace), file)
            pickle.dump((function, args), file)
        # one thread per rank; and the environment as Python knows it, without what an MPI that
        # this process may have initialised put there unasked
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = [sys.executable, "-m", "sparsync.cli.mpiexec", name]
        code = subprocess.run([*command, *child], env=environ, check=False).returncode
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for rank in range(world_size):
            if (folder / f"done-{rank}").exists():
                results[rank] = pickle.loads((folder / f"done-{rank}").read_bytes())
            elif (folder / f"failed-{rank}").exists():
                failures[rank] = (folder / f"failed-{rank}").read_text()
    if code != 0 or len(results) < world_size:
        for rank in range(world_size):
            if rank not in results and rank not in failures:
                failures[rank] = f"died or was ended by mpiexec, whose exit code is {code}"
    return results, failures


def main(folder: Path) -> None:
    """Be one rank: do the call that lies in ``folder``, and leave its result there."""
    with (folder / _CALL).open("rb") as file:
        sys.path, world_size, timeout, grace = pickle.load(file)
        function, args = pickle.load(file)
    here = detect()
    rank = here.rank if here is not None else 0
    try:
        if here is None or here.world_size != world_size:
            raise ConfigurationError(
                f"mpiexec was to start {world_size} ranks, this is one of "
                f"{here.world_size if here else 1}; its launcher is not known here"
            )
        result = in_group(function, args, timeout)
    except KeyboardInterrupt:
        os._exit(130)
    except SparsyncError as error:
        _fail(folder, rank, f"{type(error).__name__}: {error}", world_size, grace)
    except Exception as error:
        said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        _fail(folder, rank, said, world_size, grace)
    _leave(folder / f"done-{rank}", pickle.dumps(result))


def _fail(folder: Path, rank: int, said: str, world_size: int, grace: float) -> None:
    """Say what happened, give the others time to say it, too, and end without MPI's farewell."""
    _leave(folder / f"failed-{rank}", said.encode())
    until = time.monotonic() + grace
    while time.monotonic() < until:
        if len(list(folder.glob("failed-*")) + list(folder.glob("done-*"))) >= world_size:
            break
        time.sleep(0.05)
    time.sleep(0.2)  # those that said it last have seen that all did
    os._exit(1)


def _leave(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    draft = path.with_name(f"draft-{path.name}")
    draft.write_bytes(content)
    draft.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
