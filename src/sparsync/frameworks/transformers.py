"""Hugging Face Trainer: ``trainer.add_callback(SparsyncCallback(trainer))``.

Every ``checkpoint-N`` then includes every rank's state, and ``resume_from_checkpoint=`` reads that
state.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final

from sparsync.errors import ConfigurationError
from sparsync.frameworks.common import (
    attach_wrapped,
    check_processes,
    missing,
    replace_method,
    resume,
    save_beside,
    take_rank_0s,
)
from sparsync.handle import Handle
from sparsync.updates.sync import UpdateSync

try:
    from transformers.trainer_callback import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["SparsyncCallback"]

_FOLDER: Final = "sparsync"  # inside checkpoint-N


class SparsyncCallback(TrainerCallback):
    """Attaches sparsync when training begins, saves with every checkpoint, resumes with the Trainer.

    Args:
        trainer: the ``Trainer`` to which the callback is added; only the trainer knows the wrapped model
            and the checkpoint from which it resumes.
        options: arguments of ``sparsync.attach``.  By default, ``optimizer`` and ``scaler`` are the
            trainer's.

    Attributes:
        sync: the handle of ``sparsync.attach``; None before training begins.

    Raises:
        ConfigurationError: the trainer already has an open callback of this class.  From
            ``trainer.train()``: ``sparsync.attach`` refuses an argument.
        PeerError: from ``trainer.train()``; see ``sparsync.attach``.

    When updates are exchanged, evaluations during training use the weights that all ranks share.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        self.sync: Handle | None = None
        self._trainer, self._options, self._training = trainer, options, False
        self._model: Any = None
        # the argument of ``trainer.train()`` while it runs: a path, or True for the last checkpoint
        self._checkpoint: Any = None
        train = trainer.train
        if hasattr(train, "sparsync_callback"):
            raise ConfigurationError(
                "this trainer already has a SparsyncCallback; close() that one before making another"
            )

        @functools.wraps(train)
        def follow(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            # callbacks learn at which step training resumes, but not from which checkpoint
            self._checkpoint = resume_from_checkpoint
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._checkpoint, self._training = None, False

        follow.sparsync_callback = self  # type: ignore[attr-defined]
        # no callback runs before an evaluation, so its loop is replaced as well
        evaluation_loop = trainer.evaluation_loop

        @functools.wraps(evaluation_loop)
        def show(*args: Any, **kwargs: Any) -> Any:
            sync, training = self.sync, self._training
            with sync.shared() if training and isinstance(sync, UpdateSync) else nullcontext():
                return evaluation_loop(*args, **kwargs)

        self._restore = ExitStack()
        for name, value in {"train": follow, "evaluation_loop": show}.items():
            self._restore.callback(replace_method(trainer, name, value))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the wrapped model; resume from the trainer's checkpoint, if any."""
        # a second train() continues with the same handle, unless the trainer has wrapped the model
        # again, or the first has loaded its best model
        model = self._trainer.model_wrapped
        if self.sync is None or model is not self._model:
            if self.sync is not None:
                self.sync.close()
            optimizers = [] if optimizer is None else [optimizer]
            how = "start several: torchrun --nproc-per-node 2 ..."
            accelerator = self._trainer.accelerator
            check_processes(accelerator.num_processes, "give TrainingArguments(use_cpu=True)")
            scaler = getattr(accelerator, "scaler", None)
            # On a CPU, Accelerate 1.15 does not wrap a model that it has already prepared for an
            # evaluation.
            first = "call trainer.train() before trainer.evaluate(), or use eval_on_start=True"
            self.sync = attach_wrapped(model, optimizers, self._options, how, scaler, first)
            self._model = model
        checkpoint = self._checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(args.output_dir)
        if checkpoint:
            resume(self.sync, model, Path(checkpoint) / _FOLDER)
        self._training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make replicas equal: after a best model was loaded, to that of rank 0.

        Other ranks may have loaded another one, or none, if every machine has its own disk.
        """
        self._training = False
        if self.sync is None:
            return
        # the argument alone says little: training may end before the first evaluation
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if args.load_best_model_at_end and take_rank_0s(self.sync, self._trainer.model, loaded):
            if isinstance(self.sync, UpdateSync):
                # it would take the loaded weights for a local step; the next train() attaches again
                self.sync.close()
                self._model = None
        elif isinstance(self.sync, UpdateSync):
            self.sync.finish()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this rank's state into the checkpoint that the trainer has just written."""
        if self.sync is not None and not args.save_only_model:
            run = Path(self._trainer._get_output_dir(self._trainer._trial))
            save_beside(self.sync, self._model, run / f"checkpoint-{state.global_step}" / _FOLDER)

    def close(self) -> None:
        """Detach from the trainer, which then trains as if nothing had been attached."""
        self._restore.close()
        self._trainer.remove_callback(self)
        if self.sync is not None:
            self.sync.close()
