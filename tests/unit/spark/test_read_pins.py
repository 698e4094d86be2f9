"""Reads share pins, so that a program may define any number of them."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

import percolator.spark
from percolator.aio.shared import TTL_TIMES
from percolator.errors import InvalidArgument, SnapshotTooOld, Unavailable
from percolator.limits import Limits
from percolator.spark import atomic_writer
from percolator.spark.options import KEEP_SECONDS_MIN
from percolator.spark.reader import SHARED_SECONDS, ReadPins
from percolator.timestamps import Timestamp


class FakePin:
    def __init__(self, at: Timestamp, error: Exception | None) -> None:
        self.at = at
        self.is_lost = self.closed = False
        self._error = error

    async def set(self) -> None:
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self.closed = True


class FakeDatabase:
    """Keeps the pins that were made."""

    def __init__(self) -> None:
        self.made: list[FakePin] = []
        self.error: Exception | None = None

    def pin(self, at: Timestamp, **_: Any) -> FakePin:
        self.made.append(FakePin(at, self.error))
        return self.made[-1]


def reads() -> tuple[Any, FakeDatabase]:
    database: Any = FakeDatabase()
    return ReadPins(database), database


def moment(seconds: float) -> Timestamp:
    return Timestamp.of(int((1_000 + seconds) * 1_000))


async def test_reads_that_begin_together_share_a_pin_that_is_not_above_them() -> None:
    pins, database = reads()
    moments = [moment(number / 10) for number in range(1_000)]
    for at in moments:
        await pins.hold(at, "pages", 3600.0, is_new=True)
        newest = database.made[-1].at
        assert newest <= at < newest + (moment(SHARED_SECONDS) - moment(0))
    assert len(database.made) == 10


async def test_a_shared_pin_lasts_as_long_as_the_last_read_needs_it() -> None:
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    await asyncio.sleep(5.0)
    await pins.hold(moment(5), "pages", 100.0, is_new=True)
    await pins.hold(moment(6), "pages", 1.0, is_new=True)
    pin: Any = database.made[0]
    assert len(database.made) == 1
    await asyncio.sleep(99.0)
    assert not pin.closed
    await asyncio.sleep(2.0)
    assert pin.closed
    await pins.hold(moment(7), "pages", 100.0, is_new=True)
    assert len(database.made) == 2, "one that was closed holds nothing"


async def test_a_pin_that_was_lost_is_not_shared() -> None:
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    database.made[0].is_lost = True
    await pins.hold(moment(1), "pages", 100.0, is_new=True)
    assert [pin.at for pin in database.made] == [moment(0), moment(1)]


async def test_reads_of_the_past_have_pins_of_their_own() -> None:
    """Whether the table still has that moment is only known once the pin is set."""
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    for past in (-1, 0, 1):
        await pins.hold(moment(past), "links", 100.0, is_new=False)
    await pins.hold(moment(2), "pages", 100.0, is_new=True)
    assert [pin.at for pin in database.made] == [moment(0), moment(-1), moment(0), moment(1)]


async def test_a_pin_that_could_not_be_set_is_not_shared() -> None:
    pins, database = reads()
    database.error = Unavailable("no lock service answers")
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    database.error = SnapshotTooOld("gone")
    with pytest.raises(SnapshotTooOld):
        await pins.hold(moment(1), "pages", 100.0, is_new=True)
    database.error = None
    await pins.hold(moment(2), "pages", 100.0, is_new=True)
    assert len(database.made) == 3


@pytest.mark.parametrize("seconds", [1, 14.9, 86_401, 0, -1, float("nan"), 10**30, "60", None])
def test_locks_are_kept_as_long_as_the_option_of_a_write_allows(seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^keep_seconds: expected a (positive )?number"):
        percolator.spark.together(keep_seconds=seconds)


def test_the_least_and_the_most_are_accepted() -> None:
    for seconds in (15, 86_400):
        percolator.spark.together(keep_seconds=seconds)


def test_the_least_is_what_shared_transactions_keep_their_locks_for_anyway() -> None:
    assert TTL_TIMES * Limits().lock_ttl_seconds == KEEP_SECONDS_MIN


def test_a_job_that_gets_no_directory_keeps_nothing_alive(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever end its transaction, which holds back the collection of history."""

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_writer, "shared_database", lambda _: percolator_db)
    monkeypatch.setattr(atomic_writer, "TemporaryDirectory", full)
    with pytest.raises(OSError, match="No space left"), percolator.spark.together():
        pass
    assert percolator_db._asynchronous.internal.engine.open_starts.oldest() == 0
