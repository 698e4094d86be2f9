"""`python -m tests.chaos.killed_backup ADDRESS DIRECTORY POINT`: exports or imports, and is killed.

It kills itself with SIGKILL, so that it happens exactly at that point.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from percolator.aio.bulk_load import BulkLoad
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer
from percolator.backup.importer import ImportLog
from percolator.backup.part_files import CellsFile

PIN_TTL = 3.0


class Point(NamedTuple):
    """A point before or after a call of this function."""

    owner: Any
    name: str
    call: int = 1
    after: bool = False


EXPORT = {
    "the plan is half there": Point(Path, "replace"),
    "there is a plan and nothing else": Point(export_files, "write_export", after=True),
    "a file has just been begun": Point(CellsFile, "write", after=True),
    "a file is there and not noted": Point(export_files, "write_part"),
    "two files are noted": Point(export_files, "write_part", 2, after=True),
    "all is there but the manifest": Point(export_files, "write_export", 2),
}
IMPORT = {
    "a table is closed and not noted": Point(ImportLog, "begun"),
    "all tables are closed": Point(ImportLog, "begun", 2, after=True),
    "some cells are loaded": Point(BulkLoad, "load", 2, after=True),
    "a part is loaded and not noted": Point(ImportLog, "loaded"),
    "two parts are noted": Point(ImportLog, "loaded", 2, after=True),
    "one table is complete": Point(BulkLoad, "complete", after=True),
    "all tables are complete": Point(BulkLoad, "open"),
    "one table is open": Point(BulkLoad, "open", after=True),
    "all are open": Point(ImportLog, "remove"),
}


def plant(point: Point) -> None:
    """Makes the process die at this point."""
    correct: Callable[..., Any] = getattr(point.owner, point.name)
    calls = itertools.count(1)

    def die(number: int, *, after: bool) -> None:
        if number == point.call and point.after is after:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrong(*arguments: Any, **named: Any) -> Any:
        die(number := next(calls), after=False)
        result = correct(*arguments, **named)
        die(number, after=True)
        return result

    async def wrong_async(*arguments: Any, **named: Any) -> Any:
        die(number := next(calls), after=False)
        result = await correct(*arguments, **named)
        die(number, after=True)
        return result

    setattr(point.owner, point.name, wrong_async if inspect.iscoroutinefunction(correct) else wrong)


async def main(address: str, directory: Path, point: str) -> None:
    async with connect(address) as db:
        plant((EXPORT | IMPORT)[point])
        if point in EXPORT:
            await exporter.export(db, directory, pin_ttl_seconds=PIN_TTL)
        else:
            await importer.import_tables(db, directory)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
