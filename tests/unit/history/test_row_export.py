"""Exports of a row store: its ranges become files, which hold what a snapshot shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from percolator import Timestamp
from percolator.aio.pin import Pin
from percolator.backup import exporter, part_files
from percolator.rowstore import cells
from tests.unit.history.row_site import ONE, VALUE, site

pytestmark = pytest.mark.real_time


async def test_every_range_is_a_file_and_all_files_are_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "RANGE_BYTES", 300)
    async with site() as here:
        for number in range(40):
            await here.set(f"{number:03}", number)
        at = Timestamp(await here.now())
        await here.set("000", 1_000)  # above the snapshot
        planned = await exporter._plan(here.database, at, [ONE.name], named=True)
        pin = cast("Pin", SimpleNamespace(at=at))
        done = await exporter._Exporter(
            here.database, tmp_path, planned, pin, lambda *_: None
        ).run()
        (table,) = done.tables
        assert len(table.parts) > 2
        found = [
            cell
            for part in table.parts
            for batch in part_files.cells_of(tmp_path, done, table, part)
            for cell in batch
        ]
        expected = [
            (f"{number:03}".encode(), VALUE.name, VALUE.codec.encode(number))
            for number in range(40)
        ]
        assert found == expected
