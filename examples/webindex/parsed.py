"""A stored page: what was found in its document, and in which version of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from examples.webindex import tables
from examples.webindex.documents import Link, Page
from percolator import aio


class Parsed(NamedTuple):
    """What is stored of a page."""

    title: str
    keys: tuple[str, ...]
    links: frozenset[Link]
    cause: int

    @classmethod
    def of(cls, page: Page, cause: int) -> Parsed:
        """Leaves out links to URLs that are too long: no document has such a URL."""
        useful = (link for link in page.links if len(link.target.encode()) <= tables.URL_BYTES_MAX)
        return cls(page.title, page.keys, frozenset(useful), cause)

    def encode(self) -> dict[str, Any]:
        """The value for the column `parsed`."""
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
    """The page at this URL; None if it was not crawled."""
    stored = await tx.get(url, tables.parsed)
    return None if stored is None else Parsed.decode(stored)
