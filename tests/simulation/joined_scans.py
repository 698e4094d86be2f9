"""Scans whose pages may be joined to blocks of memory, as a batch reader asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing

from percolator.aio.snapshot import Snapshot
from percolator.routing.joined_page import JoinedPage, SentPage
from percolator.schema import Table
from percolator.world import Random
from tests.isolation.history import Found, Scan

JOINED = "page of joined cells"
_COLUMNS = (None, None, (b"v",), (b"v", b"w"))
"""Which columns are asked for: rows have the same ones more often if there is only one."""


class JoinedScans:
    """Which scans of a session are made with joined pages, too."""

    def __init__(self, share: float, random: Random, struck: Counter[str]) -> None:
        self._share = share
        self._random = random
        self._struck = struck

    def is_due(self) -> bool:
        """Whether the next scan is made with joined pages, too."""
        return self._share > 0 and self._random.random() < self._share

    async def scan(
        self, snapshot: Snapshot, table: Table[bytes], start: bytes = b"", stop: bytes = b""
    ) -> Scan:
        """The rows of the range, in all columns or in some of them."""
        columns = self._random.choice(_COLUMNS)
        found: list[Found] = []
        pages = snapshot.scan_joined(table, start=start, end=stop, columns=columns)
        async with aclosing(pages):
            async for page in pages:
                self._struck[JOINED] += isinstance(page, JoinedPage)
                found.extend(_cells(page))
        return Scan(table.name, start, stop, tuple(found), columns)


def _cells(page: SentPage) -> Iterator[Found]:
    if not isinstance(page, JoinedPage):
        yield from map(Found, page.rows, page.columns, page.values)
        return
    columns = {name: values.cut() for name, values in page.columns.items()}
    for at, row in enumerate(page.rows.cut()):
        for name, values in columns.items():
            yield Found(row, name, values[at])
