"""Which rows of a table a read or a stream touches: options that name keys become row ranges.

Open `row_ranges.py` first: sets of rows as ranges of row keys. `chosen_rows.py` has the options
that choose rows, and `key_syntax.py` says how they write a key. `wanted_changes.py` says what a
stream should deliver: of which rows, and since when.

Nothing here asks the cluster, and nothing here needs Spark.
"""
