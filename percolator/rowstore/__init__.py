"""Cells in a row store: a store that others run, such as Bigtable, in place of tablet servers.

A row store changes one row at a time, atomically, if a check of that row passes, and reads rows
through filters: `port.py`. `cells.py` is the door: `percolator.routing.cells.Cells` on it.

    how cells lie in rows   layout.py (names), times.py (timestamps)
    mutations               mapping.py (a step as a check and changes), common_steps.py (the usual
                            ones, at once), exclusion.py (read locks), joining.py (steps of one row
                            in one call), judging.py (why a step was refused), mutating.py
    groups of mutations     grouping.py (all of them as one check), proofs.py, together.py
    notifications           intents.py (what is about to change), shared_writes.py (in one call)
    reads                   selecting.py (what a read needs), gathering.py (reads in one call),
                            reading.py, scanning.py
    collection              collecting.py (a row), collected.py (its notes), collector.py (a table)
    waiting                 patience.py (until a deadline), steady_scan.py (over whole tables)
    for others              ranges.py (to divide work by), contents.py, locks.py (what is stored),
                            loading.py (bulk loads), conformance.py, capacity.py (checking one)

Nothing here knows who runs the store (percolator/bigtable does) or how it is reached. No rule of
transactions belongs here: a step's conditions are translated, not understood (mapping.py).
"""
