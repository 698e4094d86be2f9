"""The tablet server: serves tablets from LevelDB directories that it owns.

Open `tablets.py` first: `TabletServerHandler` has one method for each call, `Tablets` opens and
closes tablets as the master orders, and reopens them after failures. `storage.py` takes a tablet's
directory over, clones it, reads and writes it in threads of its own, and watches the disk. Tablets
elsewhere are asked through `primaries_elsewhere.py`.

All decisions about cells are in `percolator.tablet`. No answer may leave before a look, after the
work, at whether this server still owns the directory.
"""
