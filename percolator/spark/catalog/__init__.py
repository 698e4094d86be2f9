"""The catalogue of a table: which field of a DataFrame is which cell, and of which type.

Open `frame_catalog.py` first: the catalogue itself, parsed from JSON and checked. `spark_types.py`
spells the types. A catalogue need not be written by hand: `making_catalogs.py` makes one from the
`Table` and `Column` objects of a program, `declared_catalogs.py` from the codecs that the table's
schema keeps. `declared_codecs.py` refuses to write values that these codecs do not allow.
`strict_json.py` reads the JSON that options hold.
"""
