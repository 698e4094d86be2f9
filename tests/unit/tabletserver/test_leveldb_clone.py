"""Cloning a LevelDB directory by its names, and while its owner keeps writing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from percolator.services.chassis.epoch_directory import take_over
from percolator.services.chassis.files import RealFiles
from percolator.services.tabletserver import leveldb
from percolator.services.tabletserver.storage import clone_leveldb, lacks_current, plan_clone

TAKEOVERS = 10
WRITES_PER_EPOCH = 2_000
BUFFER_BYTES = 128 << 10


def test_only_tables_below_the_smallest_log_are_linked() -> None:
    """A later one may still be written, under a number that the new owner will use again."""
    plan = plan_clone(
        ["000003.ldb", "000004.sst", "000007.ldb", "000010.ldb", "000006.log", "000009.log"]
    )
    assert plan.linked == ("000003.ldb", "000004.sst")
    assert plan.copied_last == ("000007.ldb", "000010.ldb")


def test_current_manifest_and_logs_come_first_and_nothing_else_is_taken() -> None:
    plan = plan_clone(["000006.log", "CURRENT", "LOCK", "LOG", "LOG.old", "MANIFEST-000005", "x"])
    assert plan.copied_first == ("CURRENT", "MANIFEST-000005", "000006.log")
    assert plan.linked == plan.copied_last == ()


def test_without_a_log_every_table_is_copied() -> None:
    assert plan_clone(["000003.ldb", "CURRENT"]).copied_last == ("000003.ldb",)


def test_tables_without_current_are_damage_and_an_unfinished_creation_is_not() -> None:
    assert lacks_current(["000005.ldb", "MANIFEST-000002"])
    assert lacks_current(["000005.log"])
    assert not lacks_current(["MANIFEST-000001", "LOCK", "LOG"])
    assert not lacks_current(["CURRENT", "000005.ldb"])


class Writer:
    """An owner that writes and compacts as fast as it can, and records what it may acknowledge."""

    def __init__(self, database: leveldb.DB, own: Path, first: int) -> None:
        self._database = database
        self._own = own
        self._identity = own.stat().st_ino
        self._next = first
        self.acknowledged = first
        self._wanted = first + WRITES_PER_EPOCH
        self._reached = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> None:
        """Waits until it has written enough for some compactions."""
        self._reached.wait()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                with self._database.write_batch() as batch:
                    for number in range(self._next, self._next + 20):
                        batch.put(_key(number), _value(number))
                self._next += 20
                if self._own.stat().st_ino != self._identity:
                    return
            except (leveldb.Error, FileNotFoundError):
                # Its directory is gone: anything that it does now fails.
                return
            self.acknowledged = self._next
            if self.acknowledged >= self._wanted:
                self._reached.set()


def _key(number: int) -> bytes:
    """Spread over the key space, so that compactions have work."""
    return b"%08d" % (number * 7919 % 100_000_000)


def _value(number: int) -> bytes:
    return b"%08d" % number * 64


def shared_tables(tablet: Path) -> int:
    return sum(path.stat().st_nlink > 1 for path in tablet.glob("*/*.ldb"))


@pytest.mark.real_time
async def test_taking_over_from_a_compacting_owner_loses_nothing_acknowledged(
    tmp_path: Path,
) -> None:
    files = RealFiles()
    former: Writer | None = None
    written = 0
    try:
        for epoch in range(1, TAKEOVERS + 1):
            # While the former owner writes and compacts at full speed.
            directory = await take_over(files, tmp_path, epoch, clone_leveldb)
            database = leveldb.DB(
                str(directory.path),
                create_if_missing=True,
                write_buffer_size=BUFFER_BYTES,
                paranoid_checks=True,
            )
            if former is not None:
                former.join()
                written = former.acknowledged
            assert [n for n in range(written) if database.get(_key(n)) != _value(n)] == []
            former = Writer(database, directory.path, written)
            former.wait()
    finally:
        (tmp_path / f"e{TAKEOVERS}").rename(tmp_path / "over")
        if former is not None:
            former.join()
        files.close()
    # Not vacuous: the clones did share tables.
    assert shared_tables(tmp_path) > 0
