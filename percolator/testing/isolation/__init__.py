"""The rules of snapshot isolation, one per module, applied to a recorded history.

Open `checker.py` first: `check(history)` applies all rules and returns findings, each with the
transactions that are to blame. `history.py` is what a run records; `history_file.py` stores it.
`replay.py` and `frontier.py` compare every read with the only values it may have returned.

The checker must not learn anything from the product: it judges by the definition alone.
"""
