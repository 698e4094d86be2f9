"""A tablet: one range of rows, its cells on an ordered key-value storage, one batch after another.

Open `tablet.py` first: one method for each call. A commit passes through these files:

    requests.py      checks what comes in, and flattens it
    group_commit.py  queues it, takes its cells, writes one batch at a time, and answers
    judge.py         who waits for a cell; judges conditions, and collects what a batch will write
    cells.py         keys of cells; in memory: their locks, how new their records can be, and which
                     are held by transactions
    state.py         what all of them share: identity, limits, fences of loads, the oracle's time

Reads of rows are in `tablet.py`. Scans: `scans.py`, `visible_cells.py`, `change_scan.py`,
`notification_scan.py`.
`upkeep.py` changes a tablet between two batches: schema, safe points, groups of mutations, bulk
loads (`bulk_load.py`) and collection (`collection.py`). `rolling_forward.py` completes committed
transactions; `opening.py` reads a tablet's state back after a restart.

A tablet applies conditional mutations, and commits a transaction in one round if it has all its
cells. It does not import the client's protocol, and nothing that deals with sockets or disks, so
that a simulation runs exactly this code.
"""
