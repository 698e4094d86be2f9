"""The sessions of all lock services, and which of these do not answer."""

from __future__ import annotations

import pytest

from percolator.errors import PercolatorError, Unavailable
from percolator.wire.lock_service import LockServiceCalls

from .lock_services import A, B, client, lock_services


async def test_the_sessions_of_all_lock_services_are_listed_and_who_does_not_answer() -> None:
    async with lock_services(A, B) as services:
        one, other = client(services, A, B), client(services, B, A)
        held_by = {A: await one.current(), B: await other.current()}
        calls = LockServiceCalls(services, [A, B])
        by_address = await calls.sessions_of_each(5.0)
        assert {
            address: [session.session_id for session in listed]
            for address, listed in by_address.items()
            if not isinstance(listed, PercolatorError)
        } == {address: [session] for address, session in held_by.items()}
        missing: list[str] = []

        async def all_sessions() -> set[bytes]:
            listed = await calls.all_sessions(5.0, lambda address, _: missing.append(address))
            return {one.session_id for one in listed}

        assert (await all_sessions(), missing) == (set(held_by.values()), [])
        services.refusing.add(A)
        assert (await all_sessions(), missing) == ({held_by[B]}, [A])
        assert isinstance((await calls.sessions_of_each(5.0))[A], Unavailable)
        services.refusing.add(B)
        with pytest.raises(Unavailable):
            await all_sessions()
        await one.close()
        await other.close()
