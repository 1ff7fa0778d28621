"""Rows about models: what parameters there are, how they are laid out, and that they change."""

from __future__ import annotations

from .matrix import Row, absent, refused, works

__all__ = ["MODELS"]

_INTERFACE = "tests/unit/test_averager_interface.py::"
_START = "tests/unit/test_averager_start.py::"
_CHANGED = f"{_START}test_a_model_that_changes_is_refused_but_may_freeze"

MODELS = (
    Row(
        "tied parameters",
        works("case tied", "One parameter, one place in the residual; its gradient counts once."),
        works("case tied", "One parameter, exchanged once."),
        works("case tied", "One parameter, updated once."),
        works("case tied", "One parameter, averaged once."),
    ),
    Row(
        "frozen parameters",
        works("case frozen", "They have no residual and are not sent."),
        works("case frozen", "They are not sent."),
        works("case frozen", "They are not sent."),
        works("case frozen", "They stay; `finish()` settles them only where ranks differ."),
    ),
    Row(
        "unused parameters, differing between ranks and steps",
        works(
            "case unused",
            "With `find_unused_parameters=True`: an unused one has gradient zero there, and what "
            "waits for it in residuals is delivered, also when no rank uses it.",
        ),
        works("case unused", "Nothing is to be done."),
        works("case unused", "Its update is zero; what waits for it is delivered."),
        works("case unused", "Nothing is to be done."),
    ),
    Row(
        "frozen after the start, all or some",
        works(
            "ddp_cells.frozen_for_a_while",
            "All at once (GANs do in turns), or some under `find_unused_parameters=True`. Else "
            "the next forward pass is refused: DDP would wait for the gradient.",
        ),
        works("local_cells.frozen_later", "What waits for it is still delivered."),
        works("local_cells.frozen_later", "What waits for it is still delivered."),
        works(_CHANGED, "It goes on travelling."),
    ),
    Row(
        "thawed, added or replaced after the start (`model.module` too)",
        refused(
            "ddp_cells.changed_models_are_refused",
            "DDP would train them on every rank alone; the next forward pass names the parameter.",
        ),
        refused("local_cells.local_refuses_changed_models", "`step()` names the parameter."),
        refused("local_cells.update_space_refuses_changed_models", "`step()` names the parameter."),
        refused(_CHANGED, "`step()` names the parameter."),
    ),
    Row(
        "BatchNorm's buffers",
        works(
            "ddp_cells.buffers_are_those_of_rank_0", "DDP's: rank 0's, before every forward pass."
        ),
        works("local_cells.local_buffers_stay", "They stay local, also behind `finish()`."),
        works("local_cells.update_space_buffers_stay", "They stay local."),
        works(f"{_INTERFACE}test_buffers_follow_their_rule", "By `buffers=`: averaged, or local."),
    ),
    Row(
        "scalar parameters, and those without elements",
        works("case dtypes", "As any other."),
        works("case dtypes", "As any other."),
        works("case dtypes", "As any other."),
        works("case dtypes", "As any other."),
    ),
    Row(
        "channels_last",
        works(
            "case channels_last",
            "Residuals are in the order of elements, not of memory: a saved one fits either layout.",
        ),
        works("case channels_last", "Strides stay as they are."),
        works("case channels_last", "Strides stay as they are."),
        works("case channels_last", "Strides stay as they are."),
    ),
    Row(
        "copying or pickling the wrapped model (`copy.deepcopy(ddp)`, `torch.save(ddp)`)",
        refused(
            "ddp_cells.copies_are_refused",
            "A copy would train without the exchange. Copy or save `model.module`. Without DDP "
            "(`replicate=`) nothing is wrapped: a copy is a plain model.",
        ),
        absent("The model is not wrapped."),
        absent("The model is not wrapped."),
        absent("The model is not wrapped."),
    ),
    Row(
        "EMA of the weights (`AveragedModel`)",
        works("ddp_cells.average_of_weights", "Of `model.module`: equal on all ranks."),
        works(
            "local_cells.local_ema",
            "Equal on all ranks if it is updated within `with local.shared():`; else it is this "
            "rank's own.",
        ),
        works("local_cells.update_space_ema", "Equal on all ranks."),
        works(
            "local_cells.averaging_ema",
            "Equal on all ranks where models are: behind every step of period 1, or `finish()`.",
        ),
    ),
)
