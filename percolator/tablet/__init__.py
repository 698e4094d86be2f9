"""A tablet: one range of rows, its cells on an ordered key-value storage, one batch after another.

Open `tablet.py` first: one method for each call. Behind it are four rooms:

    writing/     conditional mutations, judged and made durable in group commits
    reading/     point reads, scans, and the search for notifications
    memory/      what an open tablet keeps in memory, such as its locks
    collection/  removing versions that no snapshot can still need

`upkeep.py` is what changes a tablet between two batches: schema, safe points, collection, loads
(`bulk_load.py` has their fences, `loaded_cells.py` what is put behind them).
`keys.py` maps cells to storage keys; `opening.py` reads a tablet's state back after a restart.

A tablet applies conditional mutations, and commits a transaction in one round if it has all its
cells. It does not import the client's protocol, and nothing that deals with sockets or disks, so
that a simulation runs exactly this code.
"""
