"""Settings that make no sense are refused by name, and retries end."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator import InvalidArgument, Limits, OutcomeUnknown, RetryPolicy
from percolator.errors import CellAddress, ConflictError, TransactionTooLarge
from percolator.protocol.write_set import WriteSet
from percolator.retries import Attempts
from percolator.testing.virtual_time import VirtualClock


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("call_seconds", 0),
        ("row_bytes_max", -1),
        ("heartbeat_seconds", 2.0),
        ("server_calls_max", 1),
        ("backoff_seconds_min", 5.0),
        ("batch_rows_max", "many"),
        ("batch_rows_max", True),
    ],
)
def test_limits_without_sense_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Limits(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts_max", 0), ("deadline_seconds", 0.0), ("backoff_seconds_min", 2.0)],
)
def test_retry_policies_without_sense_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RetryPolicy(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def _attempts(policy: RetryPolicy) -> Attempts:
    return Attempts(policy, VirtualClock(asyncio.get_running_loop()), random.Random(1))


async def test_attempts_end_with_their_number() -> None:
    attempts = _attempts(RetryPolicy(attempts_max=3))
    assert [await attempts.again(ConflictError("")) for _ in range(3)] == [True, True, False]


async def test_attempts_end_with_their_deadline() -> None:
    attempts = _attempts(RetryPolicy(deadline_seconds=2.0))
    count = 0
    while await attempts.again(ConflictError("")):
        count += 1
    assert 5 < count < 20
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


async def test_what_may_be_committed_is_not_run_again() -> None:
    assert not await _attempts(RetryPolicy()).again(OutcomeUnknown(""))


def _cell(row: bytes) -> CellAddress:
    return CellAddress(1, row, b"c")


def test_too_many_cells_are_refused_when_they_are_written() -> None:
    writes = WriteSet(Limits(transaction_cells_max=2))
    writes.put(_cell(b"a"), b"")
    writes.lock(_cell(b"b"))
    writes.delete(_cell(b"a"))
    with pytest.raises(TransactionTooLarge, match="at most 2 cells"):
        writes.put(_cell(b"c"), b"")
    assert len(writes.cells) == 2


def test_too_many_bytes_are_refused_when_they_are_written() -> None:
    writes = WriteSet(Limits(transaction_bytes_max=100))
    writes.put(_cell(b"a"), bytes(90))
    writes.put(_cell(b"a"), bytes(98))  # instead of the other one
    with pytest.raises(TransactionTooLarge, match="at most 100 bytes"):
        writes.put(_cell(b"b"), b"")
    assert writes.size_bytes == 100
