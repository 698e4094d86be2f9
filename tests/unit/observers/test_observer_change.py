"""How a change to a table's observers is applied."""

from __future__ import annotations

from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.observers import observer_change
from percolator.observers.observer_change import awaited_observers, changed_observers, with_report
from percolator.v1.master_pb2 import ChangeObserversRequest as Change
from percolator.v1.master_pb2 import Observer, OwedBackfill, ReportBackfillRequest, Table

INDEX = Observer(name="index", columns=[b"body", b"title"])
COUNT = Observer(name="count", columns=[b"body"], weak=True)


def change(before: list[Observer], **fields: Any) -> tuple[list[Observer], bool]:
    table = Table(name="pages", schema_version=7, observers=before)
    changed = changed_observers(table, Change(**fields))
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


# ---------------------------------------------------------------------------- backfills

FILLED = Observer(name="index", columns=[b"body", b"title"], backfill=True)


def registered(**fields: Any) -> Observer:
    (observer,), _ = change([], add=[Observer(name="index", columns=[b"body"], **fields)])
    return observer


def test_a_first_registration_owes_a_backfill_if_it_wants_one() -> None:
    assert registered(backfill=True).owed == OwedBackfill(version=8, columns=[b"body"])
    for without in (registered(), registered(weak=True)):
        assert not without.HasField("owed")


def test_a_request_cannot_say_what_is_owed() -> None:
    assert not registered(owed=OwedBackfill(version=1, columns=[b"body"])).HasField("owed")


def test_a_registered_observer_owes_nothing_because_a_program_adds_it_again() -> None:
    """It was registered without a backfill."""
    before = registered()
    again = Observer(name="index", columns=[b"body"], backfill=True)
    for replace in (False, True):
        assert change([before], add=[again], replace=replace) == ([before], False)


def test_what_is_owed_stays_owed_when_another_worker_adds_the_observer() -> None:
    before = registered(backfill=True)
    before.owed.row, before.owed.cells = b"m", 3
    assert change([before], add=[registered()]) == ([before], False)
    (paused,), _ = change([before], pause=["index"])
    assert paused.owed == before.owed


def test_a_removed_observer_owes_a_backfill_when_it_is_registered_again() -> None:
    first = registered(backfill=True)
    (done,) = with_report([first], ReportBackfillRequest(observer="index", version=8, done=True))
    assert change([done], remove=["index"]) == ([], True)
    ((again,), raises) = change([done], remove=["index"], add=[first])
    assert (again.owed.version, raises) == (8, True)


def test_further_columns_are_owed_alone() -> None:
    known = Observer(name="index", columns=[b"body"], backfill=True)
    (wider,), raises = change([known], add=[FILLED], replace=True)
    assert (wider.owed, raises) == (OwedBackfill(version=8, columns=[b"title"]), True)


def test_further_columns_are_owed_with_those_that_are_not_finished() -> None:
    known = Observer(name="index", columns=[b"body", b"gone"], backfill=True)
    known.owed.CopyFrom(OwedBackfill(version=3, columns=[b"body", b"gone"], row=b"m", cells=4))
    (wider,), _ = change([known], add=[FILLED], replace=True)
    assert wider.owed == OwedBackfill(version=8, columns=[b"body", b"title"])


def test_an_observer_that_is_no_longer_weak_owes_all_its_columns() -> None:
    known = Observer(name="index", columns=[b"body", b"title"], weak=True)
    (strong,), _ = change([known], add=[FILLED], replace=True)
    assert strong.owed.columns == [b"body", b"title"]
    weak = Observer(name="index", columns=[b"body", b"title"], weak=True)
    (weaker,), _ = change([strong], add=[weak], replace=True)
    assert not weaker.HasField("owed")


def test_a_weak_observer_with_a_backfill_is_refused() -> None:
    weak = Observer(name="index", columns=[b"body"], weak=True, backfill=True)
    assert refused([], add=[weak]) == "add[0].backfill"


@pytest.mark.parametrize(
    ("late", "left"),
    [
        (ReportBackfillRequest(observer="index", version=8, row=b"x", cells=9), (b"x", 9)),
        (ReportBackfillRequest(observer="index", version=8, row=b"a", cells=1), (b"m", 4)),
        (ReportBackfillRequest(observer="index", version=8), (b"m", 4)),
        (ReportBackfillRequest(observer="index", version=7, row=b"x", cells=9), (b"m", 4)),
        (ReportBackfillRequest(observer="index", version=7, done=True), (b"m", 4)),
        (ReportBackfillRequest(observer="other", version=8, done=True), (b"m", 4)),
        (ReportBackfillRequest(observer="index", version=8, done=True), None),
    ],
)
def test_only_a_report_of_the_same_registration_counts(
    late: ReportBackfillRequest, left: tuple[bytes, int] | None
) -> None:
    """A worker may have fallen behind a removal and another registration, or behind a worker."""
    known = registered(backfill=True)
    known.owed.row, known.owed.cells = b"m", 4
    (after,) = with_report([known], late)
    assert ((after.owed.row, after.owed.cells) if after.HasField("owed") else None) == left


def test_a_report_about_an_observer_that_owes_nothing_changes_nothing() -> None:
    known = registered()
    for done in (False, True):
        report = ReportBackfillRequest(observer="index", row=b"m", done=done)
        assert with_report([known], report) == [known]


def test_observers_of_a_table_that_does_not_exist_yet_owe_nothing() -> None:
    """The table is created with them: no cell is older."""
    (awaited,) = awaited_observers("pages", [], Change(add=[FILLED]))
    assert awaited == FILLED
    other = Observer(name="index", columns=[b"body"])
    with pytest.raises(InvalidArgument, match=r"'pages' already has another .* 'title'; remove it"):
        awaited_observers("pages", [awaited], Change(add=[other]))
    assert awaited_observers("pages", [awaited], Change(add=[other], replace=True)) == [other]
    assert awaited_observers("pages", [awaited], Change(remove=["index"])) == []
    for change_, field in (
        (Change(pause=["index"]), "pause"),
        (Change(resume=["index"]), "resume"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            awaited_observers("pages", [awaited], change_)
        assert caught.value.field == field


def test_a_registration_in_advance_replaces_nothing_once_the_table_exists() -> None:
    """It may have been created between two calls of the worker, with another worker's observer."""
    other = Observer(name="index", columns=[b"body"])
    assert refused([INDEX], add=[other], replace=True, awaited=True) == "add[0]"
    assert change([INDEX], add=[INDEX], replace=True, awaited=True) == ([INDEX], False)
