"""A queue that was exported with entries in it, and imported, loses none of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import percolator.testing
from percolator import codecs
from percolator.backup import importing
from percolator.recipes import Export, ExportFile, ExportQueue
from tests.unit.backup.test_between_engines import export
from tests.unit.rowstore.loading_cluster import loading

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("batch", [1, 2, 100])
async def test_imported_exports_of_one_key_have_different_numbers(
    tmp_path: Path, batch: int
) -> None:
    """An import gives all entries one commit timestamp, of which numbers are made."""
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
        await importing.import_tables(at.database, tmp_path / "export")
        async with at.database.transaction() as tx:
            await mails.put(tx, "ann", 10)
        await percolator.testing.run_observers_async(at.database, [send])
        async with at.database.snapshot() as snapshot:
            assert await mails.pending(snapshot) == 0
    assert sorted(one.value for one in sent if one.key == "ann") == list(range(11))
    assert sorted(one.value for one in sent if one.key == "bob") == list(range(0, 10, 2))
    if batch == 100:  # enough for all of one key: they keep their order
        assert [one.value for one in sent if one.key == "ann"] == list(range(11))
