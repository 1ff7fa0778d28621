"""Overflows, diverging replicas and checkpoints on real ranks: one start of four processes."""

import pytest

from sparsync.cli.launch import launch

from . import recovery_programs

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return launch(recovery_programs.everything, 4, folder, timeout=60.0)


def test_a_grad_scaler_skips_and_recovers_on_all_ranks(found):
    assert all(found["grad scaler"].values()), found["grad scaler"]


def test_the_sentinel_names_or_heals_a_replica_that_differs(found):
    said = found["sentinel"]
    assert "step 3: '2.bias' differs on rank 1: replicas are no longer equal" in said["raised"]
    assert said["healed"]
    assert said["stays"]
    assert ["'2.bias' differs on rank 2: healed" in text for text in said["said"]] == [True]


def test_statistics_of_batch_norm_raise_no_alarm(found):
    assert found["batch norm"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights", ["PeerError", "parameter 2.bias", "rank 0 has float32[30]", "rank 1 has"]),
        ("versions", ["PeerError", "the version of torch", "rank 2 has 1.0.0; give"]),
        ("sentinel", ["PeerError", "(period=5", "(period=6", "(period=7", "(period=8"]),
        ("skip", ["ConfigurationError", "nonfinite='skip'", "give 'propagate'"]),
        ("no scaler", ["ConfigurationError", "scaler is float", "GradScaler"]),
    ],
)
def test_what_differs_is_named_before_any_step(found, name, words):
    assert all(word in found["refusals"][name] for word in words), found["refusals"][name]


def test_a_checkpoint_is_continued_bit_for_bit(found):
    assert all(found["checkpoints"].values()), found["checkpoints"]


def test_ddp_and_fsdp_exchange_their_residuals(found):
    assert all(found["fsdp"].values()), found["fsdp"]


def test_every_rank_gets_its_own_weights_back(found):
    assert all(rank["local updates"] for rank in found["faults"])


def test_what_one_rank_cannot_load_or_see_all_refuse(found):
    for rank, said in enumerate(found["faults"]):
        bad = ["ConfigurationError", "NaN"] if rank == 1 else ["CheckpointError: rank 1 could not"]
        assert all(words in said["said"] for words in bad), said
        assert "CheckpointError: this rank sees only ['s" in said["unshared"]
        sees = "none" if rank == 0 else "[2]"
        assert "CheckpointError: there is no whole checkpoint in " in said["unseen"]
        assert f"(this rank sees {sees})" in said["unseen"]
        assert not said["unseen"].startswith("No")
        assert said["fine"]
