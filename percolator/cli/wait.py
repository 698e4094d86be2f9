"""`percolator wait`: waits until observers have nothing left to do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table as Screen

from percolator import aio
from percolator.aio.observing import worker_context
from percolator.cli.connection import connection, errors_console, plain
from percolator.counts import counted
from percolator.observers.waiting import Quiet, Remaining, wait_until_quiet


def wait(
    context: typer.Context,
    timeout: Annotated[
        float | None,
        typer.Option(help="Give up after this many seconds [default: never].", min=0.001),
    ] = None,
) -> None:
    """Wait until observers have nothing left to do, in any table.

    It waits neither for paused observers nor for dead letters, but reports both.
    """
    here = connection(context)

    async def run(database: aio.Database) -> Quiet:
        def note(remaining: Remaining) -> None:
            left = f"at least {remaining}" if remaining else "nothing found; checking once more"
            status.update(plain(left))

        return await wait_until_quiet(
            worker_context(database.internal.engine), timeout, on_pass=note
        )

    with errors_console.status("looking for work") as status:
        quiet = here.run_with_database(run)
    lines = Screen.grid()
    lines.add_row(f"nothing left to do ({quiet.passes} passes, {quiet.seconds:.1f} s)")
    for table, observer in quiet.paused:
        lines.add_row(plain(f"did not wait for observer {observer} of table {table}: it is paused"))
    for (table, observer), count in sorted(quiet.dead_letters.items()):
        left = counted(count, "dead letter")
        lines.add_row(plain(f"observer {observer} of table {table} has {left}"))
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
