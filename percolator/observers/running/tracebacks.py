"""The traceback of a failed run, for its dead letter.

Without the marks below the code, which are different in each release of Python, and without the
values of variables, which may be secret.
"""

from __future__ import annotations

import traceback

_ERRORS_MAX = 10
"""An error that was raised from another, and that from another: so many are shown."""


def traceback_of(error: BaseException) -> str:
    """The errors from the first to the one that ended the run, each with its lines of code."""
    chain: list[BaseException] = []
    _collect(error, chain)
    return "\n".join(_lines_of(one) for one in reversed(chain))


def _collect(error: BaseException | None, chain: list[BaseException]) -> None:
    """Adds the error, those of a group, and what it was raised from, to the latest ones first."""
    while error is not None and len(chain) < _ERRORS_MAX and error not in chain:
        chain.append(error)
        if isinstance(error, BaseExceptionGroup):
            for one in reversed(error.exceptions[:_ERRORS_MAX]):
                _collect(one, chain)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


def summary_of(error: BaseException) -> str:
    """The error in one line. A group's own message does not say what has happened."""
    parts: list[str] = []
    while len(parts) < _ERRORS_MAX:
        parts.append(f"{type(error).__name__}: {message_of(error)}")
        if not isinstance(error, BaseExceptionGroup):
            break
        error = error.exceptions[0]
    return ": ".join(parts)


def message_of(error: BaseException) -> str:
    """The error's text, whatever its class does, and whatever the text contains."""
    try:
        return _storable(str(error))
    except Exception:  # noqa: BLE001 - the __str__ of a user's class may raise anything
        return "(it has no message)"


def _lines_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = traceback.format_list(
        [(one.filename, one.lineno or 0, one.name, one.line) for one in frames]
    )
    text = "".join([*lines, f"{type(error).__name__}: {message_of(error)}"])
    notes = getattr(error, "__notes__", ())
    found = [one for one in notes if isinstance(one, str)] if isinstance(notes, list) else []
    return _storable("\n".join([text, *found]))


def _storable(text: str) -> str:
    """Names of files may hold halves of surrogate pairs, which cannot be stored as text."""
    return text.encode(errors="backslashreplace").decode()
