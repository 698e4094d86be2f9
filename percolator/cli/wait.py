"""`percolator wait`: until observers have nothing left to do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import observers_client
from percolator.cli.connection import connection, errors_console, plain
from percolator.observers.waiting import Quiet, Remaining, wait_until_quiet


def wait(
    context: typer.Context,
    timeout: Annotated[
        float | None,
        typer.Option(help="Give up after so many seconds [default: never].", min=0.001),
    ] = None,
) -> None:
    """Wait until no observer of any table has anything left to do.

    Observers that are paused are not waited for, nor are dead letters: both are reported.
    """
    here = connection(context)

    async def run(database: aio.Database) -> Quiet:
        def note(remaining: Remaining) -> None:
            left = f"at least {remaining}" if remaining else "nothing found; looking once more"
            status.update(plain(left))

        return await wait_until_quiet(observers_client(database.engine), timeout, on_pass=note)

    with errors_console.status("looking for work") as status:
        quiet = here.run_with_database(run)
    lines = Screen.grid()
    lines.add_row(f"nothing is left to do ({quiet.passes} passes, {quiet.seconds:.1f} s)")
    for table, observer in quiet.paused:
        lines.add_row(plain(f"not waited for: observer {observer} of table {table} is paused"))
    for (table, observer), count in sorted(quiet.dead_letters.items()):
        lines.add_row(plain(f"dead letters: {count:,} of observer {observer} of table {table}"))
    here.show(
        {
            "passes": quiet.passes,
            "seconds": round(quiet.seconds, 3),
            "paused": [{"table": table, "observer": observer} for table, observer in quiet.paused],
            "dead_letters": [
                {"table": table, "observer": observer, "count": count}
                for (table, observer), count in sorted(quiet.dead_letters.items())
            ],
        },
        lines,
    )
