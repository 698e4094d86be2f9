"""Exports and imports: a consistent copy of tables as files, and tables made from one.

Open `exporting.py` first: it scans every table at one pinned timestamp. `importing.py` is the way
back, by bulk loads that can be resumed (`import_log.py`). `exported.py` is what an export says
about its tables, `table_messages.py` what a cluster is asked for to make them again. `layout.py`
says which files an export consists of and checks them. `part_files.py` reads and writes one file:
cells as they are stored, in Parquet (`cells_file.py`), or rows as people read them, in lines of
JSON (`records_file.py`).

An export must not read at two timestamps, and an import never writes into a table that holds other
rows.
"""
