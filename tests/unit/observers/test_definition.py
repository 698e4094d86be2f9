"""Functions that can be observers, and how everything else is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from percolator import Table, codecs, observes
from percolator.errors import InvalidArgument, UsageError
from percolator.observers.definition import Observer, checked, load

docs = Table("docs")
text = docs.column("text", codecs.text)
title = docs.column("title", codecs.text)
elsewhere = Table("others").column("text", codecs.text)


@observes(text)
async def index(tx: Any, row: str) -> str:
    return f"indexed {row}"


def test_an_observer_has_its_functions_name_and_can_be_called_like_it() -> None:
    @observes(text, name="other")
    def named(tx: Any, row: str) -> str:
        return row

    assert index.name == "index"
    assert index.is_async
    assert named.name == "other"
    assert not named.is_async
    assert named(None, "a") == "a"


def test_a_name_that_is_not_utf8_is_refused_and_shown() -> None:
    with pytest.raises(InvalidArgument, match=r"^name: 'a\\udcffb' cannot be encoded as UTF-8"):
        observes(text, name="a\udcffb")(lambda tx, row: None)


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
        ((text, elsewhere), r"columns of one table, not of several: \['docs', 'others'\]"),
        ((text, text), "each column once"),
    ],
)
def test_watched_columns_are_checked(columns: tuple[Any, ...], reason: str) -> None:
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
        ({"pause": -0.1}, "pause"),
        ({"pause": float("nan")}, "pause"),
        ({"pause": "1"}, "pause"),
        ({"pause": None}, "pause"),
        ({"pause": 60.1}, "pause"),
        ({"concurrency": True}, "concurrency"),
        ({"deadline": "1"}, "deadline"),
        ({"name": b"bytes"}, "name"),
        ({"name": ""}, "name"),
        ({"backfill": 1}, "backfill"),
        ({"weak": "no"}, "weak"),
        ({"weak": True, "backfill": True}, "backfill"),
        ({"name": "n" * 65}, "name"),
        ({"name": "two\nlines"}, "name"),
    ],
)
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        observes(text, **options)(lambda tx, row: None)
    assert refused.value.field == field


def test_a_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"take \(tx, row\) or \(tx, row, column\)"):

        @observes(text)
        def wrong(tx: Any) -> None: ...


def test_a_function_that_only_creates_a_coroutine_has_not_run() -> None:
    """A decorator that does not support async functions makes one: the change would be lost."""

    async def real(tx: Any, row: str) -> None: ...

    @observes(text)
    def wrapped(tx: Any, row: str) -> Any:
        return real(tx, row)

    with pytest.raises(UsageError, match="returned a coroutine and ran nothing"):
        wrapped.call_blocking(None, "a")


def test_an_observer_of_an_observer_is_refused() -> None:
    with pytest.raises(UsageError, match="already an observer"):
        observes(title)(index)


def test_a_list_is_checked_before_anything_runs() -> None:
    @observes(title, name="index")
    def namesake(tx: Any, row: str) -> None: ...

    assert checked([index]) == [index]
    for wrong, reason in (
        (index, "expected a list"),
        ([], "nothing to run"),
        ([index, len], r"observers\[1\].*decorate it"),
        ([index, namesake], r"observers\[1\]: table 'docs' already has an observer 'index'"),
        ([index, index], "the same observer twice"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            checked(wrong)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a module in the working directory, which is not in `sys.path`."""
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
MUTE = """
class Mute(Exception):
    def __str__(self):
        raise ValueError

raise Mute
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
        (SOME, "no_such_module:x", "module 'no_such_module' cannot be imported: ModuleNotFound"),
        ("import nothing_like_it", "some_observers:x", "No module named 'nothing_like_it'"),
        ("1 +", "some_observers:x", "cannot be imported: SyntaxError"),
        ("1 / 0", "some_observers:x", r"ZeroDivisionError: .*some_observers.py, line 1\)"),
        ("import sys; sys.exit(0)", "some_observers:x", "cannot be imported: SystemExit: 0"),
        (
            "raise BaseException('all')",
            "some_observers:x",
            "cannot be imported: BaseException: all",
        ),
        (MUTE, "some_observers:x", "cannot be imported: Mute: its text cannot be read"),
        ("def __getattr__(name): raise KeyError(name)", "some_observers:x", "KeyError: 'x'"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_reference(
    module: Path, content: str, reference: str, reason: str
) -> None:
    module.write_text(content)
    with pytest.raises(InvalidArgument, match=reason.replace("?", r"\?")):
        load(reference)
