"""Read locks through gateways: shared, exclusive, repeated, and resolved."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from percolator.errors import ConflictError, InvalidArgument
from percolator.limits import Limits
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.errors_pb2 import CellAddress as WireAddress

from .gateways import COLUMN, DELETE, LOCK, TABLE, Gateway, a_site, gateways, write

READ_LOCK = pb.CellWrite.KIND_READ_LOCK
COMMITTED = pb.ResolveResponse.FATE_COMMITTED
ABORTED = pb.ResolveResponse.FATE_ABORTED
KIND_OF_THE_FUTURE: Any = 9


def _read_lock(row: bytes) -> pb.CellWrite:
    return write(row, kind=READ_LOCK)


async def _resolved(gateway: Gateway, start: int, *writes: pb.CellWrite) -> pb.ResolveResponse.Fate:
    request = pb.ResolveRequest(start_timestamp=start, writes=writes)
    return (await gateway.handler.resolve(request)).fate


async def test_callers_share_a_cell_and_exclude_its_writers() -> None:
    async with gateways() as (_, (one, other)):
        starts = [await gateway.begin() for gateway in (one, other, one, other)]
        await one.commit(starts[0], [_read_lock(b"hub"), write(b"a", b"1")])
        await other.commit(starts[1], [_read_lock(b"hub"), write(b"z", b"1")])
        for start, kind in zip(starts[2:], (DELETE, LOCK), strict=True):
            with pytest.raises(ConflictError, match="was read-locked") as caught:
                await one.commit(start, [write(b"hub", kind=kind)])
            assert caught.value.cell is not None
            assert caught.value.cell.column == COLUMN


async def test_the_same_commit_again_gives_the_same_timestamp_everywhere() -> None:
    async with gateways(3) as (_, (one, other, third)):
        start = await one.begin()
        writes = [_read_lock(b"bob"), write(b"zoe", b"2"), _read_lock(b"yan")]
        commit = await one.commit(start, writes)
        assert await one.commit(start, writes) == commit
        assert await other.commit(start, writes[::-1]) == commit
        assert await _resolved(third, start, *writes) == COMMITTED
        with pytest.raises(InvalidArgument, match="another write set"):
            await one.commit(start, [write(b"bob", kind=LOCK), *writes[1:]])
        with pytest.raises(InvalidArgument, match="another write set"):
            await third.commit(start, [write(b"bob", kind=LOCK), *writes[1:]])


async def test_gateways_that_commit_the_same_transaction_at_once_agree() -> None:
    for seed in range(20):
        async with gateways(3) as (cluster, all_gateways):
            chance = random.Random(seed)
            cluster.delay = lambda _, chance=chance: 0.02 * chance.random()  # type: ignore[misc]
            start = await all_gateways[0].begin()
            writes = [_read_lock(b"bob"), write(b"zoe", b"2"), _read_lock(b"max")]
            commits = await asyncio.gather(*(one.commit(start, writes) for one in all_gateways))
            assert len(set(commits)) == 1


async def test_one_gateway_commits_in_one_round_and_another_in_two_phases() -> None:
    for seed in range(20):
        async with a_site() as site:
            chance = random.Random(seed)
            site.cluster.delay = lambda _, chance=chance: 0.02 * chance.random()  # type: ignore[misc]
            both = [await site.start(), await site.start(limits=Limits())]
            start = await both[0].begin()
            writes = [_read_lock(b"bob"), write(b"al", b"2"), _read_lock(b"hal")]
            commits = await asyncio.gather(*(one.commit(start, writes) for one in both))
            assert len(set(commits)) == 1


async def test_a_transaction_that_was_never_committed_is_resolved_and_stays_aborted() -> None:
    async with gateways() as (_, (one, other)):
        start = await one.begin()
        writes = [_read_lock(b"bob"), write(b"zoe", b"2")]
        assert await _resolved(other, start, *writes) == ABORTED
        with pytest.raises(ConflictError) as caught:
            await one.commit(start, writes)
        assert caught.value.cell is not None
        assert caught.value.cell.column == COLUMN, "the hidden one means nothing to callers"


async def test_the_hidden_primary_that_an_error_names_can_be_asked_about() -> None:
    async with gateways() as (_, (one, _)):
        start = await one.begin()
        commit = await one.commit(start, [_read_lock(b"bob")])
        known = one.commits._known[start].primary
        assert known is not None
        primary = WireAddress(table_id=known.table_id, row=known.row, column=known.column)
        request = pb.ResolveRequest(start_timestamp=start, primary=primary)
        assert (await one.handler.resolve(request)).commit_timestamp == commit
        primary.column = b"\0ack\0"
        with pytest.raises(InvalidArgument, match=r"primary\.column: .*reserved"):
            await one.handler.resolve(pb.ResolveRequest(start_timestamp=start, primary=primary))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "primary: give either"),
        (
            {
                "cells": [pb.CellName(table=TABLE, row=b"a", column=COLUMN)],
                "writes": [_read_lock(b"a")],
            },
            "primary: give either",
        ),
        ({"writes": [write(b"a", kind=pb.CellWrite.KIND_NOTIFY)]}, "writes: has nothing but"),
        ({"writes": [_read_lock(b"a"), write(b"b", column=b"\0c")]}, r"writes\[1\]\.column"),
        # Without its kind, the cell itself would be asked, instead of the hidden one that decides.
        (
            {"writes": [pb.CellWrite(table=TABLE, row=b"a", column=COLUMN)]},
            r"writes\[0\]\.kind: 0 is not a kind",
        ),
        ({"writes": [write(b"a", kind=KIND_OF_THE_FUTURE)]}, r"writes\[0\]\.kind: 9 is not"),
    ],
)
async def test_what_cannot_be_resolved_is_refused_by_name(
    fields: dict[str, Any], said: str
) -> None:
    async with gateways(1) as (_, (one,)):
        request = pb.ResolveRequest(start_timestamp=await one.begin(), **fields)
        with pytest.raises(InvalidArgument, match=said):
            await one.handler.resolve(request)


async def test_a_read_lock_has_no_value_and_is_the_only_write_of_its_cell() -> None:
    async with gateways(1) as (_, (one,)):
        start = await one.begin()
        with pytest.raises(InvalidArgument, match=r"writes\[0\]\.value: is allowed in a put"):
            await one.commit(start, [write(b"a", b"v", READ_LOCK)])
        with pytest.raises(InvalidArgument, match=r"writes\[1\]: names the same cell"):
            await one.commit(start, [_read_lock(b"a"), write(b"a", b"v")])
