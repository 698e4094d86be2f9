"""What a row of a DataFrame stands for, and how its values become bytes of cells and back.

Open `shape.py` first: a row is either a cell (`raw_cells.py`) or a row of the table with the
catalogue's fields (`typed_rows.py`). `fields.py` is what both share. `values.py` converts between
Arrow arrays and bytes, a batch at a time, and `nested_values.py` does so for structs, arrays and
maps.
"""
