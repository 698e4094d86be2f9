"""Defines the result of the pipeline, computed from scratch and in memory.

All other implementations must agree with this one.

Clusters: three passes, one for each key. Documents with the same key in a pass have one
representative, the one with the best URL, and only representatives take part in the next pass. A
document's canonical page is the representative of the representative of its representative.

Links: a link to any document of a cluster is a link to its canonical page. A link to a URL that was
not crawled leads nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from examples.webindex.documents import KEYS, Document, Page, is_better, parse


class Inlink(NamedTuple):
    """A link to a page, and the document that contains it."""

    source: str
    anchor: str


class Served(NamedTuple):
    """Cells served of a canonical page."""

    title: str
    documents: int
    """The number of documents in its cluster."""
    inlinks: tuple[Inlink, ...]
    """Sorted, without duplicates."""


def canonical_urls(pages: Mapping[str, Page]) -> dict[str, str]:
    """The canonical URL of every document."""
    canonical = {url: url for url in pages}
    left = set(pages)
    for key in range(KEYS):
        best: dict[str, str] = {}
        for url in left:
            group = pages[url].keys[key]
            if group not in best or is_better(url, best[group]):
                best[group] = url
        canonical = {url: best[pages[present].keys[key]] for url, present in canonical.items()}
        left = set(best.values())
    return canonical


def served(documents: Iterable[Document]) -> dict[str, Served]:
    """Everything that is served, by canonical URL."""
    pages = {document.url: parse(document) for document in documents}
    canonical = canonical_urls(pages)
    sizes: dict[str, int] = {}
    inlinks: dict[str, set[Inlink]] = {}
    for url, page in pages.items():
        sizes[canonical[url]] = sizes.get(canonical[url], 0) + 1
        for target, anchor in page.links:
            if target in canonical:
                inlinks.setdefault(canonical[target], set()).add(Inlink(url, anchor))
    return {
        url: Served(pages[url].title, size, tuple(sorted(inlinks.get(url, ()))))
        for url, size in sizes.items()
    }
