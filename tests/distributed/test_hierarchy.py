"""DDP on two nodes of two ranks: dense inside a node, sparse between nodes."""

import pytest

from sparsync.cli.launch import launch

from . import hierarchy_edges, hierarchy_programs

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("nodes"))
    return launch(hierarchy_programs.everything_about_nodes, 4, directory, timeout=60.0)


@pytest.fixture(scope="module")
def wrong():
    return launch(hierarchy_edges.everything_that_goes_wrong, 4, timeout=60.0)


@pytest.mark.parametrize("scenario", ["training", "law", "bytes", "resume", "nonfinite"])
def test_nodes(nodes, scenario):
    assert all(nodes[scenario].values()), nodes[scenario]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clip", ["Correction(clip=...)", "clip_grad_norm_"]),
        ("a word", ["'rack'", "'node'"]),
        ("three to a node", ["LOCAL_WORLD_SIZE", "'3'"]),
        ("one dimension", ["two dimensions"]),
        ("inside a node", ["PeerError", "density"]),
        ("replicate", ["replicate= is for models without DDP"]),
    ],
)
def test_what_cannot_work_is_refused(nodes, name, words):
    message = nodes["refusals"][name]
    assert all(word in message for word in words), message


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["a node fails", "a gather fails", "load", "one breaks off"])
def test_one_that_fails(wrong, scenario):
    assert all(wrong[scenario].values()), wrong[scenario]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["nodes, raise", "shards, raise", "shards, warn"])
def test_the_sentinel_is_heard_on_all_ranks(wrong, case):
    for said in wrong["sentinel"][case]:
        assert "step 1: '3.bias' differs between rank 1 and rank 3" in said
        assert ("PeerError" in said) == case.endswith("raise")


@pytest.mark.slow
def test_states_of_different_steps_are_refused_on_all_ranks(wrong):
    told = wrong["states"]
    assert all(
        "the step of the saved states of a replica's parts" in said for said in told["parts"]
    )
    assert all("ranks disagree on" in said for said in told["rank"])
    assert told["steps"] == [3] * 4
