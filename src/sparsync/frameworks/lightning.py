"""A callback for Lightning: ``Trainer(strategy="ddp", callbacks=[SparsyncCallback()])``.

Next to every checkpoint ``NAME.ckpt``, the callback writes a folder ``NAME.ckpt.sparsync`` with every
rank's state.  ``trainer.fit(ckpt_path=...)`` reads this state.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from sparsync.errors import ConfigurationError
from sparsync.frameworks.common import (
    attach_wrapped,
    missing,
    replace_method,
    resume,
    save_beside,
    take_rank_0s,
)
from sparsync.handle import Handle
from sparsync.updates.sync import UpdateSync

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["SparsyncCallback"]

_SUFFIX: Final = ".sparsync"
_FOLLOWER: Final = "_sparsync"  # attribute of a strategy: the callback that replaced its methods


class SparsyncCallback(Callback):
    """Attaches sparsync when training starts, saves its state with checkpoints, and resumes from them.

    Args:
        options: arguments of ``sparsync.attach``.  By default, ``optimizer`` is a list of the module's
            optimizers, and ``scaler`` is the scaler of the Trainer's precision plugin.

    Attributes:
        sync: the handle that ``sparsync.attach`` returned; None before training starts.

    Raises:
        ConfigurationError, PeerError: raised by ``trainer.fit``; see ``sparsync.attach``.

    A module with several optimizers uses manual optimization, and needs
    ``strategy="ddp_find_unused_parameters_true"``.  If gradients are exchanged, every
    ``manual_backward`` is a step, and also delivers residuals to the parameters of the other optimizers.
    So call ``zero_grad`` after an optimizer's ``step()``; a call before ``manual_backward`` would erase
    delivered residuals.  If updates are exchanged, only the last optimizer's steps count as local steps,
    and the Trainer validates the weights that all ranks share.

    Lightning does not pass a checkpoint's path to callbacks, and lets only rank 0 write checkpoints.
    So until ``close()``, the callback replaces the strategy's ``save_checkpoint`` and
    ``remove_checkpoint``, which all ranks call.  It also replaces the strategy's ``on_train_end``, which
    is called after all callbacks, including callbacks that average weights.
    """

    def __init__(self, **options: Any) -> None:
        self.sync: Handle | None = None
        self._options = options
        self._followed = ExitStack()  # restores the methods of the strategy
        self._module: Any = None  # the module that was trained last
        self._shown = ExitStack()  # open while the shared weights are validated
        self._shows = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the wrapped module, after all states were restored and before any gradient."""
        self._follow(trainer)
        # refuse a folder outside the file system here, not only at the first checkpoint
        for checkpoints in trainer.checkpoint_callbacks:
            _folder(getattr(checkpoints, "dirpath", None) or trainer.default_root_dir)
        how = 'give Trainer(strategy="ddp", devices=2)'
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        former = self.sync
        if former is not None:
            former.close()  # it is still open if the last fit() raised an error
        sync = attach_wrapped(
            trainer.strategy.model, trainer.optimizers, self._options, how, scaler
        )
        self.sync = sync
        if trainer.ckpt_path:
            resume(sync, pl_module, _folder(trainer.ckpt_path))
        elif former is not None and self._module is pl_module and not isinstance(sync, UpdateSync):
            # a second fit() of the same module must still deliver the residual of the first
            sync.load_state_dict(former.state_dict())
        self._module = pl_module

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the shared weights into the module."""
        # Do nothing in the sanity check, which runs before ``on_train_start``, or in validate(), which
        # runs after fit(): in both cases, no handle is open.
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._show()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the rank's own weights, before checkpoints are written."""
        self._shown.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the rank's own weights."""
        self._shown.close()

    def _show(self) -> None:
        if isinstance(self.sync, UpdateSync):
            self._shown.enter_context(self.sync.shared())
            self._shows = True
            self._shown.callback(setattr, self, "_shows", False)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Restore the rank's own weights while a checkpoint is written during validation."""
        shows = self._shows
        self._shown.close()
        try:
            yield
        finally:
            if shows:
                self._show()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make replicas equal if updates were exchanged."""
        if isinstance(self.sync, UpdateSync):
            self.sync.finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the engine's thread and its process group; ``sync.stats()`` stays readable."""
        if stage == "fit" and self.sync is not None:
            self.sync.close()

    def close(self) -> None:
        """End the exchange and detach from the Trainer; later checkpoints have no sparsync state."""
        self._followed.close()
        if self.sync is not None:
            self.sync.close()

    def _follow(self, trainer: Any) -> None:
        """Save and remove every rank's state with each of the Trainer's checkpoints."""
        strategy = trainer.strategy
        # a strategy has at most one such callback, because two would save and exchange everything twice
        former = getattr(strategy, _FOLLOWER, None)
        if former is self:
            return
        if former is not None:
            former.close()
        self._followed.close()
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint
        ended = strategy.on_train_end

        def save_checkpoint(checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
            # a checkpoint with save_weights_only=True has no "callbacks", and needs no ranks' states
            if self.sync is None or "callbacks" not in checkpoint:
                save(checkpoint, filepath, *args, **kwargs)
                return
            # ``checkpoint`` refers to the module's tensors, so ``_hidden`` also changes the weights in it
            with self._hidden():
                save_beside(self.sync, self._module, _folder(filepath))
                save(checkpoint, filepath, *args, **kwargs)

        def remove_checkpoint(filepath: Any) -> None:
            remove(filepath)
            if trainer.local_rank == 0:
                shutil.rmtree(_folder(filepath), ignore_errors=True)

        def on_train_end(*args: Any, **kwargs: Any) -> None:
            # callbacks that ran after this one may have loaded weights that differ between ranks
            if isinstance(self.sync, UpdateSync):
                take_rank_0s(self.sync, self._module, True)
            ended(*args, **kwargs)

        replaced = {
            "save_checkpoint": save_checkpoint,
            "remove_checkpoint": remove_checkpoint,
            "on_train_end": on_train_end,
        }
        for name, value in {**replaced, _FOLLOWER: self}.items():
            self._followed.callback(replace_method(strategy, name, value))


def _folder(checkpoint: Path | str) -> Path:
    """Return the folder for the ranks' states of a checkpoint; for a link, the folder of its target.

    Raises:
        ConfigurationError: the checkpoint is not on a file system.
    """
    path = str(checkpoint)
    if "://" in path and not path.startswith("file://"):
        raise ConfigurationError(
            f"every rank saves its state next to the checkpoint, which needs a folder, not {path}; give "
            "ModelCheckpoint(dirpath=...) a local or mounted one, and copy it from there"
        )
    real = Path(path.removeprefix("file://")).resolve()
    return real.with_name(real.name + _SUFFIX)
