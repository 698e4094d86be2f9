"""Collection: removing versions and markers that no snapshot and no open transaction can need.

Open `collection.py` first: it says what may be removed below a safe point, and why. `sweep.py`
walks a tablet in slices so that calls are served in between. `trimming.py` removes what is outside
a tablet's range after a split, and `compaction.py` reclaims the space. `answered_cells.py` and
`dead_letters.py` deal with the hidden cells of observers.

Nothing above the safe point is ever removed, and nothing that a lock could still refer to.
"""
