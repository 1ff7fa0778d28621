import pytest

from .wire_messages import BACKENDS, using


@pytest.fixture(params=BACKENDS)
def each_backend(request):
    """Run the test once per backend of the packing kernels."""
    with using(request.param):
        yield request.param
