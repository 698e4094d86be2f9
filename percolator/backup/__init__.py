"""Exports and imports: a consistent copy of tables as files, and tables made from one.

Open `exporter.py` first: it scans every table at one pinned timestamp. `importer.py` is the way
back, by bulk loads that can be resumed. `export_files.py` has the files of an export, and what they
say about its tables; `part_files.py` reads and writes the cells of one tablet, in Parquet or in
lines of JSON.

An export must not read at two timestamps, and an import never writes into a table that holds other
rows.
"""
