"""A page as it is stored: what was found in its document, and which version of that it was."""

from __future__ import annotations

from typing import Any, NamedTuple

from examples.webindex import tables
from examples.webindex.documents import Link, Page
from percolator import aio


class Parsed(NamedTuple):
    """What is kept of a page."""

    title: str
    keys: tuple[str, ...]
    links: frozenset[Link]
    cause: int

    @classmethod
    def of(cls, page: Page, cause: int) -> Parsed:
        """No document has so long a URL that it would be refused: such links lead nowhere."""
        useful = (link for link in page.links if len(link.target.encode()) <= tables.URL_BYTES_MAX)
        return cls(page.title, page.keys, frozenset(useful), cause)

    def encode(self) -> dict[str, Any]:
        """As the column `parsed` has it."""
        return {
            "title": self.title,
            "keys": self.keys,
            "links": sorted(self.links),
            "cause": self.cause,
        }

    @classmethod
    def decode(cls, stored: dict[str, Any]) -> Parsed:
        links = frozenset(Link(*link) for link in stored["links"])
        return cls(stored["title"], tuple(stored["keys"]), links, stored["cause"])


async def parsed_page(tx: aio.Transaction, url: str) -> Parsed | None:
    """None if it is not crawled."""
    stored = await tx.get(url, tables.parsed)
    return None if stored is None else Parsed.decode(stored)
