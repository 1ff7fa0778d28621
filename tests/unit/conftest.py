import pytest
import torch.distributed as dist

from .wire_messages import BACKENDS, using


@pytest.fixture(params=BACKENDS)
def each_backend(request):
    """Run the test once per backend of the packing kernels."""
    with using(request.param):
        yield request.param


@pytest.fixture
def alone():
    """Run the test on the only rank of a gloo group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
