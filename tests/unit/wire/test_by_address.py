"""What is kept for an address is dropped when it was long unused, and made again when needed."""

from __future__ import annotations

import asyncio

from percolator.wire.frames import UNUSED_SECONDS, ByAddress


class Kept:
    """In use until a test says otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.since: float | None = None

    def unused_since(self) -> float | None:
        return self.since

    def leave(self) -> None:
        self.since = asyncio.get_running_loop().time()


async def test_what_was_long_unused_is_dropped_when_another_address_comes() -> None:
    dropped: list[Kept] = []
    kept = ByAddress(Kept, dropped.append)
    first = kept.get("a:1")
    first.leave()
    await asyncio.sleep(UNUSED_SECONDS - 1.0)
    second = kept.get("b:1")
    assert dropped == []
    second.leave()
    await asyncio.sleep(2.0)
    assert kept.get("b:1") is second, "a known address drops nothing"
    assert dropped == []
    kept.get("c:1")
    assert dropped == [first]
    assert {one.address for one in kept} == {"b:1", "c:1"}


async def test_what_is_in_use_stays_however_long_that_takes() -> None:
    kept = ByAddress(Kept)
    first = kept.get("a:1")
    await asyncio.sleep(100 * UNUSED_SECONDS)
    kept.get("b:1")
    assert kept.get("a:1") is first


async def test_an_address_that_comes_back_is_made_again() -> None:
    kept = ByAddress(Kept)
    first = kept.get("a:1")
    first.leave()
    await asyncio.sleep(UNUSED_SECONDS + 1.0)
    kept.get("b:1").leave()
    again = kept.get("a:1")
    assert again is not first
    assert kept.get("a:1") is again


async def test_servers_that_move_again_and_again_leave_no_more_than_those_in_use() -> None:
    kept = ByAddress(Kept)
    for time in range(200):
        for server in range(5):
            kept.get(f"10.0.{time}.{server}:1").leave()
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert len(kept) == 5
