"""A pin is found and released at whichever lock service knows it."""

from __future__ import annotations

import asyncio

import pytest

from percolator.cli.pins import released
from percolator.errors import InvalidArgument, Unavailable
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import SessionSettings
from tests.unit.wire.lock_services import A, B, client, lock_services


async def test_a_pin_is_released_at_the_lock_service_that_knows_it() -> None:
    async with lock_services(A, B) as services:
        await asyncio.sleep(61)  # their grace periods are over
        pin = client(services, B, settings=SessionSettings(pin_at=42))
        session = await pin.current()
        assert session is not None
        calls = LockServiceCalls(services, [A, B])
        await released(calls, session, 5.0)
        assert services.alive(B) == []
        with pytest.raises(InvalidArgument, match="there is no pin"):
            await released(calls, session, 5.0)
        services.refusing.add(A)
        with pytest.raises(Unavailable):
            await released(calls, session, 5.0)
        await pin.close()
