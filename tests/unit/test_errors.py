import pytest

from sparsync import errors


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("ConfigurationError", (ValueError,)),
        ("WireFormatError", (ValueError,)),
        ("CheckpointError", (OSError,)),
        ("NonFiniteGradientError", (ArithmeticError,)),
        ("CommunicationError", (RuntimeError,)),
        ("PeerError", (errors.CommunicationError, RuntimeError)),
        ("DeadlineError", (errors.CommunicationError, TimeoutError)),
        ("DeadlockError", (errors.CommunicationError,)),
    ],
)
def test_errors_are_caught_by_their_own_and_by_the_usual_names(name, parents):
    error = getattr(errors, name)
    assert all(issubclass(error, parent) for parent in (errors.SparsyncError, *parents))


def test_the_drawn_tree_names_every_error():
    assert all(name in errors.__doc__ for name in errors.__all__ if name.endswith("Error"))
