"""The blocking and the asyncio API have the same names, all documented. That their signatures are
the same, a test of the generator says (tests/unit/repository/test_tidy.py)."""

from __future__ import annotations

import inspect

import pytest

import percolator
from percolator import aio
from percolator.blocking import api
from percolator.observers import worker as asynchronous_worker

INTERNAL = {
    # Parts that one API is built from, and that the other does not need.
    "over",
    "internal",
    "aclose",
    "ended",
    "require_not_ended",
    "scan_pages",
    "scan_cells",
    "scan_joined",
    "get_cells",
    # What is written once for asyncio, and called by both kinds (percolator/decorators.py).
    "call_inside",
}

PAIRS: list[tuple[type, type]] = [
    (percolator.Database, aio.Database),
    (percolator.Transaction, aio.Transaction),
    (percolator.Snapshot, aio.Snapshot),
    (percolator.Changes, aio.Changes),
    (api.Worker, asynchronous_worker.Worker),
]


def _public(kind: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and name not in INTERNAL
    }


def _instance_attributes(kind: type) -> set[str]:
    """Attributes that only exist on instances are documented where they are set."""
    source = inspect.getsource(kind)
    return {
        line.strip().removeprefix("self.").split(" ")[0].rstrip(":")
        for line in source.splitlines()
        if line.strip().startswith("self.") and " = " in line and "._" not in line
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_the_names_are_the_same(blocking: type, asynchronous: type) -> None:
    attributes = {
        name
        for kind in asynchronous.__mro__[:-1]
        for name in _instance_attributes(kind)
        if name not in INTERNAL
    }
    names = set(_public(asynchronous)) | {name for name in attributes if "." not in name}
    assert set(_public(blocking)) == names


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_everything_public_is_documented(blocking: type, asynchronous: type) -> None:
    for kind in (blocking, asynchronous):
        undocumented = [
            name
            for name, member in _public(kind).items()
            if callable(member) and not inspect.getdoc(member)
        ]
        assert undocumented == []


def test_every_public_name_exists() -> None:
    for name in percolator.__all__:
        assert getattr(percolator, name) is not None
    assert set(percolator.__all__) <= set(dir(percolator))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = percolator.nonsense  # type: ignore[attr-defined]
