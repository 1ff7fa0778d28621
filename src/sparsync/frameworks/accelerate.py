"""Attaches to Accelerate: ``sync = attach(accelerator, model)``, after ``accelerator.prepare``.

``accelerator.save_state`` and ``load_state`` then include every rank's sparsync state.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsync.errors import ConfigurationError
from sparsync.frameworks.common import (
    attach_wrapped,
    check_processes,
    replace_method,
    resume,
    save_beside,
)
from sparsync.handle import Handle

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["attach"]


def attach(accelerator: Accelerator, model: torch.nn.Module, **options: Any) -> Handle:
    """Compress the exchange between replicas of a prepared model; the training loop does not change.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the model that ``accelerator.prepare`` returned.
        options: arguments of ``sparsync.attach``.  By default, ``optimizer`` is a list of the prepared
            optimizers that have parameters of the model, and ``scaler`` is the accelerator's scaler.

    Returns:
        The handle that ``sparsync.attach`` returned.  Until its ``close()``,
        ``accelerator.save_state(folder)`` also writes this rank's state to ``folder/sparsync``, and
        ``load_state(folder)`` reads it.

    Raises:
        ConfigurationError: the model was not prepared, Accelerate runs a single process, or
            ``sparsync.attach`` refuses an argument.
        PeerError: ranks disagree.
    """
    # compare unwrapped models, because Accelerate records models without DDP on a CPU
    inner = accelerator.unwrap_model(model)
    prepared = [accelerator.unwrap_model(one) is inner for one in accelerator._models]
    if not any(prepared):
        raise ConfigurationError(
            f"this {type(model).__name__} is none of the accelerator's {len(prepared)} prepared models; "
            "call model = accelerator.prepare(model) before attach"
        )
    # Accelerate numbers its files in this way, so the second model's folder is sparsync_1
    name = f"sparsync_{prepared.index(True)}".removesuffix("_0")
    how = "start several: torchrun --nproc-per-node 2 ... (accelerate launch starts one on a CPU)"
    check_processes(accelerator.num_processes, "make Accelerator(cpu=True)")
    sync = attach_wrapped(model, accelerator._optimizers, options, how, accelerator.scaler)

    def save(models: Any, weights: Any, folder: str) -> None:
        save_beside(sync, model, Path(folder) / name)

    sync.on_close.callback(accelerator.register_save_state_pre_hook(save).remove)
    loading = accelerator.load_state
    if not isinstance(loading, _Loading):
        loading = _Loading(accelerator)
    loading.models[name] = sync, model
    sync.on_close.callback(loading.forget, name)
    return sync


class _Loading:
    """An ``Accelerator.load_state`` that also resumes attached models, until the last one is closed.

    Accelerate's own hooks receive the folder, but run before the weights are loaded.  So a hook only
    records the folder, and this replacement of ``load_state`` resumes once the weights are loaded.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.models: dict[str, tuple[Handle, torch.nn.Module]] = {}  # by the name of their folder
        self._load_state, self._folder = accelerator.load_state, ""
        functools.update_wrapper(self, self._load_state)
        self._undo = ExitStack()
        self._undo.callback(accelerator.register_load_state_pre_hook(self._note).remove)
        self._undo.callback(replace_method(accelerator, "load_state", self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._load_state(*args, **kwargs)
        for name, (sync, model) in self.models.items():
            resume(sync, model, Path(self._folder, name))
        return result

    def forget(self, name: str) -> None:
        """Stop resuming a model."""
        del self.models[name]
        if not self.models:
            self._undo.close()

    def _note(self, models: Any, folder: str) -> None:
        self._folder = folder
