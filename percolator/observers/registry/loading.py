"""Loads the observers named on a command line, such as `shop.index:observers`."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.observers.definition import Observer, checked


def load(reference: str) -> list[Observer]:
    """The list of observers called `name` in `module`, from "module:name"."""
    return checked(named(reference, "observers"), reference)


def named(reference: str, field: str) -> object:
    """What is called `name` in `module`, from "module:name".

    Modules may also be in the working directory. Raises `InvalidArgument`, which says which part of
    the reference in this field is wrong, and why.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidArgument(field, f"expected module:name, got {reference!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # otherwise only the script's own directory is searched
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name, None)  # may call the module's own __getattr__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Also SystemExit: a worker whose module calls sys.exit() would end without a word, with
        # an exit code that is not its own.
        raise InvalidArgument(
            field, f"module {module_name!r} cannot be imported: {_cause(error)}"
        ) from error
    if found is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(field, f"module {module_name!r} has no {name!r}{hint}")
    return found


def _cause(error: BaseException) -> str:
    """The error in one line: what it was, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, ModuleNotFoundError | SyntaxError):
        where = ""  # the error says where itself, or the place is in the import machinery
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (an error of the module, whose text is an error itself)
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}{where}"
