"""What can be an observer, and how those are refused that cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from percolator import InvalidArgument, Table, UsageError, codecs, observes
from percolator.observers import load
from percolator.observers.definition import Observer, checked

docs = Table("docs")
text = docs.column("text", codecs.text)
title = docs.column("title", codecs.text)
elsewhere = Table("others").column("text", codecs.text)


@observes(text)
async def index(tx: Any, row: str) -> str:
    return f"indexed {row}"


def test_an_observer_has_the_name_of_its_function_and_can_be_called_as_one() -> None:
    @observes(text, name="other")
    def named(tx: Any, row: str) -> str:
        return row

    assert index.name == "index"
    assert index.is_async
    assert named.name == "other"
    assert not named.is_async
    assert named(None, "a") == "a"


def test_a_third_parameter_asks_for_the_column() -> None:
    @observes(text, title)
    def both(tx: Any, row: str, column: Any) -> None: ...

    @observes(text)
    def any_number(*everything: Any) -> None: ...

    @observes(text)
    def defaulted(tx: Any, row: str, column: Any = None) -> None: ...

    assert both.wants_column
    assert not any_number.wants_column
    assert not defaulted.wants_column
    assert [column.name for column in both.columns] == [b"text", b"title"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ((), "at least one column"),
        (("text",), "watches columns, not 'text'"),
        ((text, elsewhere), r"columns of one table, not of \['docs', 'others'\]"),
        ((text, text), "each column once"),
    ],
)
def test_what_is_watched_is_checked(columns: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        observes(*columns)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"attempts": 0}, "attempts"),
        ({"attempts": 1.5}, "attempts"),
        ({"concurrency": True}, "concurrency"),
        ({"deadline": "1"}, "deadline"),
        ({"name": b"bytes"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "n" * 65}, "name"),
        ({"name": "two\nlines"}, "name"),
    ],
)
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        observes(text, **options)(lambda tx, row: None)
    assert refused.value.field == field


def test_a_function_that_takes_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"take \(tx, row\) or \(tx, row, column\)"):

        @observes(text)
        def wrong(tx: Any) -> None: ...


def test_a_function_that_only_makes_a_coroutine_has_not_run() -> None:
    """As behind a decorator that knows nothing of async functions: its change would be lost."""

    async def real(tx: Any, row: str) -> None: ...

    @observes(text)
    def wrapped(tx: Any, row: str) -> Any:
        return real(tx, row)

    with pytest.raises(UsageError, match="returned a coroutine and run nothing"):
        wrapped.call_blocking(None, "a")


def test_an_observer_of_an_observer_is_refused() -> None:
    with pytest.raises(UsageError, match="an observer already"):
        observes(title)(index)


def test_a_list_is_checked_before_anything_runs() -> None:
    @observes(title, name="index")
    def namesake(tx: Any, row: str) -> None: ...

    assert checked([index]) == [index]
    for wrong, reason in (
        (index, "expected a list"),
        ([], "nothing to run"),
        ([index, len], r"observers\[1\].*decorate it"),
        ([index, namesake], r"observers\[1\]: table 'docs' has an observer 'index' already"),
        ([index, index], "the same observer twice"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            checked(wrong)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory, which is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "some_observers", raising=False)
    return tmp_path / "some_observers.py"


SOME = """
from percolator import Table, codecs, observes

@observes(Table("docs").column("text", codecs.text))
def index(tx, row): ...

observers = [index]
"""


def test_observers_are_loaded_from_the_working_directory(module: Path) -> None:
    module.write_text(SOME)
    (found,) = load("some_observers:observers")
    assert isinstance(found, Observer)
    assert found.name == "index"


@pytest.mark.parametrize(
    ("content", "reference", "reason"),
    [
        (SOME, "some_observers", "expected module:name, got 'some_observers'"),
        (SOME, ":observers", "expected module:name"),
        (SOME, "some_observers:observer", "has no 'observer'; did you mean 'observers'?"),
        (SOME, "some_observers:index", "some_observers:index: expected a list of observers"),
        (SOME, "no_such_module:x", "module 'no_such_module' does not import: ModuleNotFound"),
        ("import nothing_like_it", "some_observers:x", "No module named 'nothing_like_it'"),
        ("1 +", "some_observers:x", "does not import: SyntaxError"),
        ("1 / 0", "some_observers:x", r"ZeroDivisionError: .*some_observers.py, line 1\)"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said(
    module: Path, content: str, reference: str, reason: str
) -> None:
    module.write_text(content)
    with pytest.raises(InvalidArgument, match=reason.replace("?", r"\?")):
        load(reference)
