"""Every way to write a DataFrame: with many transactions, with one, in bulk, or as a stream.

Open `writers.py` first: it chooses the writer, after checks on the driver.

- `plain_writing.py` writes with many transactions in each task. `transactions.py` runs them,
  `cutting.py` says how much goes into one, and `reviews.py` makes them depend on what is there.
- `atomic_writing.py` makes one shared transaction of the whole job; `locking.py` is the part of a
  task. `joint_writes.py` makes one of several jobs, and `sink.py` one of each batch of a stream.
- `bulk_load_writer.py` loads an empty range of rows without transactions.

`created_tables.py` refuses what would create tables for Spark alone. `written.py` counts what tasks
have written, for the log and for errors.
"""
