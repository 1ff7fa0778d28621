"""The environment of a script's rank in the lab, and checks of the command that starts it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sparsync.errors import ConfigurationError, require

__all__ = ["MASTER_PORT", "check_script", "rank_variables", "searched"]

MASTER_PORT: Final = 29500  # torchrun's default; nothing else uses it on the lab's network
_RENDEZVOUS_PORT: Final = 29400
_JOB: Final = "sparsync-lab"


def rank_variables(
    rank: int, addresses: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those for a torchrun that a script starts.

    Args:
        rank: this rank.
        addresses: addresses of all ranks; the store is at rank 0's.
        environ: the environment of the command, whose settings take precedence where possible.

    Example:
        >>> found = rank_variables(1, ["10.77.0.1", "10.77.0.2"], {"OMP_NUM_THREADS": "3"})
        >>> [found[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")]
        ['1', '2', '10.77.0.1', '3']
    """
    ranks, host = len(addresses), addresses[0]
    usual = {
        # by torch's default each rank would use all cores, and ranks would wait for each other
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "PYTHONUNBUFFERED": "1",
        # the lab has no route to the Internet, and these would retry endlessly
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        # the lab has no name server either, and torch would warn that addresses have no names
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # one machine with all ranks, as under torchrun --nproc-per-node
    workers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": host,
        "MASTER_PORT": MASTER_PORT,
        "TORCHELASTIC_RUN_ID": _JOB,  # by which Lightning and others recognise torchrun
    }
    # defaults of the options of a torchrun inside, for which every rank is a node
    agents = {
        "PET_NNODES": ranks,
        "PET_NODE_RANK": rank,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host}:{_RENDEZVOUS_PORT}",
        "PET_RDZV_ID": _JOB,
        "PET_RDZV_CONF": f"is_host={int(rank == 0)}",
        "PET_LOCAL_ADDR": addresses[rank],
    }
    told = {name: str(value) for name, value in {**workers, **agents}.items()}
    return {**usual, **environ, **told}


def searched(environ: Mapping[str, str]) -> str:
    """Return the PATH of a script, with the programs of this Python's environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"


def check_script(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command with the path of its program; refuse one that cannot run in the lab.

    Raises:
        ConfigurationError: there is no such program, or the program would start a separate job on every
            link.
    """
    require(bool(words), "lab: no script; write it after --, as in -- python train.py")
    program, *rest = words
    path = shutil.which(program, path=searched(environ))
    if path is None:
        cure = "give one after --, as in -- python train.py"
        if program.endswith(".py") and Path(program).is_file():
            cure = f"write -- python {program}"
        raise ConfigurationError(f"lab: there is no program {program!r}; {cure}")
    alone = "--standalone" in rest
    torchrun = Path(program).name == "torchrun" or "torch.distributed.run" in rest[:2]
    require(
        not (torchrun and alone),
        "lab: torchrun --standalone would start a job of its own on every link; leave --standalone out: "
        "torchrun starts one node per rank here, or give the script itself, as in -- python train.py",
    )
    return [path, *rest]
