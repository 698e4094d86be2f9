"""The timestamp oracle: strictly increasing timestamps, with standbys.

`oracle.py` is a window of timestamps below a durable mark, extended before it is used up.
`candidate.py` makes one process lead, with a clock that the others agree with.

Nothing here may answer without a look, after the timestamps were allocated, at whether this process
still leads.
"""
