"""Collecting old versions from outside, where the store does not do it by itself.

    rows.py    the rounds over the tables of a row store
    fates.py   what became of the transactions that have left intents

Tablets collect by themselves, when the master orders it (services/master/collection.py). A row
store does nothing by itself, so whoever leads walks over its rows.
"""
