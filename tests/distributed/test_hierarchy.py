"""DDP on two nodes of two ranks: dense inside a node, sparse between nodes."""

import pytest

from sparsync.bench.launch import launch

from . import hierarchy_programs

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("nodes"))
    return launch(hierarchy_programs.everything_about_nodes, 4, directory, timeout=60.0)


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
