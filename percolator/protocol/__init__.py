"""The transaction protocol of the paper, run by the client: prewrite, commit, reads, and clean-up.

Open `steps.py` first: it is the table of the protocol, every step with its conditions and the
failure that each condition prevents. `write_set.py` fills the table in for one transaction.

    commit      commit.py; write_set.py has its writes, and keeps its lock alive
    read        read.py: rows and ranges
    lock        cleanup.py and roll_forward.py: locks of others that are in the way of these
    conflict    conflicts.py (the errors), contention.py: when to try again
    shared      shared/: transactions that several processes write
    changes     change_reader.py (the change feed)
    repeat      repeat.py: a gateway that commits what may be committed already

`environment.py` lists what the protocol needs from outside, and it gets nothing else: no sockets,
no disks, no clock of its own. Nothing here knows tablets or servers (`percolator.routing` does),
and tablet servers do not import this package.
"""
