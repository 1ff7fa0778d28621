"""Rows about gradients: accumulation, backward passes, clipping, precision."""

from __future__ import annotations

from .matrix import Row, absent, refused, untested, works

__all__ = ["GRADIENTS", "PRECISION"]

_INTERFACE = "tests/unit/test_averager_interface.py::"
_SUMS = "Gradients are local: they add up as without any library."

GRADIENTS = (
    Row(
        "gradient accumulation under `no_sync()`",
        works(
            "case no_sync",
            "The sum over micro-batches is exchanged once, with the last one; below density 1 "
            "what is not delivered of it waits in the residual. As in DDP the forward pass "
            "decides: it belongs into the context, too.",
        ),
        works("case no_sync", f"{_SUMS} Call `step()` once per optimizer step."),
        works("case no_sync", f"{_SUMS} They are exchanged in `step()`."),
        works("case no_sync", f"{_SUMS} Call `step()` once per optimizer step."),
    ),
    Row(
        "several backward passes per step without `no_sync()`",
        works(
            "case backward twice",
            "Each is exchanged, with what lies in the gradients already; the law holds over both. "
            "It costs an exchange per pass.",
        ),
        works("case backward twice", _SUMS),
        works("case backward twice", _SUMS),
        works("case backward twice", _SUMS),
    ),
    Row(
        "the same, with momentum or decay in `correction=`",
        refused(
            "backward_cells.corrected_gradients_count_once",
            "The averages of the first pass would enter the momentum again. Refused too where "
            "`zero_grad()` was forgotten. Use `no_sync()`. So it is without DDP (`replicate=`).",
        ),
        absent("It has no correction: momentum is the optimizer's."),
        absent("It has no correction."),
        absent("It has no correction."),
    ),
    Row(
        "a second `backward()` of a kept graph (`retain_graph=True`), or of an older forward pass",
        refused(
            "backward_cells.second_backward_is_refused",
            "DDP exchanges once per forward pass, so what the second adds would stay on its rank "
            "(in plain DDP it does, without a word). Add the losses, or say `no_sync()`. Without DDP "
            "(`replicate=`) every pass is exchanged.",
        ),
        works("local_cells.two_backward_passes_add", _SUMS),
        works("local_cells.two_backward_passes_add", _SUMS),
        works("local_cells.two_backward_passes_add", _SUMS),
    ),
    Row(
        "`backward(create_graph=True)`",
        refused(
            "backward_cells.graphs_of_gradients_are_refused",
            "The graph of a gradient does not go through the exchange. `torch.autograd.grad` before "
            "`backward()` works.",
        ),
        works("local_cells.graphs_of_gradients_are_local", "Gradients and their graphs are local."),
        works("local_cells.graphs_of_gradients_are_local", "Gradients and their graphs are local."),
        works("local_cells.graphs_of_gradients_are_local", "Gradients and their graphs are local."),
    ),
    Row(
        "clipping of the reduced gradient (`clip_grad_norm_` after `backward()`)",
        works(
            "case clipped",
            "Gradients are equal on all ranks, so are norms; what is clipped away is gone, as in dense "
            "training, and the residual is not clipped.",
        ),
        absent("There is no reduced gradient."),
        absent("There is no reduced gradient."),
        absent("There is no reduced gradient."),
    ),
    Row(
        "clipping of local gradients",
        works(
            "tests/unit/test_correction.py::test_clipping_equals_torchs_on_one_rank",
            "`Correction(clip=...)`, before gradients are accumulated; a hook on a parameter sees "
            "local gradients as well.",
        ),
        works("case clipped", "`clip_grad_norm_` before `optimizer.step()` clips this rank's."),
        works("case clipped", "`clip_grad_norm_` before `step()` clips this rank's."),
        works("case clipped", "`clip_grad_norm_` before `optimizer.step()` clips this rank's."),
    ),
    Row(
        "NaN or Inf on one rank",
        works(
            "tests/distributed/test_gloo.py::test_nonfinite_gradients_are_refused_collectively",
            "All ranks raise, skip or propagate together (`nonfinite=`); residuals are as before.",
        ),
        works(
            "tests/unit/test_local_updates.py::test_weights_that_broke_return_to_the_last_exchange",
            "All ranks return to their weights of the last exchange, and raise or skip.",
        ),
        works(
            "tests/unit/test_adam.py::test_update_space_adam_keeps_its_moments_when_a_step_is_refused",
            "All ranks raise; weights, residuals and the broken rank's moments are as before.",
        ),
        works(
            ""
            "tests/unit/test_averager_start.py::test_what_is_not_finite_stays_at_home_unless_it_may_spread",
            "The rank that has it raises before others get it; `nonfinite='spread'` lets it go.",
        ),
    ),
    Row(
        "sparse (COO) gradients: embeddings with `sparse=True`",
        works(
            "case COO",
            "They are accumulated into a dense residual, and come back as COO of the rows that were "
            "delivered.",
        ),
        works("case COO", "They are the local optimizer's; weights are exchanged."),
        refused("local_cells.update_space_refuses_coo", "Build the embedding with `sparse=False`."),
        works("case COO", "They are the local optimizer's; weights are averaged."),
    ),
)

PRECISION = (
    Row(
        "AMP: bfloat16 autocast",
        works("case autocast", "Weights and gradients are float32; nothing is to be done."),
        works("case autocast", "Weights are float32; nothing is to be done."),
        works("case autocast", "Weights and gradients are float32; nothing is to be done."),
        works("case autocast", "Weights are float32; nothing is to be done."),
    ),
    Row(
        "AMP: `GradScaler`, with an overflow on one rank",
        works(
            "ddp_cells.scaler_skips_on_all",
            "With `nonfinite='propagate'` all ranks skip the step, every scale falls alike, and "
            "residuals stay as they were.",
        ),
        works(
            "local_cells.local_scaler",
            "Every rank has a scale of its own; the one that skips hands on an update of zero.",
        ),
        refused(
            "local_cells.update_space_takes_no_scaler",
            "A rank that skips its `step()` alone would leave the others waiting. bfloat16 needs "
            "no scaler.",
        ),
        works(
            "local_cells.averaging_scaler",
            "Every rank has a scale of its own; of the one that skips, the model of before is "
            "averaged.",
        ),
    ),
    Row(
        "`GradScaler` with another `nonfinite=` than 'propagate'",
        refused(
            "ddp_cells.scaler_needs_propagate",
            "On an overflow: 'raise' raises and names 'propagate'; under 'skip' there are no "
            'gradients, and the scaler raises torch\'s "No inf checks were recorded".',
        ),
        absent("It has no such setting."),
        absent("It takes no scaler."),
        absent("It has no such setting."),
    ),
    Row(
        "float32, bfloat16 and float64 parameters in one model",
        works(
            "case dtypes",
            "Every dtype has units of its own; residuals of 16-bit parameters are float32. The "
            "average is rounded to the gradient's dtype, as any gradient.",
        ),
        works("case dtypes", "Shared weights of 16-bit parameters are kept in float32."),
        works("case dtypes", "Updates of 16-bit parameters are exchanged in float32."),
        works("case dtypes", "They travel as one vector, float64 if any of them is."),
    ),
    Row(
        "float16 parameters",
        works(
            "case float16", "As bfloat16; the next row says what happens beyond float16's range."
        ),
        works("case float16", "As bfloat16."),
        works("case float16", "As bfloat16."),
        works("case float16", "As bfloat16."),
    ),
    Row(
        "a total that float16 cannot hold",
        refused(
            "ddp_cells.float16_does_not_overflow",
            "Many steps' worth of an entry can arrive at once: above 65504 the step is refused as "
            "if it held Inf, on all ranks. Prefer bfloat16.",
        ),
        absent("Sums of weights' changes are kept in float32."),
        absent("Sums of updates are kept in float32."),
        absent("Averages are within the range of what they average."),
    ),
    Row(
        "complex parameters",
        refused(
            "backward_cells.complex_parameters_are_refused",
            "Entries are selected by magnitude; use `torch.view_as_real`.",
        ),
        refused("local_cells.local_complex_is_refused", "As attach."),
        refused("local_cells.update_space_complex_is_refused", "As attach."),
        works(
            f"{_INTERFACE}test_complex_parameters_travel_and_tied_ones_once",
            "They are averaged as pairs of reals.",
        ),
    ),
    Row(
        "parameters on several devices of one rank",
        untested(
            "tests/semantics/test_semantics.py::test_units_hold_one_device",
            "Every device has units of its own (tested); that gradients of two GPUs are exchanged "
            "has not been run.",
        ),
        untested("tests/semantics/test_semantics.py::test_units_hold_one_device", "As attach."),
        untested("tests/semantics/test_semantics.py::test_units_hold_one_device", "As attach."),
        untested(
            f"{_INTERFACE}test_parameters_are_averaged_in_place_whatever_their_dtypes_and_strides",
            "They would travel as one vector on the first one's device; not run.",
        ),
    ),
)
