"""Functions of a test or of a planted bug that replace those of the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def in_place_of(
    patch: pytest.MonkeyPatch, owner: object, name: str
) -> Callable[[FunctionT], FunctionT]:
    """Decorator that puts a function in the place of another one, until the patch is undone."""

    def put(function: FunctionT) -> FunctionT:
        patch.setattr(owner, name, function)
        return function

    return put
