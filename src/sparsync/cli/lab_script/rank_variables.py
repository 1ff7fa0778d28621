"""The environment of a script's rank in the lab, and checks of the command that starts it."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
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
    """Return the variables that torchrun sets for a rank, and options for a torchrun in the script.

    Args:
        rank: this rank.
        addresses: addresses of all ranks; the store is at rank 0's address.
        environ: the environment of the command; its settings take precedence where possible.

    Example:
        >>> found = rank_variables(1, ["10.77.0.1", "10.77.0.2"], {"OMP_NUM_THREADS": "3"})
        >>> [found[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")]
        ['1', '2', '10.77.0.1', '3']
    """
    ranks, host = len(addresses), addresses[0]
    usual = {
        # by torch's default, each rank would use all cores, and ranks would wait for each other
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "PYTHONUNBUFFERED": "1",
        # the lab has no route to the Internet, so these libraries would retry endlessly
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        # the lab has no name server, so torch would warn that it cannot resolve addresses to names
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # after restarting its workers, torchrun would reuse the store with the previous round's addresses
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    # the same values as under torchrun --nproc-per-node, with all ranks on one machine
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
    # Defaults of torchrun's options: if the script is torchrun, every rank is a separate node.  The node
    # rank is left out, because c10d's rendezvous assigns it, and warns if one is given.
    agents = {
        "PET_NNODES": ranks,
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


def check_script(words: Sequence[str], ranks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the command with the path of its program; refuse a command that cannot run in the lab.

    Raises:
        ConfigurationError: the program does not exist, or is a torchrun whose options would keep the
            ranks' torchruns from forming one job.
    """
    require(bool(words), "lab: no script; write it after --, as in -- python train.py")
    program, *rest = words
    path = shutil.which(program, path=searched(environ))
    if path is None:
        cure = "give one after --, as in -- python train.py"
        if program.endswith(".py") and Path(program).is_file():
            cure = f"write -- python {program}"
        raise ConfigurationError(f"lab: there is no program {program!r}; {cure}")
    if Path(program).name == "torchrun":
        _check_torchrun(rest, ranks)
    elif "torch.distributed.run" in rest[:3]:  # python -m, perhaps python -u -m
        _check_torchrun(rest[rest.index("torch.distributed.run") + 1 :], ranks)
    return [path, *rest]


def _check_torchrun(words: Sequence[str], ranks: int) -> None:
    """Refuse options that would keep the torchruns, one per rank, from forming one job."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    # an option that is not given gets the value that rank_variables passes
    parser.set_defaults(nnodes=str(ranks), rdzv_endpoint="", rdzv_backend="c10d", standalone=False)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            given = parser.parse_args(words)
            least, most = parse_min_max_nnodes(given.nnodes)
    except (SystemExit, RuntimeError, ValueError):
        return  # torchrun itself reports what is wrong with its options, or shows its help
    node = "in the lab, every rank is a node of torchrun"
    require(
        not given.standalone,
        f"lab: torchrun --standalone would start a job of its own on every link; leave it out: {node}",
    )
    require(
        least <= ranks == most,
        f"lab: torchrun --nnodes {given.nnodes} does not fit --ranks {ranks}: {node}; leave it out, or "
        f"give {ranks}, or MIN:{ranks} for a job that may lose nodes",
    )
    require(
        not given.rdzv_endpoint,
        f"lab: torchrun --rdzv-endpoint {given.rdzv_endpoint} is outside the lab, where all meet at "
        "rank 0; leave it out",
    )
    require(
        given.rdzv_backend == "c10d",
        f"lab: torchrun --rdzv-backend {given.rdzv_backend} cannot be used in the lab, where all meet at "
        "rank 0 over c10d; leave it out",
    )
