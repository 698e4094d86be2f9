"""Transactions of several processes: all that they write appears at one moment, or none of it.

A shared transaction consists of *parts*. To all others, a part is a transaction like any other: it
has a start timestamp, locks, and a primary, which alone decides. The one difference: the primaries
of all parts are cells of one row, so the driver can commit the parts it has chosen with a single
write.

A process locks its cells in attempt.py, where it may meet other_attempts.py; a part's primary is in
part.py. whole.py is the driver's decision; until then, keeping.py keeps parts alive. After it,
closing.py refuses new parts, and rolling_back.py removes those that are left.

Rules, each with the failure that it prevents:
- Every attempt at a task has parts of its own, and the driver names those that it commits.
  Otherwise, whatever a failed or late attempt had locked would be committed too.
- A part is named only when every cell of its attempt is known to be locked: an unanswered message
  may lock a cell later, which would then appear in snapshots that have been read already.
- The commit timestamp is fetched after the last part was named, and all parts are committed at it
  in one write. With several writes, a crash in between would leave half of them.
- When a part is rolled back, by anyone at all, the transaction can never commit.
- Once the transaction has ended, no part can begin: it would be in the way for as long as it lives.
"""
