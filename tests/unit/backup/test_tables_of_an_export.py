"""Which tables an export has: those that existed at its moment, for as long as they exist."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import percolator.testing
from percolator import Table, Timestamp, aio
from percolator.backup import export_files, exporter
from percolator.backup.export_files import Export, ExportFormat
from percolator.errors import InvalidArgument, SchemaError, SnapshotTooOld, Unavailable

pytestmark = pytest.mark.real_time

GOODS, SCRATCH = Table("goods"), Table("scratch")


class Pin:
    """A cluster in memory pins nothing. This refuses what a pin would, and believes that no history
    of the scratch table is left."""

    def __init__(self, database: aio.Database, at: Timestamp | None, names: set[str]) -> None:
        self._database = database
        self._wanted = at
        self._names = names
        self.at = Timestamp(0)

    async def __aenter__(self) -> Pin:
        for name in self._names - set(await self._database.tables()):
            raise SchemaError(f"there is no table {name!r}", table=name)
        if self._wanted is not None and (SCRATCH.name in self._names or not self._names):
            raise SnapshotTooOld("older than the history of 'scratch'", timestamp=1, safe_point=2)
        self.at = self._wanted or await self._database.timestamp()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@asynccontextmanager
async def connected() -> AsyncIterator[aio.Database]:
    async with percolator.testing.connect_async() as database:

        def pin(at: Timestamp | None, *, tables: Sequence[Table[Any]], **_: Any) -> Pin:
            return Pin(database, at, {table.name for table in tables})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database, "pin", pin)
            yield database


async def test_a_younger_table_needs_no_history_from_before_it_was_created(tmp_path: Path) -> None:
    async with connected() as database:
        await database.create_table(GOODS)
        then = await database.timestamp()
        await database.create_table(SCRATCH, retention=timedelta(minutes=1))
        made = await exporter.export(database, tmp_path / "out", at=then, form=ExportFormat.JSONL)
        assert [table.name for table in made.tables] == [GOODS.name]
        with pytest.raises(SnapshotTooOld):
            await exporter.export(database, tmp_path / "named", at=then, tables=[SCRATCH.name])


async def test_a_table_that_was_dropped_meanwhile_is_not_to_be_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new table of this name, the export could not be finished either."""
    said = "'goods' was dropped since the export started, so it cannot .* another directory"
    async with connected() as database:
        await database.create_table(GOODS)

        async def run(one: exporter._Exporter) -> Export:
            await database.drop_table(GOODS)
            return one._planned

        monkeypatch.setattr(exporter._Exporter, "run", run)
        for _ in ("at the end", "when it is resumed"):
            with pytest.raises(SchemaError, match=said):
                await exporter.export(database, tmp_path, form=ExportFormat.JSONL)


async def test_an_export_of_one_cluster_is_not_resumed_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of tables are small numbers: there, a table of this name may well have the same one."""

    async def interrupted(_: exporter._Exporter) -> Export:
        raise Unavailable("gone")

    async def another(_: float) -> str:
        return "staging"

    async with connected() as other, connected() as database:
        for one in (other, database):
            await one.create_table(GOODS)
        with monkeypatch.context() as patch:
            patch.setattr(exporter._Exporter, "run", interrupted)
            with pytest.raises(Unavailable):
                await exporter.export(database, tmp_path, form=ExportFormat.JSONL)
        with monkeypatch.context() as patch:
            patch.setattr(other.internal.engine.catalog, "cluster_id", another)
            with pytest.raises(InvalidArgument, match="of cluster in-memory, and this is staging"):
                await exporter.export(other, tmp_path)
        # As far as anybody can tell, this is the same one.
        made = await exporter.export(other, tmp_path)
        assert made == export_files.read_manifest(tmp_path)
