"""A crawl out of nothing, with the duplicates that the paper counted.

Each of the three keys of a document is drawn from three quarters as many as there are documents.
Clustered as `definition.py` says, that gives clusters of 3.3 documents on average, and 93 % of all
documents have a duplicate: the paper's own figures.

Everything is a function of the seed and of numbers, and uses nothing that Spark does not have as
well: `spark_documents.crawled` makes the same documents there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5

from examples.webindex.documents import Document

HEX_DIGITS = 15
"""60 bits: a positive number in every language."""
LINKS_PER_DOCUMENT = 3
PAGES_PER_SITE = 20
SPLITS_FROM = 1_000
"""URLs that tell where all of them lie."""
FILLER = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor."


@dataclass(frozen=True)
class Crawl:
    """So many documents, numbered from 0."""

    documents: int
    seed: int = 0

    @property
    def keys(self) -> int:
        """From which the keys of documents are drawn."""
        return max(1, self.documents * 3 // 4)

    @property
    def sites(self) -> int:
        return max(1, self.documents // PAGES_PER_SITE)

    def document(self, number: int, edition: int = 0) -> Document:
        """The same URL with another content in every edition."""
        drawn = f"{number}.{edition}"
        title, opening, ending = (self._draw(drawn, key, self.keys) for key in ("t", "o", "e"))
        targets = [
            self._draw(drawn, f"l{link}", self.documents) for link in range(LINKS_PER_DOCUMENT)
        ]
        links = " ".join(f"[page {target}]({self.url(target)})" for target in targets)
        body = f"Title {title}\n\nOpening {opening}. {FILLER}\n\n{links}\n\nEnding {ending}.\n"
        return Document(self.url(number), body)

    def url(self, number: int) -> str:
        return f"http://site{self._draw(str(number), 's', self.sites)}.example/{number}"

    def splits(self, tablets: int) -> list[str]:
        """Where to cut a table by URL into so many tablets of about the same size."""
        step = max(1, self.documents // SPLITS_FROM)
        urls = sorted(self.url(number) for number in range(0, self.documents, step))
        return [urls[len(urls) * part // tablets] for part in range(1, tablets)]

    def __iter__(self) -> Iterator[Document]:
        return (self.document(number) for number in range(self.documents))

    def _draw(self, number: str, what: str, below: int) -> int:
        digest = md5(f"{self.seed}:{number}:{what}".encode(), usedforsecurity=False).hexdigest()
        return int(digest[:HEX_DIGITS], 16) % below
