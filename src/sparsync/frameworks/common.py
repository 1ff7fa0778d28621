"""Attaches and resumes, for the adapters to Accelerate, Lightning and the Hugging Face Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.attach import attach
from sparsync.checkpoint.files import states_in
from sparsync.checkpoint.save_load import load_states, save_state
from sparsync.errors import ConfigurationError
from sparsync.feedback.agreed_setup import weights_digest
from sparsync.handle import Handle
from sparsync.options import DISABLE, Monitoring, disabled
from sparsync.transports.agree import agree, equalise_
from sparsync.transports.driver import run
from sparsync.units import local_of
from sparsync.updates.sync import UpdateSync

__all__ = [
    "attach_wrapped",
    "check_processes",
    "missing",
    "replace_method",
    "resume",
    "save_beside",
    "take_rank_0s",
]


def missing(framework: str, error: ImportError) -> ConfigurationError:
    """Return the error to raise if a framework cannot be imported."""
    return ConfigurationError(
        f"sparsync.frameworks.{framework} needs {framework}, which cannot be imported ({error}): "
        f"pip install {framework}"
    )


def replace_method(owner: Any, name: str, method: Any) -> Callable[[], None]:
    """Replace a method or attribute of an object; return a function that restores the original.

    If other code has replaced it again in the meantime, the function does nothing.
    """
    # search only the object itself: a method of its class reappears once the replacement is deleted
    former = vars(owner).get(name)
    setattr(owner, name, method)

    def restore() -> None:
        if vars(owner).get(name) is not method:
            return
        if former is None:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return restore


def attach_wrapped(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: dict[str, Any],
    how: str,
    scaler: Any = None,
    unwrapped: str = "wrap it",
) -> Handle:
    """Attach to the module that a framework has wrapped, and possibly compiled, for training.

    ``attach`` gets those optimizers that have parameters of the model.  A scaler in ``options`` takes
    precedence over the framework's ``scaler``.  For error messages, ``how`` says how to make the
    framework start several processes, and ``unwrapped`` how to make it wrap the model.
    """
    wrapped: Any = getattr(model, "_orig_mod", model)  # torch.compile stores the module there
    # with one process, frameworks omit DDP, and ``attach`` would ask the user to wrap the model
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone and not isinstance(wrapped, DistributedDataParallel):
        raise ConfigurationError(
            f"training runs in a single process, which exchanges nothing; {how}, or omit sparsync"
        )
    if disabled() and not isinstance(wrapped, DistributedDataParallel):
        raise ConfigurationError(
            f"{DISABLE}=1 leaves the exchange to DistributedDataParallel, but the framework has not "
            f"wrapped this {type(wrapped).__name__} in it: every rank would train alone; {unwrapped}"
        )
    trained = set(model.parameters())
    its = [
        one
        for one in optimizers
        if not trained.isdisjoint(p for group in one.param_groups for p in group["params"])
    ]
    if its:
        options = {"optimizer": its, **options}
    monitoring = options.get("monitoring") or Monitoring()
    if monitoring.scaler is None:
        monitoring = replace(monitoring, scaler=scaler)
    sync: Handle = attach(wrapped, **{**options, "monitoring": monitoring})
    return sync


def check_processes(seen: int, cure: str) -> None:
    """Refuse a framework that does not see the other processes; Accelerate does not on a CPU.

    Such a framework gives every rank the same batches, so an exchange would be useless.

    Args:
        seen: the number of processes with which the framework trains.
        cure: advice on making the framework see all processes.
    """
    started = dist.get_world_size() if dist.is_initialized() else 1
    if seen < started:
        raise ConfigurationError(
            f"{started} processes were started, but Accelerate sees {seen} and gives every rank the same "
            f"batches; without a GPU, {cure}"
        )


def save_beside(sync: Handle, model: torch.nn.Module, folder: Path) -> None:
    """Write this rank's state into a folder of a framework's checkpoint; all ranks must call this.

    The file also contains a digest of the weights, because a job may end after writing only this file or
    only the framework's weights.

    Raises:
        CheckpointError: see ``save_state``.
    """
    save_state(sync, folder, _weights(sync, model), alone=sync.closed)
    for seat, file in states_in(folder).items():
        if seat.ranks != sync.reducer.comm.world_size:  # the file is left over from an older run
            file.unlink(missing_ok=True)


def resume(sync: Handle, model: torch.nn.Module, folder: Path) -> None:
    """Load the files that ``save_beside`` wrote, after the weights; all ranks must call this.

    The checkpoint of a run without sparsync has no such folder.  In this case, residuals do not change,
    and a warning says so.

    Raises:
        PeerError: some ranks see the folder and others do not.
        CheckpointError, ConfigurationError: see ``load_states``; or the weights differ from the weights
            that were saved with the state.
    """
    # compare first, because loading is collective, and a rank without the folder would not join
    present = folder.is_dir()
    run(agree(sync.reducer.comm, {f"whether there is a saved state in {folder}": present}))
    if present:
        load_states(sync, folder, _weights(sync, model))
    else:
        warnings.warn(
            f"the checkpoint has no sparsync state in {folder}: residuals start at zero, as in a new "
            "run; if it was saved with sparsync, copy that folder as well",
            stacklevel=2,
        )


def take_rank_0s(sync: Handle, model: torch.nn.Module, loaded: bool) -> bool:
    """If rank 0 has ``loaded`` weights, copy its weights and buffers to all ranks; all must call this.

    Returns:
        Whether rank 0 has loaded weights.
    """
    if isinstance(sync, UpdateSync):
        run(sync.outer.settle())
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: local_of(tensor) for name, tensor in named.items()}
    # each rank of a sharded replica holds a different part, so it gets the same part of replica 0
    comms = sync.communicators[: 1 if _sharded(model) else None]
    told = torch.tensor([int(loaded)], device="cpu")
    for comm in comms:
        run(equalise_(comm, {"whether rank 0 has loaded weights": told}))
    for comm in comms if told else ():
        run(equalise_(comm, tensors))
    return bool(told)


def _sharded(model: torch.nn.Module) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def _weights(sync: Handle, model: torch.nn.Module) -> str:
    """Return a digest of a model's weights as a framework saves them.

    The digest is empty for shards, because they may be cut differently later.  If updates are exchanged,
    only rank 0 has a digest, because frameworks save only rank 0's weights.
    """
    if isinstance(sync, UpdateSync) and sync.reducer.comm.rank:
        return ""
    return "" if _sharded(model) else weights_digest(model.parameters())
