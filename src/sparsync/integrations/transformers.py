"""Hugging Face Trainer: ``trainer.add_callback(SparsyncCallback(trainer, density=0.01))``.

Every ``checkpoint-N`` then holds every rank's residual, and ``resume_from_checkpoint=`` reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sparsync.integrations.frameworks import attach_wrapped, missing, resume, save_beside
from sparsync.integrations.sync import Sync

try:
    from transformers.trainer_callback import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["SparsyncCallback"]

_FOLDER: Final = "sparsync"  # in checkpoint-N


class SparsyncCallback(TrainerCallback):
    """Attaches sparsync when training begins, saves with every checkpoint, resumes with the Trainer.

    Args:
        trainer: the ``Trainer`` that it is added to: only the trainer knows the wrapped model, and
            from which checkpoint it resumes.
        options: of ``sparsync.attach``.  ``optimizer`` and ``scaler`` are the trainer's.

    Attributes:
        sync: the handle of ``sparsync.attach``; None before training begins.

    Raises:
        ConfigurationError, PeerError: see ``sparsync.attach``; from ``trainer.train()``.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        self.sync: Sync | None = None
        self._trainer, self._options = trainer, options
        self._model: Any = None
        self._checkpoint: Any = None  # as train() was given it
        trainer.train = self._noting_the_checkpoint(trainer.train)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the wrapped model; resume where the trainer does."""
        model = self._trainer.model_wrapped
        if self.sync is None or model is not self._model:
            self.close()
            optimizers = [] if optimizer is None else [optimizer]
            how = "start several: torchrun --nproc-per-node 2 ..."
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            self.sync = attach_wrapped(model, optimizers, self._options, how, scaler)
            self._model = model
        checkpoint = self._checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(args.output_dir)
        if checkpoint:
            resume(self.sync, model, Path(checkpoint) / _FOLDER)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this rank's state into the checkpoint that the trainer has just written."""
        if self.sync is not None and not args.save_only_model:
            run = Path(self._trainer._get_output_dir(self._trainer._trial))
            save_beside(self.sync, self._model, run / f"checkpoint-{state.global_step}" / _FOLDER)

    def close(self) -> None:
        """End the engine thread and its process group: train no more with this model."""
        if self.sync is not None:
            self.sync.close()

    def _noting_the_checkpoint(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Trainer.train``: callbacks are told the step that it resumes at, but not from where."""

        @functools.wraps(train)
        def noting(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._checkpoint = resume_from_checkpoint
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._checkpoint = None

        return noting
