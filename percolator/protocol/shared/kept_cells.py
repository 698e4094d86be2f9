"""Cells that hold already what an attempt writes to them: they are locked, and not written again.

The lock is a lock-only write, as of `tx.lock`. So nobody is notified, the cell keeps the commit
timestamp that it has, and change feeds do not mention it. Left out altogether, a cell would count
as one that the job does not write, and an overwriting driver would delete it.

Rules, each with the failure that it prevents:
- The lock of a kept cell is refused if the cell was committed at or above the timestamp at which it
  was read. Otherwise the job would confirm a value that another transaction has replaced, and show
  that one's value among its own. The cell is written in full then.
- A cell whose values expire is always written: the kept value would expire as if nobody had written
  it again. The client may have learned the schema before the ttl was set, so it looks at the one
  under which the tablets have answered.
"""

from __future__ import annotations

from collections.abc import Mapping

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.read import read_rows
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.write_set import Write
from percolator.routing.cells import RowRequest
from percolator.v1.tabletserver_pb2 import RowRead

KEPT: Write = (KIND_LOCK_ONLY, b"")


async def with_kept_cells(
    env: Environment,
    cleanup: Cleanup,
    writes: Mapping[CellAddress, Write],
    read_at: int,
    deadline: float,
) -> dict[CellAddress, Write]:
    """The writes, with `KEPT` for each cell that holds at `read_at` what is written to it."""
    columns: dict[tuple[int, bytes], list[bytes]] = {}
    for table_id, row, column in writes:
        columns.setdefault((table_id, row), []).append(column)
    requests = [
        RowRequest(table_id, RowRead(row=row, columns=names, timestamp=read_at))
        for (table_id, row), names in columns.items()
    ]
    answers = await read_rows(env, cleanup, requests, deadline, Statistics())
    found = {
        CellAddress(table_id, row, column): cell.value
        for (table_id, row), answer in zip(columns, answers, strict=True)
        for column, cell in answer.found.items()
    }
    expiring = {
        table_id: (await env.schema_of_reads(table_id, deadline)).expiring
        for table_id in {table_id for table_id, _ in columns}
    }
    return {
        cell: KEPT
        if found.get(cell) == (None if write[0] == KIND_DELETE else write[1])
        and cell.column not in expiring[cell.table_id]
        else write
        for cell, write in writes.items()
    }
