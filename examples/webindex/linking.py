"""Links turned round, and shown with the canonical page of whatever they lead to.

A link is a row of `links`, found by its target. `shown` says among whose inlinks it is: those of
its target's canonical URL, or nobody's, if the target was not crawled. So it has to move when that
changes, and a page may have any number of links to it, and from it. Both are done in steps of at
most `LINKS_MAX` links, and a page that has not finished notifies itself weakly:

- from it: `linked` has the links that are rows, so what is missing or too many is known without
  a look at the rows. A new row is shown only by the next step: see below.
- to it: `moving` says how far they were moved to the present canonical URL. A new one begins anew.

Why no link stays behind when its target's canonical URL changes while it is placed:

- A link that the moving steps do not see was placed after they began, and is shown by a step that
  begins still later, and reads the new canonical URL.
- One that they see is moved, or if it is in place already, locked: a step from the other side that
  read the older canonical URL is repeated.
- A step writes the cell that says how far it is, or locks it. So steps of a page that run at
  the same time come one after the other.
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
    """A step towards the links that it has now. `may_show` only in a later run than they came."""
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
    """Among the inlinks of this page, or of none. Whether that is new."""
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
    """Has a page learn its canonical URL. If that is new, its links are moved later.

    A run must not move links at once: those that are placed meanwhile would be missed.
    """
    known = await tx.get(url, tables.canonical)
    learnt = None
    if page is not None:
        # A group that knows none yet visits the page once it does.
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
    """A step towards the present canonical URL, which was committed before this run began."""
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
