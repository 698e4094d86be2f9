"""Costs that must not grow, whatever was stored and deleted: storage reads, counted."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.observers.watched_cell import Acknowledgement
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.tablet import scans
from percolator.tablet.cells import VERSIONS_MAX, cell_prefix
from percolator.tablet.collection import may_be_put_aside
from percolator.tablet.visible_cells import RUN_ENTRIES_MIN
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import MachineClock
from tests.unit.tablet.tablets import (
    ABSENT,
    COLUMN,
    DATA,
    EQUALS,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    PRESENT,
    REFUSED,
    ROLLBACK,
    TARGET,
    WRITE,
    CountingStorage,
    Rig,
    commit,
    condition,
    delete,
    delete_if,
    mutation,
    prewrite,
    put,
    write_record,
    written,
)


async def counting_rig(**limits: Any) -> tuple[Rig, Counter[str]]:
    storage = CountingStorage(DurableMemory())
    return await Rig(storage=storage, **limits).open(), storage.counts


async def test_a_fresh_transaction_prewrites_without_reading_the_storage() -> None:
    rig, counts = await counting_rig()
    counts.clear()
    for start in range(10, 500, 10):
        await rig.apply(prewrite(b"a", start), prewrite(b"%d" % start, start))
        await rig.apply(commit(b"a", start, start + 1), commit(b"%d" % start, start, start + 1))
    assert counts == Counter()


async def test_a_transaction_from_before_the_horizon_costs_one_seek() -> None:
    rig, counts = await counting_rig(recent_writes_max=1)
    await rig.apply(*(written(b"%d" % number, 50, 100 + number) for number in range(20)))
    await rig.apply(*(written(b"%d" % number, 50, 200 + number) for number in range(20)))
    counts.clear()
    await rig.apply(prewrite(b"other", 90))
    assert counts == Counter({"seek W": 1})


@pytest.mark.parametrize("versions", [2, 1000])
async def test_the_number_of_versions_does_not_matter(versions: int) -> None:
    rig, counts = await counting_rig()
    changes = [put(WRITE, write_record(at), at + 1) for at in range(10, 10 + 2 * versions, 2)]
    for first in range(0, len(changes), 200):
        await rig.apply(mutation(b"hot", *changes[first : first + 200]))
    newest = 10 + 2 * versions
    counts.clear()
    assert (await rig.value(b"hot", newest), await rig.value(b"hot", 12)) == (b"", b"")
    assert counts == Counter({"seek W": 2})
    counts.clear()
    [refused] = await rig.mutate(prewrite(b"hot", 5))
    assert refused.outcome == REFUSED
    assert refused.cell.timestamp == 11  # the oldest above the start
    assert counts["seek W"] <= 4
    assert counts["step"] <= 4
    counts.clear()
    for timestamp, found in ((12, 11), (newest, newest - 1)):
        for reverse in (False, True):
            counts.clear()
            pages = await rig.scan(timestamp, reverse=reverse)
            assert list(pages[0].found.commit_timestamps) == [found]
            # Backwards, a first run looks at entries in vain.
            assert sum(counts.values()) < 25 + (RUN_ENTRIES_MIN if reverse else 0)


async def test_a_condition_on_all_versions_of_a_hot_cell_is_refused_before_it_takes_long() -> None:
    rig, counts = await counting_rig()
    changes = [put(WRITE, write_record(at), at + 1) for at in range(10, 10 + 4 * VERSIONS_MAX, 2)]
    for first in range(0, len(changes), 200):
        await rig.apply(mutation(b"hot", *changes[first : first + 200]))
    counts.clear()
    for expectation in (ABSENT, PRESENT, EQUALS):
        asked = condition(WRITE, expectation, prefix=b"no such record")
        [result] = await rig.mutate(mutation(b"hot", conditions=[asked]))
        assert result.outcome == NOT_EXECUTED
        assert "narrow its timestamps" in result.error.message
    assert counts["step"] <= 3 * (VERSIONS_MAX + 2)


async def test_whether_a_change_was_put_aside_is_seen_without_walking_over_what_was_noted() -> None:
    rig, counts = await counting_rig()
    hidden = acknowledgement_column(b"observer", COLUMN)
    noted = Acknowledgement(5).encode()
    changes = [put(WRITE, write_record(at, noted), at + 1) for at in range(10, 410, 2)]
    await rig.apply(mutation(b"a", *changes, column=hidden))
    state = rig.tablet._state
    counts.clear()
    assert not may_be_put_aside(state.mirror, state.storage, cell_prefix(b"a", COLUMN))
    assert sum(counts.values()) <= 3


async def test_lock_only_records_are_stepped_over_and_counted() -> None:
    rig, _ = await counting_rig()
    kinds = [RecordKind.PUT] + [RecordKind.LOCK_ONLY] * 20
    await rig.apply(
        mutation(
            b"a",
            *(
                put(WRITE, write_record(10 * at + 1, b"", kind), 10 * at + 2)
                for at, kind in enumerate(kinds)
            ),
        )
    )
    assert list((await rig.read(b"a", 1000)).found.commit_timestamps) == [2]
    assert rig.tablet.statistics().versions_skipped == 20


async def test_serving_never_seeks_among_locks_or_notifications() -> None:
    """Each deletion left a tombstone; a seek there walks over all: 300 us instead of 2."""
    rig, counts = await counting_rig()
    await rig.apply(*(prewrite(b"%d" % number, 10) for number in range(50)))
    counts.clear()
    await rig.scan(30)
    await rig.scan(30, reverse=True)
    read = pb.RowRead(row=b"1", all_columns=True, timestamp=30)
    await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))
    await rig.mutate(prewrite(b"1", 20), commit(b"1", 10, 20))
    assert counts["seek L"] == counts["seek N"] == 0
    assert counts["seek W"] > 0


async def test_deleting_what_does_not_exist_leaves_no_tombstone() -> None:
    rig, _ = await counting_rig()
    before = rig.tablet.statistics().batches_synced
    missing = [
        delete(LOCK),
        delete(DATA, 5),
        delete(NOTIFY, 5, b"f"),
        delete_if(ROLLBACK, b"", 5),
    ]
    await rig.apply(mutation(b"a", *missing))
    assert rig.tablet.statistics().batches_synced == before


# ---------------------------------------------------------------- split points


async def test_a_split_halves_a_tablet_by_size(rig: Rig) -> None:
    assert await rig.tablet.propose_split() is None
    await rig.apply(written(b"a", 5, 6))
    assert await rig.tablet.propose_split() is None
    await rig.apply(*(written(b"%03d" % number, 5, 6, b"v" * 100) for number in range(100)))
    row = await rig.tablet.propose_split()
    assert row is not None
    assert 45 <= int(row) <= 55
    await rig.apply(written(b"005", 7, 8, b"v" * 20_000))
    assert await rig.tablet.propose_split() in (b"005", b"006")


@pytest.mark.parametrize("length", [10, 36, 300])
async def test_rows_with_a_long_common_prefix_are_halved_although_others_are_around_them(
    rig: Rig, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a tenant whose rows begin with its UUID."""
    monkeypatch.setattr(scans, "ESTIMATE_TRUSTED_BYTES", 1)
    prefix = b"t" * length
    rows = [b"a", *(prefix + b"%03d" % number for number in range(400)), b"z"]
    await rig.apply(*(written(row, 5, 6, b"v" * 100) for row in rows))
    row = await rig.tablet.propose_split()
    assert row is not None
    assert 195 <= int(row.removeprefix(prefix)) <= 205
    request = pb.ProposePartsRequest(target=TARGET, part_bytes=20_000)
    parts = (await rig.tablet.propose_parts(request)).rows
    assert 3 <= sum(one.startswith(prefix) for one in parts) <= 15


async def test_a_first_row_with_most_of_the_bytes_is_split_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "ESTIMATE_TRUSTED_BYTES", 1)
    await rig.apply(written(b"", 5, 6, b"v" * 100_000))
    assert await rig.tablet.propose_split() is None
    await rig.apply(*(written(b"%03d" % number, 5, 6, b"v" * 100) for number in range(100)))
    assert await rig.tablet.propose_split() == b"000"


@pytest.mark.real_time
async def test_a_split_point_on_leveldb_is_found_by_bisection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scans, "ESTIMATE_TRUSTED_BYTES", 1)
    prefix = b"all rows have this in common/"
    with tempfile.TemporaryDirectory() as directory, DiskThreads(1, "test") as pool:

        def storage() -> LevelDBStorage:
            return LevelDBStorage(Path(directory), pool, create=True)

        rig = await Rig(storage=storage(), clock=MachineClock()).open()
        for first in range(0, 4000, 500):
            numbers = range(first, first + 500)
            # Incompressible, so that sizes on disk are those of the values.
            values = {
                n: bytes((n * 31 + i * i * 17 + (n * i >> 3)) & 255 for i in range(300))
                for n in numbers
            }
            await rig.apply(*(written(prefix + b"%06d" % n, 5, 6, values[n]) for n in numbers))
        await rig.tablet.close()
        reopened = await Rig(storage=storage(), clock=MachineClock()).open()
        row = await reopened.tablet.propose_split()
        assert row is not None
        assert 1500 <= int(row.removeprefix(prefix)) <= 2500
        result: Any = await reopened.read(row, 30, COLUMN)
        assert len(result.found.values) == 1
        await reopened.tablet.close()
