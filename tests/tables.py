"""Tests that are tables: a case for every row, named by the test's own parameters."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sparsync.errors import ConfigurationError

__all__ = ["cases", "refused", "refuses"]


def cases(*rows: Any) -> Callable[[Callable[..., None]], Any]:
    """Run a test once per row, like ``pytest.mark.parametrize``.

    A row is a tuple of values for the test's first parameters, or a value for the first one.
    """

    def decorate(test: Callable[..., None]) -> Any:
        first = rows[0].values if hasattr(rows[0], "marks") else rows[0]  # of ``pytest.param``
        number = len(first) if isinstance(first, tuple) else 1
        names = [*inspect.signature(test).parameters][:number]
        return pytest.mark.parametrize(",".join(names), rows)(test)

    return decorate


def refuses(*rows: tuple[Any, ...], error: type[Exception] = ConfigurationError) -> Any:
    """Turn a call into a test with a case per row, which the call must refuse.

    A row has values for the function's first parameters, and a pattern that the message, which must
    be one line, matches. All other parameters of the function are fixtures.
    """

    def decorate(call: Callable[..., object]) -> Any:
        def test(says: str, **given: Any) -> None:
            with pytest.raises(error, match=says) as caught:
                call(**given)
            assert "\n" not in str(caught.value), str(caught.value)

        parameters = inspect.signature(call).parameters
        says = inspect.Parameter("says", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([says, *parameters.values()])  # type: ignore[attr-defined]
        test.__name__, test.__module__, test.__doc__ = call.__name__, call.__module__, call.__doc__
        names = [*parameters][: len(rows[0]) - 1]
        ids = [re.sub(r"[^\w .,=;'-]+", "", row[-1])[:60] for row in rows]
        return pytest.mark.parametrize((*names, "says"), rows, ids=ids)(test)

    return decorate


@contextmanager
def refused(*words: str, error: type[Exception] = ConfigurationError) -> Iterator[None]:
    """Assert that an error is raised whose message is one line and contains these words."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert "\n" not in said, said
