"""A worker that is started before its tables waits for them."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from percolator.errors import ExecutionUnknown, InvalidArgument, NotReady, SchemaError
from percolator.observers.worker import start_when_ready
from tests.simulation.virtual_time import VirtualClock


class Refused:
    """A worker whose first attempts to start are refused with these errors."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)

    async def start(self, in_advance: dict[str, None] | None) -> None:
        assert in_advance is not None
        if self.left:
            raise self.left.pop(0)


async def _said(worker: Refused) -> list[str]:
    said: list[str] = []
    clock = VirtualClock(asyncio.get_running_loop())
    await start_when_ready(
        Mock(spec=[], _start=worker.start, _registered_in_advance={}), clock, said.append
    )
    return said


async def test_what_may_come_is_waited_for_and_each_reason_is_told_once() -> None:
    missing = SchemaError("there is no table 'notes'", table="notes")
    worker = Refused(missing, missing, NotReady("no master leads"), ExecutionUnknown("?"), missing)
    said = await _said(worker)
    assert worker.left == []
    assert [text.split(" (")[0] for text in said] == [
        "there is no table 'notes'",
        "no master leads",
        "?",
        "there is no table 'notes'",
    ]


async def test_what_no_waiting_mends_is_raised() -> None:
    worker = Refused(InvalidArgument("observers", "another definition"), SchemaError("never"))
    with pytest.raises(InvalidArgument, match="another definition"):
        await _said(worker)
