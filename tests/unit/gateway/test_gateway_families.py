"""Reads of columns by their prefix, through a gateway."""

from __future__ import annotations

from percolator.v1 import gateway_pb2 as pb

from .gateways import TABLE, gateways, write


async def test_get_and_scan_return_the_columns_with_a_prefix_and_no_others() -> None:
    async with gateways(2) as (_, all_gateways):
        one = all_gateways[0]
        await one.commit(
            await one.begin(),
            [
                write(b"hub", b"1", column=b"edge:ann"),
                write(b"hub", b"2", column=b"edge:zoe"),
                write(b"hub", b"3", column=b"edge"),
                write(b"hub", b"4", column=b"name"),
                write(b"joe", b"5", column=b"name"),
            ],
        )
        start = await one.begin()
        asked = pb.ScanTableRequest(start_timestamp=start, table=TABLE, column_prefixes=[b"edge:"])
        query = pb.RowQuery(table=TABLE, row=b"hub", column_prefixes=[b"edge:", b"na"])
        for gateway in (*all_gateways, one):
            pages = [page async for page in gateway.handler.scan_table(asked)]
            rows = [row for page in pages for row in page.rows]
            assert [(row.row, _shown(row)) for row in rows] == [
                (b"hub", {b"edge:ann": b"1", b"edge:zoe": b"2"})
            ]
            got = await gateway.handler.get(pb.GetRequest(start_timestamp=start, rows=[query]))
            (row,) = got.rows
            assert _shown(row) == {b"edge:ann": b"1", b"edge:zoe": b"2", b"name": b"4"}
            both = pb.RowQuery(
                table=TABLE, row=b"hub", columns=[b"name"], column_prefixes=[b"edge:z"]
            )
            got = await gateway.handler.get(pb.GetRequest(start_timestamp=start, rows=[both]))
            assert _shown(got.rows[0]) == {b"edge:zoe": b"2", b"name": b"4"}


def _shown(row: pb.FoundRow) -> dict[bytes, bytes]:
    return {cell.column: cell.value for cell in row.cells}
