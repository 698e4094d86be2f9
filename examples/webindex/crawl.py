"""A synthetic crawl, with as many duplicates as the paper reports.

Each of the three keys of a document is drawn from a range three quarters the number of documents.
Clustered by `definition.py`, that gives clusters of 3.3 documents on average, and 93 % of all
documents have a duplicate, which are the paper's own figures.

Everything is a function of the seed and of numbers, and uses only what Spark has as well, so that
`spark_documents.crawled` makes the same documents there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5

from examples.webindex.documents import Document

HEX_DIGITS = 15
"""60 bits, which make a positive number in every language."""
LINKS_PER_DOCUMENT = 3
PAGES_PER_SITE = 20
SPLITS_FROM = 1_000
"""A sample of URLs, from which split points are chosen."""
FILLER = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor."


@dataclass(frozen=True)
class Crawl:
    """A number of documents, numbered from 0."""

    documents: int
    seed: int = 0

    @property
    def keys(self) -> int:
        """The size of the range from which the keys of documents are drawn."""
        return max(1, self.documents * 3 // 4)

    @property
    def sites(self) -> int:
        return max(1, self.documents // PAGES_PER_SITE)

    def document(self, number: int, edition: int = 0) -> Document:
        """The document at this URL, with other content in every edition."""
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
        """Where to split a table keyed by URL into this many tablets of about equal size."""
        step = max(1, self.documents // SPLITS_FROM)
        urls = sorted(self.url(number) for number in range(0, self.documents, step))
        return [urls[len(urls) * part // tablets] for part in range(1, tablets)]

    def __iter__(self) -> Iterator[Document]:
        return (self.document(number) for number in range(self.documents))

    def _draw(self, number: str, what: str, below: int) -> int:
        digest = md5(f"{self.seed}:{number}:{what}".encode(), usedforsecurity=False).hexdigest()
        return int(digest[:HEX_DIGITS], 16) % below
