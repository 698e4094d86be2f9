"""The tablet server: serves tablets from LevelDB directories that it owns.

Open `handler.py` first: one method for each call. `tablets.py` opens and closes tablets as the
master orders, and reopens them after failures. `storage.py` takes a tablet's directory over, clones
it, and reads and writes it in threads of its own.

Tablets ask the oracle through `oracle_word.py`, and tablets elsewhere through
`primaries_elsewhere.py`.

All decisions about cells are in `percolator.tablet`. No answer may leave before a look, after the
work, at whether this server still owns the directory.
"""
