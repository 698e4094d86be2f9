"""Cells in a row store: a store that others run, such as Bigtable, in place of tablet servers.

A row store changes one row at a time, atomically, if a check of that row passes, and reads rows
through filters: `port.py`. `adapter.py` is `percolator.routing.cells.Cells` on it.

    layout.py       how cells lie in rows: names, timestamps, proofs, notes of collection
    mapping.py      a step as a check and changes, and the steps of one row in one call
    mutations.py    mutations, why a step was refused, and groups of mutations
    intents.py      notifications: what is about to change
    reads.py        reads and scans
    collection.py   the collection of a row and of a table
    patience.py     waiting until a deadline, and reading whole tables
    loading.py      bulk loads
    conformance.py  checks of a store that somebody runs

Nothing here knows who runs the store (percolator/bigtable does) or how it is reached. No rule of
transactions belongs here: a step's conditions are translated, not understood (mapping.py).
"""
