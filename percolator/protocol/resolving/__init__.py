"""Resolving the locks of others: asking the primary what became of a transaction, and acting on it.

Open `cleanup.py` first: it has the rules, and everybody who meets a lock calls it. `primaries.py`
asks the cells that decide, also in tables that are being deleted; `asked_once.py` does so once for
all who ask at one moment. `pushing.py` has a live writer commit above a reader. `rolling.py` rolls
cells forward or back, and `rolling_in_bulk.py` has tablets do it for locks that are many.

Nothing is rolled back without a durable marker on the primary, and no verdict is noted that was not
seen there.
"""
