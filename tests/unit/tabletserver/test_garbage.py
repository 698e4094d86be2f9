"""Requests leave nothing for the garbage collector, which rarely runs (process.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tabletserver.memory_store import COMMIT, Machine, put, target

OF_A_TABLET_SERVER = (
    "percolator.tablet",
    "percolator.v1.tabletserver",
    "percolator.services.tabletserver",
)
"""Only these are counted: in another thread, a client of another test may still be running."""


@contextmanager
def garbage() -> Iterator[list[str]]:
    """The types of a tablet server's objects that only the collector could free, at its end."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [
            type(each).__name__
            for each in gc.garbage
            if type(each).__module__.startswith(OF_A_TABLET_SERVER)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_mutations_reads_and_scans_are_freed_at_once() -> None:
    """Each page that waited for the collector held a MiB, a hundred pages held a hundred."""
    machine = Machine()
    await machine.open(1)
    rows = [b"%04d" % number for number in range(50)]
    with garbage() as left:
        await machine.mutate(put(1, *rows), put(2, b"refused"))
        await machine.value(1, rows[0])
        for reverse in (False, True):
            scan = pb.ScanRequest(
                target=target(1), all_columns=True, timestamp=COMMIT, reverse=reverse
            )
            pages = [page async for page in machine.handler.scan(scan)]
            assert sum(len(page.found.rows) for page in pages) == len(rows)
    assert left == []
