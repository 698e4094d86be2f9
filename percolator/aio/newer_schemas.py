"""Fetches schemas that are newer than what this client knows of them.

A transaction that commits needs no help: the tablet refuses it, and the protocol asks for the newer
schema then. This is for programs that only read, which have to know of codecs that were changed,
and for programs that were refused here, before anything was sent, because of a codec that may have
been changed since.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from math import inf

from percolator.errors import ExecutionUnknown, NotExecuted, PercolatorError
from percolator.limits import Limits
from percolator.routing.catalog import Catalog
from percolator.tasks import Tasks
from percolator.world import World

_log = logging.getLogger("percolator.transactions")

_AGAIN_SECONDS = 1.0
"""The pause between attempts to fetch a newer schema."""
_REFUSED_SECONDS = 1.0
"""A program that is refused all the time asks for the codecs of a table so often."""


class NewerSchemas:
    """What one client is told of newer schemas. Belongs to the event loop in which it was made."""

    def __init__(self, catalog: Catalog, world: World, limits: Limits) -> None:
        self._catalog = catalog
        self._clock = world.clock
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._named: dict[int, int] = {}
        """Of tables whose schemas are being fetched: the newest version that was named."""
        self._asked_at: dict[int, float] = {}
        self._tasks = Tasks()
        self._closed = False

    def named(self, table_id: int, version: int) -> None:
        """A tablet has named a version that is newer than what is known."""
        if self._closed:
            return
        fetched = self._named.get(table_id)
        self._named[table_id] = max(fetched or 0, version)
        if fetched is None:
            self._tasks.start(self._fetch(table_id))

    def codec_was_refused(self, table_id: int) -> None:
        """The table's may have been changed since: otherwise a program that runs would be refused
        for ever. Programs of the blocking API call this in their own threads."""
        if threading.get_ident() != self._thread:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.codec_was_refused, table_id)
            return
        now = self._clock.monotonic_seconds()
        if now >= self._asked_at.get(table_id, -inf) + _REFUSED_SECONDS:
            self._asked_at[table_id] = now
            self.named(table_id, 0)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.cancel()

    async def _fetch(self, table_id: int) -> None:
        """Until it has the newest version that was named: the tablets, asked under their own by
        now, will not say again that there is a newer one."""
        try:
            while True:
                deadline = self._clock.monotonic_seconds() + self._limits.call_seconds
                try:
                    schema = await self._catalog.refresh(table_id, deadline)
                except (NotExecuted, ExecutionUnknown) as error:
                    _log.info("the newer schema of table %d was not fetched: %s", table_id, error)
                else:
                    if schema.version >= self._named[table_id]:
                        return
                await self._clock.sleep(_AGAIN_SECONDS)
        except PercolatorError as error:
            _log.info("the newer schema of table %d was not fetched: %s", table_id, error)
        finally:
            del self._named[table_id]
