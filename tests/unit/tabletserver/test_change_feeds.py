"""Change feeds on a tablet server: switched by the master's orders, and asked tablet by tablet."""

from __future__ import annotations

from percolator.formats.records import RecordKind, WriteRecord
from percolator.services.tabletserver.dump import _entry, as_line
from percolator.tablet.cells import cell_prefix, change_key
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tabletserver.memory_store import COLUMN, COMMIT, START, Machine, put, target

LATER = COMMIT + 10


async def scanned(machine: Machine, tablet: int, epoch: int = 1) -> pb.ScanChangesResponse:
    request = pb.ScanChangesRequest(target=target(tablet, epoch), until=LATER)
    *_, last = [page async for page in machine.handler.scan_changes(request)]
    return last


def with_schema(batch: pb.MutationBatch, schema: int) -> pb.MutationBatch:
    batch.target.schema_version = schema
    return batch


async def test_an_order_switches_the_feed_of_an_open_tablet() -> None:
    machine = Machine()
    await machine.open(1)
    assert (await scanned(machine, 1)).error.invalid_argument.field == "target"
    await machine.open(1, schema=2, change_feed=True)
    await machine.mutate(with_schema(put(1, b"a"), 2))
    assert list((await scanned(machine, 1)).found.rows) == [b"a"]
    # An order that was sent earlier and comes late.
    await machine.open(1, schema=1, change_feed=False)
    assert list((await scanned(machine, 1)).found.rows) == [b"a"]
    await machine.open(1, schema=3, change_feed=False)
    assert (await scanned(machine, 1)).error.invalid_argument.field == "target"


async def test_a_tablet_that_has_failed_is_opened_again_with_its_feed() -> None:
    machine = Machine()
    await machine.open(1, schema=2, change_feed=True)
    await machine.mutate(with_schema(put(1, b"a"), 2))
    machine.store.disks[1].failures = 1
    await machine.mutate(with_schema(put(1, b"b"), 2))
    while (await scanned(machine, 1)).HasField("error"):
        await machine.clock.sleep(0.1)
    await machine.mutate(with_schema(put(1, b"c"), 2))
    found = set((await scanned(machine, 1)).found.rows)
    assert {b"a", b"c"} <= found <= {b"a", b"b", b"c"}


async def test_looks_are_answered_tablet_by_tablet() -> None:
    machine = Machine()
    await machine.open(1, end=b"m", change_feed=True)
    await machine.open(2, start=b"m", change_feed=True)
    await machine.open(3)
    await machine.mutate(put(1, b"a"))
    looks = [pb.ChangesLook(target=target(number), until=LATER) for number in (1, 2, 3, 4)]
    looks.append(pb.ChangesLook(target=target(1, epoch=9), until=LATER))
    looks.append(pb.ChangesLook(target=target(1)))
    request = pb.LookForChangesRequest(looks=looks)
    found = (await machine.handler.look_for_changes(request)).looks
    assert [(one.reached, one.newest) for one in found[:2]] == [(LATER, COMMIT), (LATER, 0)]
    assert found[2].error.invalid_argument.field == "looks[2].target"
    assert found[3].error.HasField("tablet_moved")
    assert found[4].error.HasField("tablet_moved")
    assert found[5].error.invalid_argument.field == "looks[5].until"


def test_a_dump_shows_what_is_in_a_feed() -> None:
    record = WriteRecord(START, RecordKind.PUT, b"v").encode()
    key = change_key(cell_prefix(b"a", COLUMN), COMMIT)
    assert as_line(_entry(key, record)) == (
        f'F row="a" column="c" timestamp={COMMIT} start={START} kind="PUT" value="v"'
    )
