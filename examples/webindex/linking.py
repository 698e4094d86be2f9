"""Inverts links, and shows each with the canonical page of its target.

A link is a row of `links`, keyed by its target. It names the page among whose inlinks it is shown:
that of its target's canonical URL, or none if the target was not crawled. So the link must move
when the canonical URL changes, and a page may have any number of links to it and from it.

Few links are placed, or moved, in the transaction that finds them:

- links from a page are shown with the canonical URL of their target, which is read-locked.
- links to a page are moved by the transaction that writes its canonical URL.

Why no link stays behind: the read lock and the canonical URL's writer exclude each other. So either
the writer sees the link, or the link is shown with the new URL.

Many are handled in steps of at most `LINKS_MAX`, and a page that has not finished weakly notifies
itself:

- links from a page: `linked` has the links that are rows, so missing and superfluous links are
  known without reading the rows.
- links to a page: `moving` says how far they were moved to the current canonical URL. When that
  changes, moving begins again. The same transaction must not move any: it would miss those that are
  placed meanwhile.

Those who link to a popular page would keep its canonical URL from being written, since some of them
always have a read lock. So before it is written, `moving` announces it, with a read lock of the
same cell. While it is there, links are placed without being shown, and shown by a later step of
their source, both without a read lock. Why no link stays behind there, either:

- A link that the moving steps do not see was placed after they began. It is shown by a step that
  begins even later, and reads the new canonical URL.
- A link that they see is moved, or locked if it is in place already. So a step from the other side
  that read the older canonical URL is retried.
- A transaction that writes the canonical URL and moves the links at once has seen no `moving`, and
  conflicts with an announcement. So a link that is shown without a read lock was placed before it
  began, and it writes or locks that link.
- A step writes the cell that records its progress. So concurrent steps of a page come one after
  another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from examples.webindex import tables
from examples.webindex.clustering import Groups
from examples.webindex.documents import Link
from examples.webindex.group import Group
from examples.webindex.parsed import Linked, Parsed, StoredPage
from examples.webindex.tables import digest, links, pages
from percolator import Row, aio

LINKS_MAX = 256
AT_ONCE_MAX = 16
"""Links to a page that are moved in the transaction that writes its canonical URL."""

LinkRow = tuple[str, str, str]
_FROM_THE_FIRST = ["", ""]


class _Placed(NamedTuple):
    """A stored link."""

    anchor: str
    shown: str = ""
    cause: int = 0


# ---------------------------------------------------------------------------- links from a page


async def place_links(
    tx: aio.Transaction, url: str, stored: StoredPage, page: Parsed | None
) -> None:
    """A step from what is stored of the page towards its current links.

    Call it when this transaction has written everything else: it reads canonical URLs.
    """
    wanted = page.links if page else frozenset[Link]()
    before = stored.linked or Linked(stored.parsed.links if stored.parsed else frozenset())
    gone = sorted(before.placed - wanted)[:LINKS_MAX]
    fresh = before.fresh.difference(gone)
    new = sorted(wanted - before.placed)[: max(LINKS_MAX - len(fresh), 0)]
    if gone or fresh:
        found = await tx.get_many(links, [_row(url, link) for link in [*gone, *sorted(fresh)]])
        await _remove(tx, found[: len(gone)])
        await _show_fresh(tx, found[len(gone) :], page.cause if page else 0)
    hidden = await _place(tx, url, new, page.cause if page else 0)
    now = Linked(before.placed.difference(gone).union(new), frozenset(hidden))
    if hidden or now.placed != wanted:
        tx.set(url, tables.linked, now.encode())
        tx.notify(url, tables.canonical)
    elif stored.linked is not None:
        tx.delete(url, tables.linked)


def _row(source: str, link: Link) -> LinkRow:
    return link.target, source, digest(link.anchor)


async def _place(tx: aio.Transaction, url: str, new: Sequence[Link], cause: int) -> list[Link]:
    """Returns the links that are not shown yet."""
    hidden = []
    for link, target in zip(new, await _targets(tx, [link.target for link in new]), strict=True):
        row, placed = _row(url, link), _Placed(link.anchor, cause=cause)
        if target.get(tables.moving) is None:
            tx.lock(link.target, tables.canonical, shared=True)
            canonical = target.get(tables.canonical, "")
            await _show(tx, row, placed, canonical, cause)
            if canonical:
                continue
        else:
            hidden.append(link)
        tx.set(row, tables.placed, placed)
    return hidden


async def _targets(tx: aio.Transaction, urls: Sequence[str]) -> list[Row[str]]:
    if not urls:
        return []
    found = await tx.get_many(pages, sorted(set(urls)), [tables.canonical, tables.moving])
    by_url = {row.key: row for row in found}
    return [by_url[url] for url in urls]


async def _show_fresh(tx: aio.Transaction, fresh: Sequence[Row[LinkRow]], cause: int) -> None:
    targets = await _targets(tx, [row.key[0] for row in fresh])
    for row, target in zip(fresh, targets, strict=True):
        if target.get(tables.moving) is None:
            tx.lock(target.key, tables.canonical, shared=True)
        placed = _Placed(*row[tables.placed])
        await _show(tx, row.key, placed, target.get(tables.canonical, ""), cause)


async def _remove(tx: aio.Transaction, gone: Iterable[Row[LinkRow]]) -> None:
    for row in gone:
        await _show(tx, row.key, _Placed(*row[tables.placed]), "", 0)
        tx.delete(row.key, tables.placed)


async def _show(
    tx: aio.Transaction, row: LinkRow, placed: _Placed, canonical: str, cause: int
) -> bool:
    """Shows a link among the inlinks of this page, or of none. Returns whether that is new."""
    target, source, anchor_digest = row
    if placed.shown == canonical:
        return False
    if placed.shown:
        old = (placed.shown, source, anchor_digest, digest(target))
        tx.delete(old, tables.anchor)
    if canonical:
        new = (canonical, source, anchor_digest, digest(target))
        tx.set(new, tables.anchor, placed.anchor)
    tx.set(row, tables.placed, _Placed(placed.anchor, canonical, cause))
    return True


# ---------------------------------------------------------------------------- links to a page


async def follow(tx: aio.Transaction, url: str, stored: StoredPage, groups: Groups) -> bool:
    """Lets a page learn its canonical URL. Returns whether that is new.

    Few links to it are moved at once, and many by later runs.
    """
    known, page = stored.canonical, stored.parsed
    learnt = None
    if page is not None:
        # A group that does not know it yet visits the page once it does.
        learnt = (await groups.state(Group(0, page.keys[0]))).canonical or known
    if learnt == known:
        tx.lock(url, tables.canonical)
        return False
    found = await _links_to(tx, url, _FROM_THE_FIRST, AT_ONCE_MAX)
    at_once = len(found) <= AT_ONCE_MAX and stored.moving is None
    if not at_once:
        tx.set(url, tables.moving, _FROM_THE_FIRST)
        tx.notify(url, tables.canonical)
        if stored.moving is None:  # announced by this, and written by the next run
            tx.lock(url, tables.canonical, shared=True)
            return True
    if learnt is None:
        tx.delete(url, tables.canonical)
    else:
        tx.set(url, tables.canonical, learnt)
    if at_once:
        await _move(tx, found, learnt or "", await _cause(groups, page))
    return True


async def move_links(tx: aio.Transaction, url: str, stored: StoredPage, groups: Groups) -> None:
    """A step towards the current canonical URL, which was committed before this run began."""
    if stored.moving is None:
        return
    found = await _links_to(tx, url, stored.moving, LINKS_MAX)
    cause = await _cause(groups, stored.parsed)
    await _move(tx, found[:LINKS_MAX], stored.canonical or "", cause)
    if len(found) > LINKS_MAX:
        tx.set(url, tables.moving, list(found[LINKS_MAX].key[1:]))
        tx.notify(url, tables.canonical)
    else:
        tx.delete(url, tables.moving)


async def _links_to(
    tx: aio.Transaction, url: str, start: Sequence[str], count: int
) -> list[Row[LinkRow]]:
    """Links to a page from there on: that many, and one more if there is one."""
    scan = tx.scan(links, start=(url, *start), end=(url + "\0", "", ""), limit=count + 1)
    return [row async for row in scan]


async def _cause(groups: Groups, page: Parsed | None) -> int:
    return (await groups.state(Group(0, page.keys[0]))).cause if page else 0


async def _move(
    tx: aio.Transaction, found: Iterable[Row[LinkRow]], canonical: str, cause: int
) -> None:
    for row in found:
        if not await _show(tx, row.key, _Placed(*row[tables.placed]), canonical, cause):
            tx.lock(row.key, tables.placed)
