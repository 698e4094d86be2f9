"""Batch reads: one snapshot for all jobs of a DataFrame, a task for each part of the table.

Open `reader.py` first: it is what Spark calls. `partitions.py` divides the rows among tasks,
`cell_pages.py` fetches the cells of a task page by page, and `pins.py` keeps the snapshot from
being collected while jobs still read it.
"""
