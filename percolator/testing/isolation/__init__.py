"""The rules of snapshot isolation, one per module, over a recorded history.

`percolator.testing.checker.check` applies them all.
"""
