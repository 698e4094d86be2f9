"""Which documents have a word: an index that follows changes and deletions."""

from collections import defaultdict
from random import Random

import percolator
from percolator import Database, Table, codecs
from percolator.recipes import Index

documents = Table("documents")
text = documents.column("text", codecs.text)
by_word: Index[str, str, str] = Index(
    "documents by word", on=text, value=codecs.text, values=str.split
)
WORDS = ["ant", "bee", "cat", "dog", "eel", "fox"]


def change(db: Database, kept: dict[str, str], chance: Random) -> None:
    """Writes, replaces or deletes a document, here and there."""
    row = f"document {chance.randrange(60)}"
    with db.transaction() as tx:
        if chance.random() < 0.3:
            tx.delete(row, text)
            kept.pop(row, None)
        else:
            kept[row] = " ".join(chance.sample(WORDS, 3))
            tx.set(row, text, kept[row])


if __name__ == "__main__":
    kept: dict[str, str] = {}
    plain: dict[str, list[str]] = defaultdict(list)
    with percolator.connect() as db:
        db.create_table(documents)
        by_word.create(db)
        with db.run_observers([by_word.observer()]):
            for number in range(300):
                change(db, kept, Random(number))  # noqa: S311 - made-up data
            db.wait_for_observers()
        for row in sorted(kept):
            for word in kept[row].split():
                plain[word].append(row)
        with db.snapshot() as snapshot:
            found = {word: by_word.find(snapshot, word) for word in WORDS}
    if found != plain:
        raise SystemExit("the index differs from what plain Python finds")
    print(f"{len(kept)} documents by {len(found)} words, as plain Python finds them")
