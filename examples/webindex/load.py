"""Crawls into a running cluster: a synthetic crawl, or text files of documents.

    python -m examples.webindex.load --documents 10000
    python -m examples.webindex.load --documents 10000 --rate 50 --forever
    python -m examples.webindex.load --text crawl.txt

It creates missing tables and registers missing observers, so workers may be started before or
afterwards. Each document is written in its own transaction, many at the same time.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from examples.webindex import tables
from examples.webindex.crawl import Crawl
from examples.webindex.documents import Document, read_text
from examples.webindex.observers import observers
from percolator import InvalidArgument, OutcomeUnknown, PercolatorError, aio

IN_FLIGHT_MAX = 128
PROGRESS_SECONDS = 2.0
UPDATES_PER_DELETION = 9
"""The default proportion with `--forever`."""

Change = tuple[str, str | None]
"""A URL and the new text of its document, or None to delete the document."""


async def write(db: aio.Database, url: str, body: str | None) -> None:
    """Commits a change, with as many attempts as it takes.

    It may be committed twice, which is harmless: observers find that nothing has changed. Asking
    for the outcome instead would be one more call that may not be answered.
    """
    while True:
        try:
            await db.run(_write, url, body)
        except OutcomeUnknown:
            continue
        return


async def _write(tx: aio.Transaction, url: str, body: str | None) -> None:
    if body is None:
        tx.delete(url, tables.body)
    else:
        tx.set(url, tables.body, body)
    tx.set(url, tables.crawled, int(await tx.timestamp()))


def read_files(paths: Iterable[Path]) -> Iterator[Document]:
    """Documents of several files. Raises `ValueError`, naming the file, if one is malformed."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            try:
                yield from read_text(lines)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None


def changes(crawl: Crawl, updates: int, deletions: int, *, forever: bool) -> Iterator[Change]:
    """Changes of random documents. A deleted document comes back when it is updated."""
    chance = random.Random(crawl.seed)  # noqa: S311
    left, edition = [updates, deletions], 0
    while sum(left):
        is_deletion = chance.randrange(sum(left)) >= left[0]
        if not forever:
            left[is_deletion] -= 1
        number, edition = chance.randrange(crawl.documents), edition + 1
        document = crawl.document(number, edition)
        yield document.url, None if is_deletion else document.body


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


class Crawling:
    """Writes changes as they come, at most `rate` per second, and reports progress."""

    def __init__(
        self, db: aio.Database, rate: float | None, *, progress: Callable[[str], None] = _tell
    ) -> None:
        self._db = db
        self._rate = rate
        self._progress = progress
        self.written = 0

    async def write_all(self, source: Iterator[Change]) -> None:
        showing = asyncio.create_task(self._show_progress())
        paced = self._paced(source)
        taking = asyncio.Lock()
        busy = dict[str, asyncio.Event]()

        async def work() -> None:
            while True:
                async with taking:  # an async generator serves one caller at a time
                    change = await anext(paced, None)
                    if change is None:
                        return
                    # Two changes of one document keep their order.
                    while other := busy.get(change[0]):
                        await other.wait()
                    done = busy[change[0]] = asyncio.Event()
                try:
                    await write(self._db, *change)
                except InvalidArgument as error:
                    raise ValueError(f"{change[0][:80]!r}: {error}") from None
                finally:
                    del busy[change[0]]
                    done.set()
                self.written += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT_MAX):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the others have the same cause
        finally:
            showing.cancel()
        self._say(0.0)

    async def _paced(self, source: Iterator[Change]) -> AsyncIterator[Change]:
        began = time.monotonic()
        for number, change in enumerate(source):
            if self._rate:
                await asyncio.sleep(max(began + number / self._rate - time.monotonic(), 0))
            yield change

    async def _show_progress(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            self._say((self.written - before) / PROGRESS_SECONDS)
            before = self.written

    def _say(self, per_second: float) -> None:
        speed = f", {per_second:,.0f}/s" if per_second else ""
        self._progress(f"{self.written:,} changes written{speed}")


async def crawl_into(address: str | None, source: Iterator[Change], rate: float | None) -> int:
    """Returns the number of changes written."""
    async with aio.connect(address, description="a crawl") as db:
        await tables.create_tables_async(db)
        await db.register_observers(observers)
        crawling = Crawling(db, rate)
        await crawling.write_all(source)
        return crawling.written


def main(
    documents: Annotated[
        int, typer.Option(help="Number of synthetic documents.", min=0, show_default=True)
    ] = 1_000,
    text: Annotated[
        list[Path] | None, typer.Option(help="A file of documents instead; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Each seed gives another crawl.")] = 0,
    rate: Annotated[
        float | None, typer.Option(help="Changes per second; by default as many as possible.")
    ] = None,
    updates: Annotated[
        int, typer.Option(help="Afterwards, give this many documents new content.", min=0)
    ] = 0,
    deletions: Annotated[int, typer.Option(help="And delete this many.", min=0)] = 0,
    forever: Annotated[
        bool,
        typer.Option("--forever", help="Keep updating and deleting in that proportion."),
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="host:port of masters or gateways; PERCOLATOR_ADDRESS.")
    ] = None,
) -> None:
    """Crawl documents into a running cluster, and keep changing them."""
    if rate is not None and rate <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--rate")
    if (updates or deletions or forever) and (text or not documents):
        raise typer.BadParameter(
            "only synthetic documents can change", param_hint="--updates, --deletions, --forever"
        )
    if forever and not updates + deletions:
        updates, deletions = UPDATES_PER_DELETION, 1
    crawl = Crawl(documents, seed)
    loaded = read_files(text) if text else iter(crawl)
    source = chain(
        ((one.url, one.body) for one in loaded),
        changes(crawl, updates, deletions, forever=forever),
    )
    try:
        asyncio.run(crawl_into(address, source, rate))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (PercolatorError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
