"""A dump shows every entry of a closed tablet, also of a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from percolator.services.tabletserver import leveldb
from percolator.services.tabletserver.dump import as_json, as_line, dumped
from percolator.tablet.cells import L, W, cell_prefix, change_key, inverted
from tests.unit.tablet.tablets import COLUMN, lock_record, write_record

CELL = cell_prefix(b"row", COLUMN)
WRITTEN = W + CELL + inverted(6)
CHANGE = change_key(CELL, 6)


@pytest.mark.parametrize(
    ("key", "value", "space"),
    [
        (b"F", b"", "?"),
        (change_key(b"row without an end", 6), write_record(5), "?"),
        (CHANGE, b"no record", "F"),
        (L + CELL, b"no record", "L"),
        (W + CELL, write_record(5), "?"),
        (b"Q", b"", "?"),
    ],
)
def test_a_damaged_entry_is_shown_with_its_error_and_so_are_all_others(
    key: bytes, value: bytes, space: str, tmp_path: Path
) -> None:
    database = leveldb.DB(str(tmp_path), create_if_missing=True)
    database.put(b"Mformat", b"2")
    database.put(CHANGE, write_record(5, b"value"))
    database.put(L + CELL, lock_record(7))
    database.put(WRITTEN, write_record(5, b"value"))
    database.put(key, value)
    database.close()
    entries = [*dumped(tmp_path)]
    (damaged,) = (entry for entry in entries if "error" in entry)
    assert damaged["space"] == space
    others = sorted(str(entry["space"]) for entry in entries if entry is not damaged)
    assert others == sorted({"F", "L", "M", "W"} - {space})
    assert all(as_line(entry) and as_json(entry) for entry in entries)
