"""Crawled documents: a URL, and a text with links.

    First paragraph: the title

    Further paragraphs, with links such as [the anchor](http://example.org/page) in them.

Three keys identify duplicates: two documents with the same title, the same opening (the second
paragraph) or the same ending (the last of at least three) are one page at two URLs. A document
without such a paragraph has a unique key instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import md5
from typing import NamedTuple

PARAGRAPH_BREAK = r"\n{2,}"
EDGE_SPACE = r"^[ \n]+|[ \n]+$"
LINK = r"\[([^\[\]\n]*)\]\(([^() \t\r\n]+)\)"
"""Means the same in Java, so that Spark finds the same links."""
KEYS = 3
KEY_DIGITS = 16
HEADING = "= "
"""In a file of many documents, begins the line with a document's URL."""


class Document(NamedTuple):
    """A document as fetched."""

    url: str
    body: str


class Link(NamedTuple):
    """A link to another document."""

    target: str
    anchor: str


class Page(NamedTuple):
    """Links and text found in a document."""

    title: str
    keys: tuple[str, ...]
    links: tuple[Link, ...]


def parse(document: Document) -> Page:
    """Parses a document. Never fails: any text is a document."""
    stripped = (re.sub(EDGE_SPACE, "", part) for part in re.split(PARAGRAPH_BREAK, document.body))
    paragraphs = [part for part in stripped if part]
    title = paragraphs[0] if paragraphs else ""
    parts = [
        title or None,
        paragraphs[1] if len(paragraphs) > 1 else None,
        paragraphs[-1] if len(paragraphs) > 2 else None,
    ]
    links = tuple(Link(target, anchor) for anchor, target in re.findall(LINK, document.body))
    return Page(title, tuple(_key(document.url, part) for part in parts), links)


def _key(url: str, part: str | None) -> str:
    """The key of a paragraph, or of a document without that paragraph."""
    text = f"url {url}" if part is None else f"text {part}"
    return md5(text.encode(), usedforsecurity=False).hexdigest()[:KEY_DIGITS]


def is_better(url: str, than: str) -> bool:
    """This URL is preferred: the shorter one, or of equal length the smaller one."""
    return (len(url), url) < (len(than), than)


def read_text(lines: Iterable[str]) -> Iterator[Document]:
    """Documents of a text file. Each begins with a line "= URL", and ends before its last newlines.

    Raises `ValueError` for text before the first such line, or for such a line without a URL.
    """
    url, body = "", list[str]()
    for number, line in enumerate(lines, 1):
        if line.startswith(HEADING):
            if url:
                yield Document(url, "".join(body).rstrip("\n"))
            url, body = line[len(HEADING) :].strip(), []
            if not url:
                raise ValueError(f"line {number}: there is no URL after {HEADING!r}")
        elif url:
            body.append(line)
        elif line.strip():
            raise ValueError(f"line {number}: a document begins with {HEADING!r} and its URL")
    if url:
        yield Document(url, "".join(body).rstrip("\n"))
