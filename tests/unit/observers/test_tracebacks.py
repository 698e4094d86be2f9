"""A dead letter's traceback shows the lines of code of all errors in the chain, in every Python."""

from __future__ import annotations

import asyncio

import pytest

from percolator.observers.runs import summary_of, traceback_of


def _look_up() -> None:
    try:
        int("tea")
    except ValueError as error:
        raise LookupError("no such product") from error


def _caught() -> BaseException:
    with pytest.raises(LookupError, match="product") as caught:
        _look_up()
    return caught.value


def test_the_cause_comes_first_and_each_error_has_its_lines() -> None:
    lines = [line.strip() for line in traceback_of(_caught()).splitlines()]
    shown = [line for line in lines if not line.startswith("File")]
    assert shown[:2] == ['int("tea")', "ValueError: invalid literal for int() with base 10: 'tea'"]
    assert shown[-2:] == [
        'raise LookupError("no such product") from error',
        "LookupError: no such product",
    ]


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = _caught()
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error
    assert traceback_of(error).count("LookupError: no such product") == 1


def test_an_error_without_a_message_is_named() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nothing to say")

    assert traceback_of(Silent()).endswith("Silent: (it has no message)")


def test_the_notes_of_an_error_follow_its_message() -> None:
    error = _caught()
    error.add_note("while reading the price list")
    error.add_note("line 7")
    lines = traceback_of(error).splitlines()
    assert lines[-3:] == [
        "LookupError: no such product",
        "while reading the price list",
        "line 7",
    ]


@pytest.mark.parametrize("notes", [None, 5, "one", [b"raw", "\ud800"]])
def test_notes_that_are_none_do_not_hide_the_error(notes: object) -> None:
    error = LookupError("no such product")
    error.__notes__ = notes  # type: ignore[assignment]  # any program can do that
    shown = traceback_of(error)
    assert "LookupError: no such product" in shown
    shown.encode()


async def _grouped() -> ExceptionGroup[Exception]:
    async def fail(text: str) -> None:
        int(text)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail("tea"))
            tasks.create_task(fail("cup"))
    except ExceptionGroup as errors:
        return errors
    raise AssertionError("nothing has failed")


async def test_the_errors_of_a_group_come_before_it_each_with_its_lines() -> None:
    shown = [line.strip() for line in traceback_of(await _grouped()).splitlines()]
    errors = [line for line in shown if "Error: " in line or "Group: " in line]
    assert errors == [
        "ValueError: invalid literal for int() with base 10: 'tea'",
        "ValueError: invalid literal for int() with base 10: 'cup'",
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)",
    ]
    assert shown.count("int(text)") == 2


async def test_one_line_about_a_group_says_what_its_first_error_is() -> None:
    nested = ExceptionGroup("both", [await _grouped(), KeyError("later")])
    assert summary_of(nested) == (
        "ExceptionGroup: both (2 sub-exceptions): "
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): "
        "ValueError: invalid literal for int() with base 10: 'tea'"
    )
    assert summary_of(KeyError("later")) == "KeyError: 'later'"


def test_very_deep_groups_have_a_bounded_traceback_and_summary() -> None:
    error: Exception = ValueError("the first")
    for _ in range(5_000):
        error = ExceptionGroup("again", [error])
    assert traceback_of(error).count("again") == 10
    assert summary_of(error).count("again") == 10
