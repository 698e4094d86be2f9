"""A read through a gateway that a lock blocks until its time is up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from percolator.errors import CellAddress, DeadlineExceeded, Retry
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.services.chassis import rpc
from percolator.v1 import gateway_pb2 as pb

from .gateways import TABLE, Gateway, gateways, write


async def _get(gateway: Gateway, start: int) -> object:
    return await gateway.get(start, b"bob")


async def _scan(gateway: Gateway, start: int) -> object:
    return await gateway.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE))


@pytest.mark.parametrize("read", [_get, _scan])
async def test_it_is_late_and_may_be_repeated_and_nothing_is_said_to_be_rolled_back(
    read: Callable[[Gateway, int], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: Any) -> int:
        raise KeyboardInterrupt

    async def resolves_nothing(*_: Any, **__: Any) -> set[int]:
        return set()

    async with gateways() as (_, (one, other)):
        with monkeypatch.context() as patch:
            patch.setattr(Commit, "commit_primary", dies)
            patch.setattr(commit, "roll_back_all", resolves_nothing)
            transaction = one.database.transaction()
            transaction.internal.writes.put(await _address(one), b"1")
            with pytest.raises(KeyboardInterrupt):
                await transaction.commit()
        monkeypatch.setattr(Cleanup, "resolve", resolves_nothing)
        token = rpc._remaining.set(lambda: 1.0)
        try:
            with pytest.raises(DeadlineExceeded, match="is locked by transaction") as caught:
                await read(other, await other.begin())
        finally:
            rpc._remaining.reset(token)
        assert caught.value.retry is Retry.SAFE


async def _address(gateway: Gateway) -> CellAddress:
    engine = gateway.database.internal.engine
    info = await engine.catalog.table(TABLE, engine.now() + 1)
    return CellAddress(info.table_id, b"bob", write(b"bob").column)
