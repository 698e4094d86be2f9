"""An acknowledgement is collected once nothing is left that it acknowledges."""

from __future__ import annotations

import asyncio

import pytest

from percolator.formats.records import acknowledgement_column, observed_column
from percolator.observers.watched_cell import Acknowledgement
from percolator.tablet.state import SafePoints
from tests.unit.tablet.collecting import (
    DELETE,
    IN_DATA,
    collected,
    noted,
    notified,
    record,
    stored,
)
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    NOTIFY,
    WRITE,
    Rig,
    delete,
    mutation,
    put,
    write_record,
    written,
)


async def acknowledgements(rig: Rig) -> list[tuple[bytes, int]]:
    return [
        (cell.row, cell.timestamp)
        for cell in await rig.cells(WRITE)
        if observed_column(cell.column) is not None
    ]


async def test_an_acknowledgement_is_collected_with_the_deletion_that_it_is_about() -> None:
    rig = await Rig().open()
    seen = Acknowledgement(13).encode()
    await rig.apply(
        written(b"a", 10, 11),
        record(b"a", 12, 13, DELETE),
        noted(b"a", COLUMN, 12, Acknowledgement(11).encode()),
        noted(b"a", COLUMN, 15, seen),
        written(b"b", 10, 11),
        noted(b"b", COLUMN, 12, seen),
        noted(b"b", b"gone before", 12, seen),
        noted(b"c", COLUMN, 12, seen),
        noted(b"c", COLUMN, 30, seen),
    )
    await collected(rig, 20)
    # Those of what still exists, or was acknowledged recently; "c" is left for the next pass.
    assert await acknowledgements(rig) == [(b"b", 12), (b"c", 30), (b"c", 12)]
    assert await stored(rig, WRITE) == [(b"b", 12), (b"b", 11), (b"c", 30), (b"c", 12)]
    await collected(rig, 40)
    assert await acknowledgements(rig) == [(b"b", 12)]


async def test_an_acknowledgement_stays_while_a_notification_keeps_what_it_acknowledges() -> None:
    rig = await Rig().open()
    await rig.apply(
        record(b"a", 12, 13, DELETE),
        notified(b"a", 13),
        noted(b"a", COLUMN, 15, Acknowledgement(14).encode()),
    )
    await collected(rig, 20)
    assert await stored(rig, WRITE) == [(b"a", 15), (b"a", 13)]
    await rig.apply(mutation(b"a", delete(NOTIFY, 13, b"observer")))
    await collected(rig, 20)
    assert await stored(rig, WRITE) == []


async def test_a_cell_rewritten_while_its_acknowledgement_waits_is_not_harmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The walk yields after every entry, and just then the cell is written."""
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 1)
    rig = await Rig(sweep_share=0.001).open()
    await rig.apply(noted(b"a", COLUMN, 12, Acknowledgement(11).encode()), written(b"b", 10, 11))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    collecting = asyncio.ensure_future(rig.tablet.collect(20))
    await asyncio.sleep(0)
    await rig.apply(written(b"a", 24, 25, b"new"))
    await collecting
    assert await rig.value(b"a", 30) == b"new"
    assert await rig.value(b"a", 24) is None


@pytest.mark.parametrize("inline", [True, False])
async def test_the_acknowledgement_of_a_dead_letter_stays_wherever_it_is_stored(
    inline: bool,
) -> None:
    rig = await Rig().open()
    put_aside = Acknowledgement(0, has_dead_letter=True).encode()
    hidden = acknowledgement_column(b"observer", COLUMN)
    if inline:
        await rig.apply(noted(b"a", COLUMN, 15, put_aside))
    else:
        write = put(WRITE, write_record(14, b"", IN_DATA), 15)
        await rig.apply(mutation(b"a", write, put(DATA, put_aside, 14), column=hidden))
    await collected(rig, 20)
    assert await acknowledgements(rig) == [(b"a", 15)]
