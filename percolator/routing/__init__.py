"""The way from a cell to the server that has it: finds tablets, batches calls, and sends again.

Open `cells.py` first: the requests and results that the protocol speaks in. `router.py` looks each
row up in the `tablet_map.py`, hands it to the `dispatcher.py` of its server (by way of `placing.py`
if that has to wait), and sends again what was definitely not executed. A lane (`lanes.py`) turns
what is pending into calls, and responses into results: `mutation_lane.py` and `read_lane.py` rows
(`pending_row.py`, `pending_cell.py`), `commit_lane.py` whole transactions (`pending_commit.py`).
`together.py` sends groups of mutations, and `rolling_forward.py` orders to roll locks forward.

`catalog.py` asks the masters about tables (`table_info.py`), and remembers the answers;
`schema_versions.py` keeps what tablets say of their schemas. `range_scan.py` and `tablet_walk.py`
go from tablet to tablet, and `joined_page.py` is a page of a scan as blocks of memory.
`change_look.py` asks all tablets of a table how new their changes are, and `change_scan.py` reads
them in the order of their commits. `ranges.py` divides tables among those who work in parallel, and
`contents.py` lists what is stored: both are ports, of which tablets are one engine.

A mutation that may have been executed is never sent again here: only the protocol knows what
repeating it means. No rule of transactions belongs in this room.
"""
