"""A dead letter's traceback shows the lines of code of all errors in the chain, in every Python."""

from __future__ import annotations

import pytest

from percolator.observers.running.tracebacks import traceback_of


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
