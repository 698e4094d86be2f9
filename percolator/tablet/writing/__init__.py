"""Conditional mutations, from a request to one synced write.

Follow a mutation in this order: `mutations.py` checks it and flattens it into tuples,
`mutation_work.py` is those of one request on their way through batches, `group_commit.py` begins
the next batch, `mutation_queue.py` says what comes next, `judge.py` decides whether the conditions
hold, and `judged_batch.py` collects what is written and what becomes true in memory once it is
durable.

A transaction that commits in one round comes as a whole: `transactions.py` checks it,
`held_transactions.py` judges it, holds its cells and fetches its timestamp, and the next batch
writes it.
`write_latch.py` says who may write, and when no cell is held. What needs a cell that a batch
changes or a transaction holds waits for it in the cell's line (`lines.py`). `results.py` has what
either is answered with.

No result leaves before its batch is durable, not even a refusal: what it was judged against might
be lost in a crash.
"""
