"""What the tests of change feeds ask, and a plain form of the answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import TARGET, Rig


class Change(NamedTuple):
    """One change; the value of a deletion is None."""

    commit: int
    row: bytes
    column: bytes
    value: bytes | None


class Answer(NamedTuple):
    """A stream of pages, as one."""

    changes: list[Change]
    reached: int
    locks: list[bytes]
    """The rows of the locks in the way."""
    pages: list[pb.ScanChangesResponse]


async def changes(rig: Rig, after: int, until: int, **fields: Any) -> Answer:
    request = pb.ScanChangesRequest(target=TARGET, after=after, until=until, **fields)
    pages = [page async for page in rig.tablet.scan_changes(request)]
    found = [change for page in pages for change in _changes(page.found)]
    locks = [blocking.lock.row for page in pages for blocking in page.locks]
    return Answer(found, pages[-1].reached, locks, pages)


async def look(rig: Rig, after: int, until: int) -> tuple[int, int]:
    """How far changes are settled, and the newest one."""
    asked = pb.ChangesLook(target=TARGET, after=after, until=until)
    result = await rig.tablet.look_for_changes(asked)
    return result.reached, result.newest


def before(page: pb.ScanChangesResponse) -> list[bytes | None]:
    """What the cells were before the changes of a page."""
    found = page.found
    return [
        None if at in found.new_cells else value for at, value in enumerate(found.values_before)
    ]


def _changes(found: pb.FoundChanges) -> list[Change]:
    return [
        Change(
            found.commit_timestamps[at],
            found.rows[at],
            found.columns[at],
            None if at in found.deletes else found.values[at],
        )
        for at in range(len(found.rows))
    ]
