"""Cells to write, the steps that clients send for them, and transactions that stop halfway."""

from __future__ import annotations

from percolator.errors import CellAddress
from percolator.formats.records import KIND_PUT
from percolator.limits import Limits
from percolator.protocol.commit import Commit
from percolator.protocol.write_set import Write
from percolator.routing.cells import CellMutation
from percolator.v1.tabletserver_pb2 import Change

from .protocol_world import NO_FAULTS, Client, World

A = CellAddress(1, b"a", b"x")
B = CellAddress(1, b"b", b"x")
C = CellAddress(2, b"a", b"x")

PATIENT = Limits(lock_ttl_seconds=3.0, heartbeat_seconds=1.0)


def put(value: bytes) -> Write:
    return KIND_PUT, value


def puts(step: CellMutation, space: int) -> bool:
    return any(
        change.kind == Change.KIND_PUT and change.space == space
        for change in step.message().changes
    )


def address(step: CellMutation) -> CellAddress:
    return CellAddress(step.table_id, step.message().row, step.message().column)


def world() -> World:
    return World(0, NO_FAULTS)


async def settled(client: Client) -> None:
    await client.env.background.drain(60.0)


async def locked(client: Client, *cells: CellAddress) -> Commit:
    """A transaction that has prewritten these cells and does not continue by itself."""
    commit = client.commit(
        await client.start_timestamp(), {cell: put(b"pending") for cell in cells}
    )
    await commit.prewrite(client.deadline())
    return commit


async def left_behind(here: World, *cells: CellAddress, committed: bool) -> int:
    """Leaves the locks of a client that died before or after its commit point; returns the start
    timestamp."""
    dead = here.client(PATIENT)
    commit = await locked(dead, *cells)
    if committed:
        await commit.commit_primary(dead.deadline())
    dead.crash()
    return commit._write.start
