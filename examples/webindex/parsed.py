"""A stored page: what was found in its document, in which version of it, and what became of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from examples.webindex import tables
from examples.webindex.documents import Link, Page
from percolator import aio


class Parsed(NamedTuple):
    """Links and text found in a document."""

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
        return cls(stored["title"], tuple(stored["keys"]), _links(stored["links"]), stored["cause"])


class Linked(NamedTuple):
    """How far the links from a page have been placed."""

    placed: frozenset[Link]
    fresh: frozenset[Link] = frozenset()
    """Documents yet to be shown."""

    def encode(self) -> dict[str, Any]:
        """The value for the column `linked`."""
        return {"placed": sorted(self.placed), "fresh": sorted(self.fresh)}

    @classmethod
    def decode(cls, stored: dict[str, Any]) -> Linked:
        return cls(_links(stored["placed"]), _links(stored["fresh"]))


class StoredPage(NamedTuple):
    """The row of a page."""

    parsed: Parsed | None = None
    """None if it was not crawled."""
    linked: Linked | None = None
    """None once all links from it are placed and shown."""
    canonical: str | None = None
    moving: list[str] | None = None
    """The next link to the page to be moved."""


async def stored_pages(tx: aio.Transaction, urls: Collection[str]) -> dict[str, StoredPage]:
    """The pages at these URLs, in one round trip."""
    columns = [tables.parsed, tables.linked, tables.canonical, tables.moving]
    found = {}
    for row in await tx.get_many(tables.pages, sorted(urls), columns):
        parsed, linked = row.get(tables.parsed), row.get(tables.linked)
        found[row.key] = StoredPage(
            None if parsed is None else Parsed.decode(parsed),
            None if linked is None else Linked.decode(linked),
            row.get(tables.canonical),
            row.get(tables.moving),
        )
    return found


def _links(stored: list[list[str]]) -> frozenset[Link]:
    return frozenset(Link(*link) for link in stored)
