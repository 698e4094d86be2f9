"""How much history is kept: safe points, what holds them back, and collection below them.

Open `collection.py` first: it decides, for tablets (`tablet_collecting.py`) and for rows
(`row_collecting.py`), which collect behind the port of `collecting.py`. `history_needs.py` asks who
still reads the past, `old_locks.py` resolves the locks below a new safe point, for which
`lock_scan.py` looks in every tablet, and `safe_points.py` makes the result durable.

A safe point is durable before anything is collected below it, and it never moves back.
"""
