"""Everything public has a docstring: the API pages are generated from them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

import percolator
from percolator import aio, codecs, errors, recipes, testing


def _public(module: ModuleType) -> dict[str, object]:
    """The names in `__all__`, or those defined in the module itself."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("percolator"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            function = getattr(value, "__func__", value)
            if inspect.isroutine(function) or isinstance(value, property):
                yield name, function


@pytest.mark.parametrize("module", [percolator, aio, codecs, errors, recipes, testing])
def test_every_public_name_and_method_has_a_docstring(module: ModuleType) -> None:
    silent = []
    for name, value in _public(module).items():
        if not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value):
            silent += [
                f"{name}.{member}" for member, what in _members(value) if not inspect.getdoc(what)
            ]
    assert silent == []
