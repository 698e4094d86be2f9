"""A queue that was exported with entries in it, and imported, loses none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import percolator.testing
from percolator import codecs
from percolator.backup import importer
from percolator.recipes import Export, ExportFile, ExportQueue, export_queue
from tests.unit.backup.test_exports import export
from tests.unit.rowstore.loading_cluster import loading

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 100])
async def test_imported_exports_of_one_key_have_different_numbers_in_order(
    tmp_path: Path, batch: int
) -> None:
    """An import gives all entries one commit timestamp, of which numbers are made. However many of
    them a call is given, what was put after the import comes last."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for number in range(0, 10, 2):
            async with database.transaction() as tx:
                await mails.put(tx, "ann", number)
                await mails.put(tx, "bob", number)
                await mails.put(tx, "ann", number + 1)
        await export(database, tmp_path / "export")

    file = ExportFile(tmp_path / "mails.jsonl")
    sent: list[Export[str, int]] = []

    @mails.exporter(batch=batch)
    async def send(exports: Sequence[Export[str, int]]) -> None:
        assert len(exports) <= batch
        sent.extend(exports)
        assert file.append(exports) == len(exports)

    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        async with at.database.transaction() as tx:
            await mails.put(tx, "ann", 10)
        await percolator.testing.run_observers_async(at.database, [send])
        async with at.database.snapshot() as snapshot:
            assert await mails.pending(snapshot) == 0
    assert [one.value for one in sent if one.key == "ann"] == list(range(11))
    assert [one.value for one in sent if one.key == "bob"] == list(range(0, 10, 2))


async def exported(mails: ExportQueue[str, int], values: Iterable[int], path: Path) -> None:
    """Exports the queue after so many transactions, each of which has put one value."""
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for value in values:
            async with database.transaction() as tx:
                await mails.put(tx, "ann", value)
        await export(database, path)


async def test_what_is_put_while_they_get_their_numbers_comes_after_them(tmp_path: Path) -> None:
    """Its commit is older than that of the run that gives the numbers."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    await exported(mails, range(4), tmp_path / "export")

    sent: list[Export[str, int]] = []
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        bucket = mails._rows.bucket(mails.key_bytes("ann"))
        for number in range(4, 8):
            async with at.database.transaction() as tx:
                taken = await mails._take(tx, bucket, 2)
                if not sent and not taken:
                    async with at.database.transaction() as other:
                        await mails.put(other, "ann", number)
            sent += taken
        async with at.database.snapshot() as snapshot:
            left = await mails.pending(snapshot)
        assert [one.value for one in sent] == list(range(len(sent)))
        assert len(sent) == 4
        assert left == 2
        async with at.database.transaction() as tx:
            sent += await mails._take(tx, bucket, 100)
    assert [one.value for one in sent] == list(range(6))
    assert [one.sequence for one in sent] == sorted({one.sequence for one in sent})


async def test_queues_that_are_imported_twice_keep_their_order(tmp_path: Path) -> None:
    """The second time when only some of the entries have got their numbers."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    await exported(mails, range(5), tmp_path / "first")

    bucket = mails._rows.bucket(mails.key_bytes("ann"))
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "first")
        async with at.database.transaction() as tx:
            assert await mails._take(tx, bucket, 2) == []
        await export(at.database, tmp_path / "second")

    sent: list[Export[str, int]] = []
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "second")
        for _ in range(6):
            async with at.database.transaction() as tx:
                sent += await mails._take(tx, bucket, 2)
    assert [one.value for one in sent] == list(range(5))
    assert [one.sequence for one in sent] == sorted({one.sequence for one in sent})


async def test_many_keys_with_few_imported_entries_take_few_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run numbers those of as many keys as the next one can take; of large values, fewer."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.text, buckets=1)
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for value in "ab":
            async with database.transaction() as tx:
                for number in range(40):
                    await mails.put(tx, f"{number}", value * 10)
        await export(database, tmp_path / "export")

    bucket = mails._rows.bucket(mails.key_bytes("0"))
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        taken = []
        for _ in range(4):
            async with at.database.transaction() as tx:
                taken.append(len(await mails._take(tx, bucket, 50)))
        assert taken == [0, 50, 0, 30]

    monkeypatch.setattr(export_queue, "BATCH_BYTES", 100)
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        async with at.database.transaction() as tx:
            assert await mails._take(tx, bucket, 50) == []
            written = [write for kind, write in tx.internal.writes.cells.values() if write]
        assert len(written) == 12
