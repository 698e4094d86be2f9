"""A job of several writes refuses a wrong argument before it begins, and leaves nothing behind."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import percolator.spark
from percolator import InvalidArgument
from percolator.aio.shared import TTL_TIMES
from percolator.limits import Limits
from percolator.spark import atomic_writer
from percolator.spark.options import KEEP_SECONDS_MIN


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
    assert percolator_db._database.internal.engine.open_starts.oldest() == 0
