"""`percolator dev`: a cluster for development on this machine.

The services bring this command, through an entry point: the library knows no services, and works
without what they need.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, entry_points, requires

import typer

from percolator.cli.connection import connection, fail
from percolator.errors import UsageError

DISTRIBUTION = "percolator-store"
EXTRA = "server"
GROUP = "percolator.commands"
AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options, even `--help`, are those of the other command."""


def dev(context: typer.Context) -> None:
    """Start a whole cluster on this machine, for development (`percolator-store[server]`)."""
    found = next(iter(entry_points(group=GROUP, name="dev")), None)
    if found is None:
        fail(UsageError("this installation has no services: install percolator-store again"))
    # Looked for before the services are imported: they would only say which import failed.
    missing = [name for name in _needed() if not _is_installed(name)]
    if missing:
        install = f"pip install '{DISTRIBUTION}[{EXTRA}]'"
        fail(UsageError(f"`percolator dev` needs {', '.join(missing)}: {install}"))
    # The global option is taken from wherever it was given: the other command has its own.
    as_json = ["--json"] if connection(context).as_json else []
    found.load()([*context.args, *as_json], context.command_path)


def _needed() -> list[str]:
    """The distributions that the services need beyond what the library needs."""
    extra = re.compile(rf"""^([\w.-]+).*;.*\bextra *== *["']{EXTRA}["']""")
    return [found[1] for line in requires(DISTRIBUTION) or () if (found := extra.match(line))]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
