"""Tests in this folder may run on every rank, so all ranks are forked from one warm server."""

import multiprocessing
from multiprocessing import forkserver

import pytest

from tests.on_ranks import together  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _warm_server():
    multiprocessing.set_forkserver_preload(["tests.distributed.warm"])
    forkserver.ensure_running()
