"""The streaming source: the changes of a table with a change feed, as rows of a stream.

Open `stream_reader.py` first: it is what Spark calls. `offset.py` says what a position in the
stream is, `progress.py` decides on the driver how far the next batch goes, `row_images.py` makes
rows of a table out of changes of cells in the tasks. `change_shapes.py` has the fields of the
stream's rows.

A batch is described by two offsets alone, and everything in it is settled before Spark writes the
second one into its checkpoint. So a batch has the same rows however often it is read.
"""
