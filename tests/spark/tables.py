"""Tables for the tests to fill and read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator import Table, codecs
from percolator.blocking import loop_thread
from percolator.v1 import master_pb2, tabletserver_pb2
from percolator.wire import methods

CATALOG = json.dumps(
    {
        "key": {"name": "url", "type": "text"},
        "columns": {
            "title": {"type": "text", "column": "meta:title"},
            "visits": {"type": "integer"},
        },
    }
)
Read = Callable[..., DataFrameReader]
"""Reads the table of this name, with these options."""
Rows = dict[str, tuple[Any, Any]]
"""Title and visits by URL."""
PAGES = "url string, title string, visits bigint"
_numbers = itertools.count(1)


class Pages:
    """A new table of four tablets, with a title and a number of visits in each row."""

    def __init__(
        self, db: percolator.Database, rows: int = 0, *, change_feed: bool = False
    ) -> None:
        self.name = f"pages-{next(_numbers)}"
        self.table = Table(self.name)
        self.title = self.table.column("meta:title", codecs.text)
        self.visits = self.table.column("visits", codecs.integer)
        self.db = db
        db.create_table(self.table, ["b", "c", "d"], change_feed=change_feed)
        self.fill(rows)

    def fill(self, rows: int, visits: int = 0) -> None:
        """Puts the same number of rows in each tablet."""
        self.db.set_many(
            (key, {self.title: f"title of {key}", self.visits: visits + number})
            for number, key in enumerate(keys(rows))
        )

    def stored(self) -> Rows:
        """Title and visits by URL, as the client reads them."""
        with self.db.snapshot() as snapshot:
            return {
                row.key: (row.get(self.title), row.get(self.visits))
                for row in snapshot.scan(self.table, columns=[self.title, self.visits])
            }

    def observe(self, master: str) -> None:
        """Registers an observer of titles."""
        observer = master_pb2.Observer(name="indexer", columns=[b"meta:title"])
        request = master_pb2.ChangeObserversRequest(table=self.name, add=[observer])
        network = self.db._asynchronous.internal.engine.world.network

        async def change() -> None:
            await network.unary(master, methods.CHANGE_OBSERVERS)(request, 10.0)

        loop_thread.shared().call(change)

    def split(self, master: str, row: bytes) -> None:
        """Splits the tablet that has the row; the second half begins with it."""
        engine = self.db._asynchronous.internal.engine

        async def split() -> None:
            info = await engine.catalog.table(self.name, engine.now() + 10)
            tablets = await engine.catalog.all_tablets(info.table_id, engine.now() + 10)
            tablet = next(one for one in reversed(tablets) if one.start < row)
            request = master_pb2.SplitTabletRequest(tablet_id=tablet.tablet_id, row=row)
            await engine.world.network.unary(master, methods.SPLIT_TABLET)(request, 20.0)

        loop_thread.shared().call(split)

    def flush(self, master: str) -> None:
        """Moves each tablet to where it is already, which writes its rows to files."""
        engine = self.db._asynchronous.internal.engine

        async def move() -> None:
            info = await engine.catalog.table(self.name, engine.now() + 10)
            for tablet in await engine.catalog.all_tablets(info.table_id, engine.now() + 10):
                request = master_pb2.MoveTabletRequest(tablet_id=tablet.tablet_id)
                await engine.world.network.unary(master, methods.MOVE_TABLET)(request, 20.0)

        loop_thread.shared().call(move)

    def notifications(self) -> int:
        """The number of pending notifications in all tablets."""
        engine = self.db._asynchronous.internal.engine

        async def count() -> int:
            info = await engine.catalog.table(self.name, engine.now() + 10)
            found = 0
            for tablet in await engine.catalog.all_tablets(info.table_id, engine.now() + 10):
                call = engine.world.network.unary(tablet.address, methods.DESCRIBE_TABLETS)
                request = tabletserver_pb2.DescribeTabletsRequest(tablet_ids=[tablet.tablet_id])
                (description,) = (await call(request, 5.0)).tablets
                found += description.statistics.notifications
            return found

        return loop_thread.shared().call(count)


class Followed(Pages):
    """A table with a change feed, which knows when it was empty."""

    def __init__(self, db: percolator.Database) -> None:
        super().__init__(db, change_feed=True)
        self.began = db.timestamp()

    def history(self) -> list[Rows]:
        """The table after each of its commits."""
        found: list[Rows] = []
        rows: dict[str, dict[bytes, Any]] = {}
        for one in self.db.changes(self.table, after=self.began, until=self.db.timestamp()):
            column = self.title if one.is_of(self.title) else self.visits
            rows.setdefault(one.key, {})[column.name] = one.value(column)
            if one.ends_commit:
                found.append(self._whole(rows))
        return found

    def _whole(self, rows: dict[str, dict[bytes, Any]]) -> Rows:
        cells = {
            url: (row.get(self.title.name), row.get(self.visits.name)) for url, row in rows.items()
        }
        return {url: both for url, both in cells.items() if both != (None, None)}


def keys(rows: int) -> list[str]:
    return [f"{letter}{number:05}" for letter in "abcd" for number in range(rows // 4)]


def rows_of(rows: int) -> Rows:
    """The table with so many rows, as `Pages.fill` puts them."""
    return {key: (f"title of {key}", number) for number, key in enumerate(keys(rows))}


def frame_of(spark: SparkSession, rows: int) -> Any:
    """The rows of `rows_of`, in two partitions."""
    found = [(key, title, visits) for key, (title, visits) in rows_of(rows).items()]
    return spark.createDataFrame(found, PAGES).repartitionByRange(2, "url")


def failing(frame: Any, marker: Path, attempts: int, after: Path | None = None) -> Any:
    """These rows; one partition fails after its last row, and once the file `after` exists."""

    def some(rows: Iterator[Any]) -> Iterator[Any]:
        import time

        from pyspark import TaskContext

        yield from rows
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() < attempts:
            marker.touch()
            while after is not None and not after.exists():
                time.sleep(0.01)  # in a process of Spark's, which only a file can tell
            raise RuntimeError("the task fails after all its rows")

    return frame.sparkSession.createDataFrame(frame.rdd.mapPartitions(some), frame.schema)


def halting(frame: Any, after_rows: int, until: Path) -> Any:
    """These rows; each partition halts after some of them until the file `until` exists."""

    def some(rows: Iterator[Any]) -> Iterator[Any]:
        import time

        for number, row in enumerate(rows):
            while number == after_rows and not until.exists():
                time.sleep(0.01)  # in a process of Spark's, which only a file can tell
            yield row

    return frame.sparkSession.createDataFrame(frame.rdd.mapPartitions(some), frame.schema)
