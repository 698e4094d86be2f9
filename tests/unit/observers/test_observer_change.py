"""How a change to a table's observers is applied."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.observers.registry import observer_change
from percolator.observers.registry.observer_change import changed_observers
from percolator.v1.master_pb2 import ChangeObserversRequest as Change
from percolator.v1.master_pb2 import Observer

INDEX = Observer(name="index", columns=[b"body", b"title"])
COUNT = Observer(name="count", columns=[b"body"], weak=True)


def change(before: list[Observer], **fields: Any) -> tuple[list[Observer], bool]:
    changed = changed_observers("pages", before, Change(**fields))
    return changed.observers, changed.raises_version


def refused(before: list[Observer], **fields: object) -> str:
    with pytest.raises(InvalidArgument) as caught:
        change(before, **fields)
    return caught.value.field


def test_adding_and_removing_observers_raises_the_version() -> None:
    assert change([], add=[INDEX, COUNT]) == ([COUNT, INDEX], True)
    assert change([COUNT, INDEX], remove=["count"]) == ([INDEX], True)


def test_adding_a_registered_observer_changes_nothing() -> None:
    """Every worker adds its observers when it starts: other clients must not notice."""
    same = Observer(name="index", columns=[b"title", b"body", b"body"])
    assert change([INDEX], add=[same]) == ([INDEX], False)


def test_another_definition_under_the_same_name_is_refused_unless_it_replaces_the_first() -> None:
    for other in (
        Observer(name="index", columns=[b"body"]),
        Observer(name="index", columns=[b"body", b"title"], weak=True),
    ):
        assert refused([INDEX], add=[other]) == "add[0]"
        assert change([INDEX], add=[other], replace=True) == ([other], True)
        assert change([INDEX], add=[other], remove=["index"]) == ([other], True)


def test_pausing_does_not_change_who_is_notified_and_raises_no_version() -> None:
    paused, raises = change([INDEX], pause=["index"])
    assert (paused[0].paused, raises) == (True, False)
    assert not INDEX.paused
    resumed, raises = change(paused, resume=["index"])
    assert (resumed, raises) == ([INDEX], False)


def test_a_paused_observer_stays_paused_when_a_worker_adds_it_again() -> None:
    paused, _ = change([INDEX], pause=["index"])
    assert change(paused, add=[INDEX]) == (paused, False)
    wider = Observer(name="index", columns=[b"body"], paused=False)
    (replaced,), _ = change(paused, add=[wider], replace=True)
    assert replaced.paused


def test_an_invalid_change_is_refused_and_names_the_field() -> None:
    assert refused([], add=[Observer(name="", columns=[b"c"])]) == "add[0].name"
    assert refused([], add=[Observer(name="x" * 65, columns=[b"c"])]) == "add[0].name"
    assert refused([], add=[Observer(name="é" * 33, columns=[b"c"])]) == "add[0].name"
    assert refused([], add=[Observer(name="a\nb", columns=[b"c"])]) == "add[0].name"
    assert refused([], add=[INDEX, INDEX]) == "add[1].name"
    for column in (b"", b"x" * 256, b"\0", b"\x00ack\x00"):
        assert refused([], add=[Observer(name="o", columns=[column])]) == "add[0].columns"
    assert refused([], add=[Observer(name="o")]) == "add[0].columns"
    assert refused([INDEX], remove=["count"]) == "remove"
    assert refused([INDEX], pause=["count"]) == "pause"
    assert refused([INDEX], resume=["count"]) == "resume"
    assert refused([INDEX], pause=["index"], resume=["index"]) == "resume"


def test_a_column_has_no_more_observers_than_one_commit_can_notify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise every commit of such a cell would be refused, and its lock would stay."""
    monkeypatch.setattr(observer_change, "OBSERVERS_PER_COLUMN_MAX", 1)
    assert refused([INDEX], add=[Observer(name="o", columns=[b"body"])]) == "add"
    assert change([INDEX], add=[Observer(name="o", columns=[b"other"])])[1]
    monkeypatch.setattr(observer_change, "OBSERVERS_MAX", 1)
    assert refused([INDEX], add=[Observer(name="o", columns=[b"other"])]) == "add"
