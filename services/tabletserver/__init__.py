"""The tablet server: serves tablets from LevelDB directories that it owns.

Open `handler.py` first: one method for each call. `tablets.py` opens and closes tablets as the
master orders, and `served_tablet.py` is one of them from its opening to its end. `tablet_store.py`
takes a tablet's directory over; `leveldb_clone.py` copies it and `leveldb_storage.py` reads and
writes it, in the threads of `services/chassis/store`.

Tablets ask the oracle through `oracle_word.py`, and tablets elsewhere through
`primaries_elsewhere.py`.

All decisions about cells are in `percolator.tablet`. No answer may leave before a look, after the
work, at whether this server still owns the directory.
"""
