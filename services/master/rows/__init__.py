"""A master whose cluster has its cells in a row store: tables, and no tablets.

Open `row_term.py` first: what it does while it leads. `row_tables.py` creates the store's tables,
`row_history.py` collects their rows, `row_drops.py` deletes what was dropped, and `row_handler.py`
refuses what only tablets have.

Everything else is that of any master. There is no assignment, no balance and no split: the store
divides its tables by itself, and serves them.
"""
