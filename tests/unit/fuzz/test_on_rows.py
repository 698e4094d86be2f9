"""What `make fuzz` gives to a cluster on a row store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import copy

import pytest
from google.protobuf.message import Message

from percolator.bigtable.place import Place
from percolator.services.gateway import row_store_handler
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.wire.methods import method_name
from percolator.world import Random
from tests.fuzz import on_rows
from tests.fuzz.__main__ import UNREACHED
from tests.fuzz.messages import damaged
from tests.fuzz.methods import METHODS
from tests.fuzz.on_rows import PLACE, Broken, Serving, seeds


async def test_what_is_not_reached_elsewhere_is_accepted_here() -> None:
    accepted = await on_rows.accepted()
    assert {method_name(METHODS[path].name) for path in UNREACHED} <= accepted


@pytest.fixture
def serving() -> Iterator[Serving]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield Serving()
    loop.close()
    asyncio.set_event_loop(None)


def test_damaged_requests_are_answered_or_refused(serving: Serving) -> None:
    chance, known = Random("on rows"), seeds()
    for _ in range(300):
        serving(damaged(chance.choice(known), chance))


def test_a_call_that_reaches_what_is_not_for_clients_is_noticed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store_handler, "own", _passed_on)
    place, request = next(
        (number, copy(one))
        for number, one in enumerate(on_rows.SEEDS)
        if isinstance(one, bigtable.BigtableCheckAndMutateRowRequest)
    )
    request.table_name = PLACE.table(0)
    with pytest.raises(Broken, match="percolator-0 was changed"):
        serving(bytes([place]) + request.SerializeToString())


def _passed_on(place: Place, request: Message, **_: bool) -> Message:
    return request
