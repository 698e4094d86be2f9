"""A manifest that somebody has edited and signed again is refused, naming the entry, or can be
imported: nothing in it is found wrong only in the middle."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from percolator.backup import export_files
from percolator.backup.export_files import (
    DamagedExport,
    Export,
    ExportedCodecs,
    ExportedObserver,
    ExportedTable,
    ExportPart,
    file_of,
)
from percolator.backup.importer import codecs_of, observers_of, options_of, require_observers
from percolator.errors import InvalidArgument
from percolator.v1.master_pb2 import Observer

TABLE = ExportedTable(
    "goods",
    7,
    3_600_000,
    1 << 30,
    (ExportedObserver("watcher", (b"price".hex(),), weak=False, paused=True),),
    (
        ExportPart(file_of("goods", 0), "", b"m".hex(), 3, 120, "ab" * 32, (b"price".hex(),)),
        ExportPart(file_of("goods", 1), b"m".hex(), "", 4, 150, "cd" * 32, (b"price".hex(),)),
    ),
    change_feed=True,
    codecs=ExportedCodecs("text", ((b"price".hex(), "integer"),)),
    ttls=((b"label".hex(), 86_400_000),),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 1.5, 2**63, 2**64, 10**400),
    *("", "a", "00", "zz", "a b", "AB", "../a", "/etc/passwd", "\0", "\ud800", "x" * 5_000),
    *([], {}, [[]], ["zz"], [1], [["00", -1]], [["00", 10**400]], [["zz", 1]], [["00", "\ud800"]]),
)


def places(record: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in record if isinstance(record, dict) else range(len(record)):
        yield (*above, key)
        if isinstance(record[key], dict | list):
            yield from places(record[key], (*above, key))


def edited(record: dict[str, Any], place: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The record without this entry, and with others in its place."""
    for other in (KeyError, *OTHERS):
        changed = copy.deepcopy(record)
        inside: Any = changed
        for key in place[:-1]:
            inside = inside[key]
        if other is KeyError:
            del inside[place[-1]]
        else:
            inside[place[-1]] = other
        yield changed


def signed(path: Path, record: dict[str, Any]) -> Path:
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {"checksum": checksum}))
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    export_files.write_export(tmp_path / "whole.json", Export(123, (TABLE,)))
    return export_files.read_record(tmp_path / "whole.json")


def test_an_edited_manifest_is_refused_or_everything_in_it_can_be_asked_for(
    manifest: dict[str, Any], tmp_path: Path
) -> None:
    outcomes: Counter[str] = Counter()
    for place in places(manifest):
        for record in edited(manifest, place):
            try:
                export = export_files.read_export(signed(tmp_path / "edited.json", record))
            except (DamagedExport, InvalidArgument) as refusal:
                outcomes[type(refusal).__name__] += 1
                continue
            outcomes["read"] += 1
            for table in export.tables:
                for message in (options_of(table), codecs_of(table), *observers_of(table)):
                    assert message is None or message.SerializeToString() is not None
                assert len(table.splits) == max(len(table.parts) - 1, 0)
    assert min(outcomes[one] for one in ("read", "DamagedExport", "InvalidArgument")) > 20


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("retention_milliseconds",),
            -1,
            r"tables\[0\]: ExportedTable refuses.*-1 is out of range",
        ),
        (("ttls", 0, 0), "zz", r"tables\[0\]: .*non-hexadecimal"),
        (("observers", 0, "weak"), 1, r"tables\[0\]\.observers\[0\]\.weak: expected bool, got int"),
        (("codecs", "key"), "\ud800", r"tables\[0\]\.codecs\.key: .*UTF-8"),
    ],
)
def test_a_refusal_names_the_entry_of_a_manifest(
    manifest: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: object, said: str
) -> None:
    inside: Any = manifest["tables"][0]
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(DamagedExport, match=f"is not the record of an export: {said}"):
        export_files.read_export(signed(tmp_path / "edited.json", manifest))


def test_observers_that_a_table_cannot_get_are_refused_by_the_name_of_the_table() -> None:
    require_observers(TABLE, [Observer(name="watcher", columns=[b"price"])])
    other = Observer(name="watcher", columns=[b"label"])
    with pytest.raises(InvalidArgument, match=r"observers of 'goods' cannot be .*'watcher', for"):
        require_observers(TABLE, [other])
