"""Arguments that are refused by the name of their field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from percolator.errors import InvalidArgument


@contextmanager
def refused(field: str, match: str | None = None) -> Iterator[None]:
    """Code that has to fail with an error that names this field."""
    with pytest.raises(InvalidArgument, match=match) as caught:
        yield
    assert caught.value.field == field
