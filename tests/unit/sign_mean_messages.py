"""What the tests of sign-mean messages share: vectors cut into layers, and their codecs."""

from itertools import pairwise

from hypothesis import strategies as st

from sparsync.wire.sign_mean import SignMean

from .packed_messages import packable
from .strategies import boundaries_of

forms = st.sampled_from(["coo", "packed"])


@st.composite
def layered(draw):
    """A vector, and a codec whose layers are cuts of it, empty ones among them."""
    original = draw(packable())
    layers = [b - a for a, b in pairwise(draw(boundaries_of(original.size)))]
    return original, SignMean(draw(forms), draw(st.sampled_from([layers, None])))
