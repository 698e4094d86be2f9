"""`percolator serve SERVICE [OPTION ...]`: runs a service in this process.

It imports nothing but the service that is asked for: `percolator.cli` comes here before it imports
any other command, which would make each start a third of a second longer.
"""

from __future__ import annotations

import atexit
import difflib
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

SERVICES = {
    "oracle": "hands out the timestamps of a cluster",
    "lockservice": "knows which processes are alive, and which rows they work on",
    "master": "keeps the tables, and which server serves which tablet",
    "tabletserver": "serves tablets; `tabletserver dump PATH` shows a closed one",
    "worker": "runs observers",
    "gateway": "is one front door, for other languages and other networks",
}

EXIT_REFUSED = 2

NEEDED = (
    "grpc_health",
    "grpc_reflection",
    "plyvel_next" if sys.version_info >= (3, 13) else "plyvel",
    "prometheus_client",
    "pydantic",
    "structlog",
)
"""Modules of the extra `server` without which no service starts."""

_IMPORTED_OBJECTS_MAX = 200_000
"""More than any program imports: to look through that again and again took a tenth of its start."""


def main(arguments: Sequence[str]) -> int:
    """Runs the service that the first argument names, with the others. Returns the exit code."""
    gc.set_threshold(_IMPORTED_OBJECTS_MAX)
    # The interpreter would look through everything once more at its end.
    atexit.register(gc.freeze)
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_help_text())
        return 0
    if not arguments or arguments[0] not in SERVICES:
        return _refuse(_what_is_wrong(arguments))
    if missing := absent(NEEDED):
        return _refuse(f"the services need {missing}")
    name, *options = arguments
    code: int = import_module(f"percolator.services.{name}.service").main(options)
    return code


def absent(modules: Sequence[str]) -> str:
    """The modules that are not installed, and the command that installs them; empty if all are."""
    missing = [name for name in modules if find_spec(name) is None]
    return f"{', '.join(missing)}: pip install 'percolator-store[server]'" if missing else ""


def _what_is_wrong(arguments: Sequence[str]) -> str:
    known = ", ".join(SERVICES)
    if not arguments:
        return f"percolator serve: expected a service: {known}"
    name = arguments[0]
    if name.startswith("-"):
        return f"percolator serve: {name}: options come after the service, one of {known}"
    near = difflib.get_close_matches(name, SERVICES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {known}"
    return f"percolator serve: there is no service {name!r}; {hint}"


def _help_text() -> str:
    width = max(map(len, SERVICES))
    lines = [
        "usage: percolator serve SERVICE [OPTION ...]",
        "",
        "Runs a service of a cluster in this process, until a signal ends it.",
        "",
        *(f"  {name:{width}}  {text}" for name, text in SERVICES.items()),
        "",
        "`percolator serve SERVICE --help` lists the options of one.",
    ]
    return "\n".join(lines) + "\n"


def _refuse(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return EXIT_REFUSED
