"""Inverts links, and shows each with the canonical page of its target.

A link is a row of `links`, keyed by its target. `shown` names the page among whose inlinks it is
shown: that of its target's canonical URL, or none if the target was not crawled. So the link must
move when the canonical URL changes, and a page may have any number of links to it and from it. Both
are handled in steps of at most `LINKS_MAX` links, and a page that has not finished weakly notifies
itself:

- links from it: `linked` has the links that are rows, so missing and superfluous links are known
  without reading the rows. A new row is shown only by the next step; see below.
- links to it: `moving` says how far they were moved to the current canonical URL. When that
  changes, moving begins again.

Why no link stays behind if its target's canonical URL changes while the link is placed:

- A link that the moving steps do not see was placed after they began. It is shown by a step that
  begins even later, and reads the new canonical URL.
- A link that they see is moved, or locked if it is in place already. So a step from the other side
  that read the older canonical URL is retried.
- A step writes the cell that records its progress, or locks it. So concurrent steps of a page come
  one after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from examples.webindex import tables
from examples.webindex.clustering import Groups
from examples.webindex.documents import Link
from examples.webindex.group import Group
from examples.webindex.parsed import Parsed
from examples.webindex.tables import digest, links, pages
from percolator import Row, aio

LINKS_MAX = 256

LinkRow = tuple[str, str, str]


# ---------------------------------------------------------------------------- links from a page


async def place_links(
    tx: aio.Transaction, url: str, page: Parsed | None, *, may_show: bool
) -> None:
    """A step towards the page's current links. `may_show` only in a later run than found them."""
    stored: dict[str, Any] = await tx.get(url, tables.linked, {"placed": [], "fresh": []})
    placed = {Link(*link) for link in stored["placed"]}
    fresh = {Link(*link) for link in stored["fresh"]}
    if may_show and fresh:
        await _show_fresh(tx, url, fresh, page.cause if page else 0)
        fresh = set()
    wanted = page.links if page else frozenset[Link]()
    gone = sorted(placed - wanted)[:LINKS_MAX]
    new = sorted(wanted - placed)[: max(LINKS_MAX - len(fresh), 0)]
    await _remove(tx, url, gone)
    for link in new:
        row = _row(url, link)
        await tx.set(row, tables.link_anchor, link.anchor)
        await tx.set(row, tables.shown, "")
    placed = (placed - set(gone)) | set(new)
    fresh = (fresh - set(gone)) | set(new)
    now = {
        "placed": [list(one) for one in sorted(placed)],
        "fresh": [list(one) for one in sorted(fresh)],
    }
    if now == stored:
        await tx.lock(url, tables.linked)
    elif placed:
        await tx.set(url, tables.linked, now)
    else:
        await tx.delete(url, tables.linked)
    if fresh or placed != wanted:
        await tx.notify(url, tables.canonical)


def _row(source: str, link: Link) -> LinkRow:
    return link.target, source, digest(link.anchor)


async def _show_fresh(tx: aio.Transaction, url: str, fresh: set[Link], cause: int) -> None:
    targets = sorted({link.target for link in fresh})
    found = await tx.get_many(pages, targets, [tables.canonical])
    canonical = {row.key: row.get(tables.canonical, "") for row in found}
    rows = await tx.get_many(links, [_row(url, link) for link in sorted(fresh)])
    for row in rows:
        await _show(tx, row, canonical[row.key[0]], cause)


async def _remove(tx: aio.Transaction, url: str, gone: Iterable[Link]) -> None:
    for row in await tx.get_many(links, [_row(url, link) for link in gone]):
        await _show(tx, row, "", 0)
        await tx.delete(row.key, tables.link_anchor)
        await tx.delete(row.key, tables.shown)


async def _show(tx: aio.Transaction, row: Row[Any], canonical: str, cause: int) -> bool:
    """Shows a link among the inlinks of this page, or of none. Returns whether that is new."""
    target, source, anchor_digest = row.key
    before = row[tables.shown]
    if before == canonical:
        return False
    if before:
        old = (before, source, anchor_digest, digest(target))
        await tx.delete(old, tables.anchor)
        await tx.delete(old, tables.inlink_cause)
    if canonical:
        new = (canonical, source, anchor_digest, digest(target))
        await tx.set(new, tables.anchor, row[tables.link_anchor])
        await tx.set(new, tables.inlink_cause, cause)
    await tx.set(row.key, tables.shown, canonical)
    return True


# ---------------------------------------------------------------------------- links to a page


async def follow(tx: aio.Transaction, url: str, page: Parsed | None, groups: Groups) -> bool:
    """Lets a page learn its canonical URL. If that is new, links to it are moved by later runs.

    The same run must not move links: it would miss those that are placed meanwhile.
    """
    known = await tx.get(url, tables.canonical)
    learnt = None
    if page is not None:
        # A group that does not know it yet visits the page once it does.
        learnt = (await groups.state(Group(0, page.keys[0]))).canonical or known
    if learnt == known:
        await tx.lock(url, tables.canonical)
        return False
    if learnt is None:
        await tx.delete(url, tables.canonical)
    else:
        await tx.set(url, tables.canonical, learnt)
    await tx.set(url, tables.moving, ["", ""])
    await tx.notify(url, tables.canonical)
    return True


async def move_links(tx: aio.Transaction, url: str, groups: Groups, page: Parsed | None) -> None:
    """A step towards the current canonical URL, which was committed before this run began."""
    moving = await tx.get(url, tables.moving)
    if moving is None:
        return
    scan = tx.scan(links, start=(url, *moving), end=(url + "\0", "", ""), limit=LINKS_MAX + 1)
    rows = [row async for row in scan]
    canonical = await tx.get(url, tables.canonical, "")
    cause = (await groups.state(Group(0, page.keys[0]))).cause if page else 0
    for row in rows[:LINKS_MAX]:
        if not await _show(tx, row, canonical, cause):
            await tx.lock(row.key, tables.shown)
    if len(rows) > LINKS_MAX:
        await tx.set(url, tables.moving, list(rows[LINKS_MAX].key[1:]))
        await tx.notify(url, tables.canonical)
    else:
        await tx.delete(url, tables.moving)
