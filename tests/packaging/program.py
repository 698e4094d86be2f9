"""A program that has only the wheel: it runs outside the checkout."""

from __future__ import annotations

import percolator
from percolator import ConflictError, Table, codecs

notes = Table("notes")
text = notes.column("text", codecs.text)


def main() -> None:
    with percolator.connect() as db:
        db.create_table(notes)
        with db.transaction() as tx:
            tx.set("a", text, "one two")
        with db.snapshot() as snapshot:
            print(snapshot.get("a", text))
        slow = db.transaction()
        slow.set("b", text, slow.get("b", text, default="slow"))
        with db.transaction() as quick:
            quick.set("b", text, "three")
        try:
            slow.commit()
        except ConflictError:
            print("conflict")


if __name__ == "__main__":
    main()
