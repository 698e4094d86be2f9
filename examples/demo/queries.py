"""Example queries of the result, with the library and with the command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from examples.demo.screen import Screen
from examples.webindex import tables
from examples.webindex.definition import Served
from percolator import Row, aio

ANCHORS_SHOWN = 5
DUPLICATES_SHOWN = 6
COMMAND_SECONDS = 60


async def show_queries(db: aio.Database, pages: Mapping[str, Served], screen: Screen) -> str:
    """Shows the pages with the most inlinks and with the most documents; returns the first URL."""
    top = max(sorted(pages), key=lambda url: len(pages[url].inlinks))
    screen.show(await _links_to(db, top))
    largest = max(sorted(pages), key=lambda url: pages[url].documents)
    screen.show(await _duplicates(db, largest))
    return top


async def _links_to(db: aio.Database, url: str) -> Group:
    """Two reads at one snapshot: the page, and the range of rows with its inlinks."""
    async with db.snapshot() as snapshot:
        (page,) = await snapshot.get_many(tables.serving, [url])
        inlinks = snapshot.scan(tables.inlinks, prefix=(url,))
        anchors = [(row.key[1], row[tables.anchor]) async for row in inlinks]
    about = f"\n{page[tables.title]!r}, {len(anchors)} inlinks: the most of all pages\n{url}"
    shown = Table("linked by", "anchor", box=None)
    for source, anchor in anchors[:ANCHORS_SHOWN]:
        shown.add_row(Text(source), Text(anchor))
    return _titled(about, shown, len(anchors) - ANCHORS_SHOWN)


async def _duplicates(db: aio.Database, url: str) -> Group:
    """The documents with this canonical URL; each document stores its own."""
    async with db.snapshot() as snapshot:
        known = snapshot.scan(tables.pages, columns=[tables.canonical, tables.parsed])
        found = [(row.key, row[tables.parsed]) async for row in known if _leads_to(row, url)]
    about = f"\n{len(found)} documents that are one page: the most duplicates\n{url}"
    shown = Table("document", "title", box=None)
    for document, page in sorted(found, key=lambda one: (len(one[0]), one[0]))[:DUPLICATES_SHOWN]:
        shown.add_row(Text(document), Text(page["title"]))
    return _titled(about, shown, len(found) - DUPLICATES_SHOWN)


def _leads_to(row: Row[str], url: str) -> bool:
    return tables.parsed in row and row.get(tables.canonical) == url


def _titled(about: str, shown: Table, rest: int) -> Group:
    if rest > 0:
        shown.add_row(Text(f"... and {rest} more", style="dim"))
    return Group(Text(about), shown)


def show_commands(address: str, top: str, screen: Screen) -> None:
    """Shows commands on the same cluster in a shell. Raises an error if a command fails."""
    commands: Sequence[Sequence[str]] = (
        ("get", "serving", top, "title"),
        ("observers", "list"),
        ("status",),
    )
    for arguments in commands:
        screen.show(Text(f"\n$ percolator {shlex.join(arguments)}", style="bold"))
        done = subprocess.run(  # noqa: S603 - our own module, and no shell
            [sys.executable, "-m", "percolator.cli", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=COMMAND_SECONDS,
            env={**os.environ, "PERCOLATOR_ADDRESS": address},
        )
        screen.show(Text(done.stdout.rstrip()))
