"""Loading observers that a command names: `shop.index:observers`."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.observers.definition import Observer, checked

_FIELD = "observers"


def load(reference: str) -> list[Observer]:
    """The list of observers called `name` in `module`, from "module:name".

    Modules are looked for in the working directory, too. Raises `InvalidArgument`, which says which
    part of the reference is wrong and why.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidArgument(_FIELD, f"expected module:name, got {reference!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a script's own directory is first otherwise
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidArgument(
            _FIELD, f"module {module_name!r} does not import: {_cause(error)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(_FIELD, f"module {module_name!r} has no {name!r}{hint}")
    return checked(found, reference)


def _cause(error: Exception) -> str:
    """In one line: what it was, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, ModuleNotFoundError | SyntaxError):
        where = ""  # said by the error itself, or that of the import machinery
    return f"{type(error).__name__}: {error}{where}"
