"""PyTorch's and Accelerate's own tests pass with the library attached, except those in one table.

So every new version of torch is tested with its own tests, which ``suites.py`` runs.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from .commands import run_well
from .suites import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(600)]

# PyTorch's many tests run once with each number of ranks and with each setting
TORCHS = [("torch", 3, "budgeted"), ("torch", 2, "dense")]
ACCELERATES = [
    ("accelerate", ranks, setting) for ranks in (3, 2) for setting in SETTINGS if SETTINGS[setting]
]

# Each row has the reason why some of PyTorch's tests fail, the text of the error, and their names.
REASONS = [
    (
        "refused: a copy of a DDP model would train without the exchange",
        "cannot be copied or pickled",
        ["DistributedDataParallelCPU", "DistributedDataParallelCPU_grad_is_view"],
    ),
    (
        "refused: the graph of a gradient does not pass through the exchange",
        "backward(create_graph=True)",
        ["ddp_create_graph"],
    ),
    (
        "refused: a rank that is done still delivers its residual",
        "join(divide_by_initial_world_size=False)",
        ["ddp_grad_div_uneven_inputs"],
    ),
    (
        "refused: both would exchange the same gradients",
        "the module of this DDP model is a DistributedDataParallel as well",
        ["ddp_static_graph_nested_types"],
    ),
    (
        "refused: DDP does not say when a backward pass ends",
        "DDP(skip_all_reduce_unused_params=True)",
        ["skip_all_reduce_unused_parameters"],
    ),
    (
        "refused: gradients would be used before they are exchanged",
        "is stepped inside backward()",
        [
            "ddp_apply_optim_in_backward",
            "ddp_apply_optim_in_backward_grad_as_bucket_view_false",
            "ddp_apply_optim_in_backward_ignored_params",
        ],
    ),
    (
        "refused: DDP's native mixed precision has taken the only hook",
        "this model already has a communication hook",
        [
            "ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
            "ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
            "ddp_native_mixed_precision_ignored_params",
            "ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
            "ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
        ],
    ),
    (
        "refused by DDP: the test registers a hook of its own, and there is room for one",
        "register_comm_hook or register_builtin_comm_hook can only be called once",
        [
            "accumulate_gradients_no_sync_allreduce_hook",
            "accumulate_gradients_no_sync_allreduce_with_then_hook",
            "ddp_hook_parity_allreduce",
            "ddp_hook_parity_allreduce_process_group",
            "ddp_hook_parity_post_localSGD",
            "ddp_hook_parity_powerSGD",
            "ddp_hook_pickling_powerSGD",
            "ddp_uneven_inputs",  # at its end, after the models without one
        ],
    ),
    (
        "inapplicable: the test looks for the absence of a hook in DDP's log",
        "_on_bucket is not None",
        ["ddp_comm_hook_logging"],
    ),
    (
        "inapplicable: the test counts DDP's allreduces in the profile, and there are none",
        "Expected 6 but got 0",
        ["ddp_profiling_torch_profiler"],
    ),
    (
        "inapplicable: the test looks for the GPU's number",
        "AssertionError",
        ["ddp_device", "ddp_logging_data_gpu"],
    ),
    (
        "inapplicable: DDP itself refuses this layer on a CPU",
        "SyncBatchNorm layers only work with GPU modules",
        [
            "DistributedDataParallel_SyncBatchNorm",
            "DistributedDataParallel_SyncBatchNorm_2D_Input",
            "DistributedDataParallel_SyncBatchNorm_Channels_Last",
            "DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
            "DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
            "DistributedDataParallel_SyncBatchNorm_No_Affine",
            "DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
            "DistributedDataParallel_SyncBatchNorm_half",
            "ddp_inference",
            "ddp_uneven_inputs_stop_iteration_sync_bn",
            "sync_bn_logged",
        ],
    ),
]
WORDS = {f"test_{name}": words for _, words, names in REASONS for name in names}


@pytest.fixture(scope="module")
def outcomes(request):
    """Run the selected tests two at a time, because their ranks mostly wait for each other."""
    chosen = [i.callspec.params["job"] for i in request.session.items if i.module is request.module]
    with ThreadPoolExecutor(2) as pool:
        yield {job: pool.submit(_run, *job) for job in chosen}


def _run(*job):
    tests = _outcomes_of(job)
    # gloo connects all ranks of a new group with each other, and a rank that has ended its test closes
    # its connections while a slow one may still be connecting (seen once on two busy cores)
    if any("connectFullMesh failed" in why for test in tests for why in test["why"]):
        tests = _outcomes_of(job)
    return tests


def _outcomes_of(job):
    written = run_well("-m", "tests.distributed.suites", *job, seconds=500)
    return [json.loads(line) for line in written.splitlines() if line.startswith("{")]


def wrong(test):
    """Return a description of the fault in a test's outcome, or an empty string."""
    expected, why = WORDS.get(test["name"]), " / ".join(test["why"])
    match test["end"], expected:
        case ("passed" | "skipped", None):  # according to its decorators, for torch's open issues
            return ""
        case "passed", _:
            return "passes, and is in the table: take it out"
        case "failed", words if words is not None and words in why:
            return ""
        case "failed", None:
            return f"failed, and has no row in the table: {why}"
    return f"{test['end']}; the table expects {expected!r}: {why}"


@pytest.mark.parametrize("job", TORCHS, ids=str)
def test_torchs_own_ddp_tests(outcomes, job):
    pytest.importorskip("expecttest", reason="PyTorch's own tests need expecttest")
    tests = outcomes[job].result()
    assert {test["name"]: said for test in tests if (said := wrong(test))} == {}
    assert sum(test["end"] == "passed" for test in tests if test["made"]) >= 50


@pytest.mark.parametrize("job", ACCELERATES, ids=str)
def test_accelerates_own_tests(outcomes, job):
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    tests = outcomes[job].result()
    assert {test["name"]: test["why"] for test in tests if test["end"] != "passed"} == {}
    assert any(test["made"] for test in tests)
