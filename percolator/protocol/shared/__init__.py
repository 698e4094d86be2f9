"""Transactions of several processes: all that they write appears at once, or none of it.

A shared transaction consists of *participants*, which are transactions with start timestamps, locks
and primaries. All primaries are cells of one row, so the driver can commit the participants it has
chosen with a single write. participant.py has their names and states, attempt.py locks what a task
writes, and driver.py decides.

Rules, each with the failure that it prevents:
- Every attempt at a task has participants of its own, and the driver names those that it commits.
  Otherwise, whatever a failed or late attempt had locked would be committed too.
- A participant is named only when every cell of its attempt is known to be locked: an unanswered
  message may lock a cell later, which would then appear in snapshots that have been read already.
- The commit timestamp is fetched after the last participant was named, and all participants are
  committed at it in one write. With several writes, a crash in between would leave half of them.
- When a participant is rolled back, by any client, the transaction can never commit.
- Once the transaction has ended, no participant can begin: it would be in the way for as long as it
  lives.
"""
