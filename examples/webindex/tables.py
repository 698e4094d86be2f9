"""The tables of the pipeline, for programs and for Spark.

    documents   by URL: what was crawled; the only table written from outside
    pages       by URL: what was found in a document, and its canonical URL
    groups      by pass and key: which documents are one page (`clustering.py`)
    links       by target, source and anchor: all links, inverted
    serving     by canonical URL: title and number of documents
    inlinks     by canonical URL, source, anchor and target: links to a page, whichever of its
                documents they name

The last two are the result of the pipeline; `served.py` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import md5
from typing import Any

from percolator import Database, Table, aio, codecs

URL_BYTES_MAX = 1_000
"""A row key of `links` contains two URLs, and must not exceed the limit for row keys."""

documents = Table("documents")
body = documents.column("body", codecs.text)
crawled = documents.column("crawled", codecs.integer)
"""A timestamp taken before this version was committed. It is optional; but a program that writes it
must do so at every change and deletion, or an old timestamp stays. It is passed on as `cause` to
everything that the version changes."""

pages = Table("pages")
parsed = pages.column("parsed", codecs.json)
"""{"title", "keys", "links", "cause"}; see `parsed.Parsed`."""
linked = pages.column("linked", codecs.json)
"""{"placed", "fresh"}: the page's links that are in `links`, and those yet to be shown. Absent once
those of `parsed` are all there, and shown."""
canonical = pages.column("canonical", codecs.text)
moving = pages.column("moving", codecs.json)
"""How far the links to the page were moved to its canonical URL, if they are too many for one
transaction; absent once all were."""

groups = Table(
    "groups",
    key=codecs.tuple_of(
        codecs.ordered_integer,  # the pass
        codecs.text,  # the key
        codecs.ordered_integer,  # GROUP, MEMBER or MESSAGE
        codecs.ordered_integer,  # the length of the URL, so that the best one comes first
        codecs.text,  # the URL
        codecs.text,  # the key in the previous pass
    ),
)
GROUP, MEMBER, MESSAGE = range(3)
state = groups.column("state", codecs.json)
member = groups.column("member", codecs.json)
message = groups.column("message", codecs.json)

links = Table("links", key=codecs.tuple_of(codecs.text, codecs.text, codecs.text))
"""Keyed by target, source and digest of the anchor."""
placed = links.column("placed", codecs.json)
"""[anchor, shown, cause]. `shown` is the canonical URL of the page among whose inlinks it is shown;
empty if it leads nowhere. `cause` is like that of `serving`: of the source when it was linked or,
once the link was moved, of the version that changed the target's canonical page."""

serving = Table("serving")
title = serving.column("title", codecs.text)
size = serving.column("documents", codecs.integer)
cause = serving.column("cause", codecs.integer)
"""`crawled` of the latest document version that contributed to the row or, if that was not written,
when the version was parsed. The row's own commit timestamp minus this is the latency."""

inlinks = Table("inlinks", key=codecs.tuple_of(*[codecs.text] * 4))
"""Keyed by canonical URL, source, digest of the anchor and digest of the target."""
anchor = inlinks.column("anchor", codecs.text)

ALL: tuple[Table[Any], ...] = (documents, pages, groups, links, serving, inlinks)

DIGEST_DIGITS = 16


def digest(text: str) -> str:
    """Represents text of any length in row keys."""
    return md5(text.encode(), usedforsecurity=False).hexdigest()[:DIGEST_DIGITS]


def create_tables(db: Database, url_splits: Sequence[str] = ()) -> None:
    """Creates the missing tables. Tables keyed by URL are split at `url_splits`."""
    for table in ALL:
        db.create_table(table, _splits(table, url_splits), exist_ok=True)


async def create_tables_async(db: aio.Database, url_splits: Sequence[str] = ()) -> None:
    """Like `create_tables`, for asyncio."""
    for table in ALL:
        await db.create_table(table, _splits(table, url_splits), exist_ok=True)


def _splits(table: Table[Any], urls: Sequence[str]) -> list[Any]:
    if table == groups:
        return []
    parts = {links: 3, inlinks: 4}.get(table, 1)
    return [url if parts == 1 else (url, *[""] * (parts - 1)) for url in urls]


def _catalog(keys: Sequence[str], **columns: str) -> str:
    parts = [{"name": name, "type": "text"} for name in keys]
    types = {name: {"type": kind} for name, kind in columns.items()}
    return json.dumps({"key": parts if len(parts) > 1 else parts[0], "columns": types})


DOCUMENTS_CATALOG = _catalog(["url"], body="text")
SERVING_CATALOG = _catalog(["url"], title="text", documents="integer")
INLINKS_CATALOG = _catalog(["canonical", "source", "anchor_digest", "target_digest"], anchor="text")
