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
    current: BaseException | None = error
    while current is not None and len(chain) < _ERRORS_MAX and current not in chain:
        chain.append(current)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return "\n".join(_lines_of(one) for one in reversed(chain))


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
