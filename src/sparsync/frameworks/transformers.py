"""A callback for the Hugging Face Trainer: ``trainer.add_callback(SparsyncCallback(trainer))``.

Every ``checkpoint-N`` then includes every rank's state, and ``resume_from_checkpoint=`` reads this
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
    """Attaches sparsync when training begins, saves its state with checkpoints, and resumes from them.

    Args:
        trainer: the ``Trainer`` to which the callback is added; only the trainer knows the wrapped model
            and the checkpoint from which it resumes.
        options: arguments of ``sparsync.attach``.  By default, ``optimizer`` and ``scaler`` are taken
            from the trainer.

    Attributes:
        sync: the handle that ``sparsync.attach`` returned; None before training begins.

    Raises:
        ConfigurationError: the trainer already has an open callback of this class.
            ``trainer.train()`` raises it if ``sparsync.attach`` refuses an argument.
        PeerError: raised by ``trainer.train()``; see ``sparsync.attach``.

    When updates are exchanged, evaluations during training use the weights that all ranks share.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        self.sync: Handle | None = None
        self._trainer, self._options, self._training = trainer, options, False
        self._model: Any = None
        # while ``trainer.train()`` runs, its argument: a path, or True for the last checkpoint
        self._checkpoint: Any = None
        train = trainer.train
        if hasattr(train, "sparsync_callback"):
            raise ConfigurationError(
                "this trainer already has a SparsyncCallback; close() that one before making another"
            )

        @functools.wraps(train)
        def follow(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            # the Trainer passes the step at which training resumes to callbacks, but not the checkpoint
            self._checkpoint = resume_from_checkpoint
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._checkpoint, self._training = None, False

        follow.sparsync_callback = self  # type: ignore[attr-defined]
        # The Trainer calls no callback before an evaluation.  To evaluate the shared weights, replace
        # the evaluation loop.
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
        # Keep the handle for a second train(). Attach again only if the trainer has wrapped the model
        # again, or if ``on_train_end`` has closed the handle after the best model was loaded.
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
        """Make the replicas equal; if the trainer has loaded its best model, copy it from rank 0 to all.

        If every machine has its own disk, other ranks may have loaded a different model, or none.
        """
        self._training = False
        if self.sync is None:
            return
        # the argument does not suffice, because training may end before the first evaluation
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if args.load_best_model_at_end and take_rank_0s(self.sync, self._trainer.model, loaded):
            if isinstance(self.sync, UpdateSync):
                # the handle would treat the loaded weights as a local step, so close it; the next train()
                # attaches again
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
