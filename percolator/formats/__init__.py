"""The bytes that transactions store in cells, as both clients and tablet servers read them.

`records.py` packs and unpacks locks and commit records, and names the columns that belong to the
library and not to the user. docs/formats.md shows every byte.

Formats are stored: a change here is a change of every existing store, and needs a version. Nothing
here decides anything, so tablet servers and the protocol may share it and need not know each other.
"""
