"""Observers for `percolator worker`."""

from __future__ import annotations

from percolator import Table, Transaction, codecs, observes

notes = Table("notes")
text = notes.column("text", codecs.text)
words = notes.column("words", codecs.integer)


@observes(text)
def count(tx: Transaction, row: str) -> None:
    tx.set(row, words, len(tx.get(row, text, default="").split()))


observers = [count]
