"""Giving up history: the rounds in which old versions are collected, where nobody else does it.

    older_locks.py   resolves what is older than what is about to be collected
    rows.py          the rounds over the tables of a row store
    awaited.py       deletions that observers have to see, and intents that nobody asks for
    fates.py         what became of the transactions that have left intents

Tablets collect by themselves, when the master orders it (services/master/history). A row store does
nothing by itself, so whoever leads walks over its rows from outside.
"""
