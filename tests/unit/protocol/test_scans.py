"""Scans: rows with locks are read again in place, and own writes hide what is stored."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress
from percolator.limits import Limits
from percolator.protocol.environment import Statistics
from percolator.protocol.read import scan_pages
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import RangeRequest

from .cells_and_steps import PATIENT, left_behind, put, settled, world
from .protocol_world import Client, World


async def _scan(
    client: Client, own: WriteSet | None = None, *, reverse: bool = False, start: bytes = b""
) -> list[tuple[bytes, dict[bytes, bytes | None]]]:
    request = RangeRequest(1, start, b"", None, await client.start_timestamp(), reverse)
    found = []
    async for page in scan_pages(client.env, client.cleanup, request, own, 20.0, Statistics()):
        for row, cells in page:
            found.append((row, {column: cell.value for column, cell in cells.items()}))
    return found


async def _ten_rows(here: World) -> None:
    client = here.client()
    await client.write({CellAddress(1, b"%d" % i, b"x"): put(b"%d" % i) for i in range(10)})
    await settled(client)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_reads_rows_with_locks_again_in_their_place(reverse: bool) -> None:
    here = world()
    await _ten_rows(here)
    cells = [CellAddress(1, b"%d" % i, b"x") for i in (1, 4, 7)]
    new = CellAddress(1, b"55", b"x")
    await left_behind(here, *cells, new, committed=True)
    await left_behind(
        here, CellAddress(1, b"2", b"x"), CellAddress(1, b"66", b"x"), committed=False
    )
    found = await _scan(here.client(PATIENT), reverse=reverse)
    rows = [row for row, _ in found]
    expected = sorted([*(b"%d" % i for i in range(10)), b"55"], reverse=reverse)
    assert rows == expected
    values = {row: cells[b"x"] for row, cells in found}
    assert values[b"4"] == values[b"55"] == b"pending"
    assert values[b"2"] == b"2"


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_shows_the_transactions_own_writes(reverse: bool) -> None:
    here = world()
    await _ten_rows(here)
    own = WriteSet(Limits())
    own.put(CellAddress(1, b"3", b"x"), b"changed")
    own.delete(CellAddress(1, b"5", b"x"))
    own.put(CellAddress(1, b"50", b"x"), b"new")
    own.put(CellAddress(1, b"999", b"x"), b"behind the last")
    own.put(CellAddress(1, b"", b"x"), b"before the first")
    own.lock(CellAddress(1, b"88", b"x"))
    own.put(CellAddress(2, b"4", b"x"), b"another table")
    found = await _scan(here.client(), own, reverse=reverse)
    rows = [row for row, _ in found]
    expected = [b"", b"0", b"1", b"2", b"3", b"4", b"50", b"6", b"7", b"8", b"9", b"999"]
    assert rows == (expected[::-1] if reverse else expected)
    assert dict(found)[b"3"] == {b"x": b"changed"}
