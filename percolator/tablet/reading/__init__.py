"""Reads of a tablet at a timestamp, and the locks that are in their way.

Open `point_reads.py` first. `scans.py` plans a range and returns it page by page (`scan_page.py`);
`visible_cells.py` picks the version that a snapshot sees, and `visible_runs.py` does so for many
entries at a time. `joined_cells.py` joins them to blocks. `locks_in_the_way.py` finds the locks
that may hide a commit below the timestamp. `notification_scan.py` finds work for observers.

A read that meets a lock never guesses what the lock's transaction will do: it returns the lock, and
the client resolves it. Long walks are cut into slices, so that one reader cannot hold up the
others.
"""
