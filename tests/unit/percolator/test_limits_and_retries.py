"""Invalid settings are refused by name, and retries end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import pytest

import percolator
from percolator import InvalidArgument, Limits, OutcomeUnknown, RetryPolicy, aio, transactional
from percolator.errors import CellAddress, ConflictError, TransactionTooLarge
from percolator.protocol.write_set import WriteSet
from percolator.retries import Attempts
from tests.unit.connected import connected


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Limits, "call_seconds", 0),
        (Limits, "row_bytes_max", -1),
        (Limits, "heartbeat_seconds", 2.0),
        (Limits, "server_calls_max", 1),
        (Limits, "backoff_seconds_min", 5.0),
        (Limits, "batch_rows_max", "many"),
        (Limits, "batch_rows_max", True),
        (Limits, "batch_rows_max", 1.5),
        (Limits, "one_round_cells_max", -1),
        (Limits, "call_seconds", math.nan),
        (Limits, "call_seconds", math.inf),
        (RetryPolicy, "attempts_max", 0),
        (RetryPolicy, "attempts_max", 1.5),
        (RetryPolicy, "attempts_max", True),
        (RetryPolicy, "attempts_max", "5"),
        (RetryPolicy, "deadline_seconds", 0.0),
        (RetryPolicy, "deadline_seconds", math.nan),
        (RetryPolicy, "deadline_seconds", None),
        (RetryPolicy, "backoff_seconds_min", 2.0),
        (RetryPolicy, "backoff_seconds_min", math.nan),
        (RetryPolicy, "backoff_seconds_max", math.inf),
        (RetryPolicy, "backoff_seconds_max", "1"),
    ],
)
def test_invalid_limits_and_retry_policies_are_refused_by_name(
    kind: type[Limits | RetryPolicy], field: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        kind(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("value", [10**30, 10**5_000], ids=["thirty digits", "5,000 digits"])
@pytest.mark.parametrize(
    ("kind", "field", "bound"),
    [
        *((Limits, field.name, "2147483647") for field in fields(Limits) if field.type == "int"),
        *((Limits, field.name, "1000000000") for field in fields(Limits) if field.type == "float"),
        (RetryPolicy, "attempts_max", "2147483647"),
        (RetryPolicy, "deadline_seconds", "1000000000"),
    ],
)
def test_a_number_without_reason_is_refused_with_the_bound(
    kind: Any, field: str, bound: str, value: int
) -> None:
    if field == "row_bytes_max":
        bound = "65536"
    with pytest.raises(InvalidArgument, match=f"^{field}: expected .*at most {bound}, got "):
        kind(**{field: value})


def test_the_bound_itself_is_accepted() -> None:
    assert RetryPolicy(attempts_max=2**31 - 1).attempts_max == 2**31 - 1
    assert Limits(row_bytes_max=65_536, call_seconds=1e9).row_bytes_max == 65_536


def test_a_number_far_below_the_bound_is_refused_like_others() -> None:
    with pytest.raises(InvalidArgument, match=r"^attempts_max: expected at least 1, got one"):
        RetryPolicy(attempts_max=-(10**5_000))


async def test_a_number_is_no_retry_policy() -> None:
    five: Any = 5

    async def function(tx: aio.Transaction) -> None:
        raise AssertionError("was called")

    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match="retry: expected a RetryPolicy, got int"):
            await db.run(function, retry=five)
    with pytest.raises(InvalidArgument, match="retry: expected a RetryPolicy, got int"):
        transactional(retry=five)
    with pytest.raises(InvalidArgument, match="retry: expected a RetryPolicy, got int"):
        aio.connect("localhost:1", retry=five)
    with pytest.raises(InvalidArgument, match="limits: expected Limits, got int"):
        aio.connect("localhost:1", limits=five)


@pytest.mark.parametrize("connect", [aio.connect, percolator.connect])
@pytest.mark.parametrize(
    ("argument", "expected"),
    [("token", "a str"), ("tls", "a Tls"), ("description", "a str")],
)
def test_an_argument_of_connect_that_is_of_another_type_is_refused_by_name(
    connect: Any, argument: str, expected: str
) -> None:
    """A number as a token, say, must not end in the depths of a regular expression."""
    with pytest.raises(InvalidArgument, match=f"^{argument}: expected {expected}, got int$"):
        connect("localhost:1", **{argument: 5})


async def test_the_description_of_a_pin_is_text() -> None:
    five: Any = 5
    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match=r"^description: expected a str, got int$"):
            db.pin(description=five)


@asynccontextmanager
async def _attempts(policy: RetryPolicy) -> AsyncIterator[Attempts]:
    async with connected() as (db, _):
        yield db.internal.attempts(policy)


async def test_attempts_end_when_their_number_is_reached() -> None:
    async with _attempts(RetryPolicy(attempts_max=3)) as attempts:
        assert [await attempts.again(ConflictError("")) for _ in range(3)] == [True, True, False]


async def test_attempts_end_at_their_deadline() -> None:
    count = 0
    async with _attempts(RetryPolicy(deadline_seconds=2.0)) as attempts:
        began = asyncio.get_running_loop().time()
        while await attempts.again(ConflictError("")):
            count += 1
        assert asyncio.get_running_loop().time() == pytest.approx(began + 2.0)
    assert 5 < count < 20


async def test_a_transaction_that_has_lost_to_no_other_pauses_and_stands_in_no_line() -> None:
    """It was given up, or presumed dead: another turn would not help."""
    async with connected() as (db, _):
        attempts = db.internal.attempts(RetryPolicy())
        began = asyncio.get_running_loop().time()
        assert await attempts.again(ConflictError("given up", cell=_cell(b"a")))
        assert asyncio.get_running_loop().time() > began
        assert not attempts.in_line
        assert not db.internal.engine.env.is_contended(_cell(b"a"))


async def test_a_transaction_that_may_have_committed_is_not_run_again() -> None:
    async with _attempts(RetryPolicy()) as attempts:
        assert not await attempts.again(OutcomeUnknown(""))


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
    writes.put(_cell(b"a"), bytes(98))  # replaces the other value
    with pytest.raises(TransactionTooLarge, match="at most 100 bytes"):
        writes.put(_cell(b"b"), b"")
    assert writes.size_bytes == 100
