"""An operator registers observers; workers that may change nothing then run them."""

from __future__ import annotations

import pytest

from percolator import aio, observes
from percolator.errors import PermissionDenied
from percolator.v1 import master_pb2
from tests.unit.connected import Cluster, balance, connected_to


class Guarded(Cluster):
    """Refuses what needs the role `admin`, while a test wants it to."""

    operator = True

    def _require_operator(self) -> None:
        if not self.operator:
            raise PermissionDenied("the caller has the role CLIENT, but it needs ADMIN")

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        self._require_operator()
        return await super().create_table(request)

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        self._require_operator()
        return await super().change_observers(request)


@observes(balance)
async def look(tx: aio.Transaction, row: str) -> None:
    await tx.get(row, balance)


async def test_the_first_worker_needs_no_operators_token_if_its_observers_are_registered() -> None:
    async with connected_to(Guarded) as (db, cluster):
        await db.register_observers([look])
        cluster.operator = False
        async with db.run_observers([look]) as worker:
            assert worker.is_running


async def test_observers_that_are_not_registered_are_refused_without_one() -> None:
    async with connected_to(Guarded) as (db, cluster):
        cluster.operator = False
        with pytest.raises(PermissionDenied):
            await db.register_observers([look])
