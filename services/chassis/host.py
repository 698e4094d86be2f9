"""The environment that a process offers to the service that it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from percolator.services.chassis.files import Files
from percolator.services.chassis.rpc import Exposed, Forwarder, Quotas
from percolator.services.chassis.settings import ServiceSettings
from percolator.services.chassis.store_watch import StoreWatch
from percolator.tasks import Tasks
from percolator.v1 import cluster_pb2 as cluster
from percolator.world import World

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class Watch(Protocol):
    """Checks all the time whether a store still answers."""

    trouble: str
    """Why nothing can be written now; empty while it can."""

    async def run(self) -> None:
        """Returns when the store is gone."""


class MakeWatch(Protocol):
    """Makes a watch that reports here."""

    def __call__(
        self, *, stalled: Callable[[bool], None], gone: Callable[[str], None]
    ) -> Watch: ...


@dataclass
class Host(Generic[SettingsT]):
    """The environment of one service, where it also registers what concerns the process."""

    settings: SettingsT
    world: World
    files: Files
    server_id: str
    """Random, new with every start of the process."""
    cluster_id: str
    """The cluster's id, from a master; empty if the settings name no masters."""
    announced: cluster.Server
    """How this process is announced to its cluster."""
    log: structlog.stdlib.BoundLogger
    metrics_registry: CollectorRegistry
    quotas: Quotas = field(default_factory=Quotas)
    """Where a service registers what it limits for each client."""
    forwarder: Forwarder | None = None
    """Set by a service that forwards calls to others."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a background task has failed: the process is about to drain and exit."""
    gone: str = ""
    """Why the store is gone: the process is about to exit, and an orderly end is not possible."""
    stalled: bool = False
    """True if the store hangs: then nothing is served that needs it."""
    health_changed: Callable[[], None] = lambda: None
    """Called when `stalled` has changed."""
    _store_watch: Watch | None = None
    _drains: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tasks = Tasks(self._task_failed)

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Runs `drain` at shutdown, while calls are still answered, for example to hand over
        tablets."""
        self._drains.append(drain)

    def background(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Runs `work` until it ends, or until the process does.

        If it fails, the process drains and exits with code 1: a service whose renewals have
        silently stopped is worse than none.
        """
        return self._tasks.start(work, name=name)

    def _task_failed(self, task: asyncio.Task[Any], error: BaseException) -> None:
        self.log.error("a background task failed", task=task.get_name(), exc_info=error)
        self.failed.set()

    def watch_store(self, root: Path) -> None:
        """Reports that this process does not serve while the store hangs, and ends the process when
        the store is gone."""
        self.watch(partial(StoreWatch, self.files, root, self.world.clock, self.log))

    def watch(self, made: MakeWatch) -> None:
        """Does so with a watch of a store of any kind."""
        watch = self._store_watch = made(stalled=self._store_stalled, gone=self._store_gone)
        self.background("watch the store", watch.run())

    def store_trouble(self) -> str:
        """Why nothing can be written to the store now; empty while it can."""
        return "" if self._store_watch is None else self._store_watch.trouble

    def _store_stalled(self, stalled: bool) -> None:
        self.stalled = stalled
        self.health_changed()

    def _store_gone(self, reason: str) -> None:
        self.log.error("the store is gone", reason=reason)
        self.gone = reason
        self.failed.set()

    async def drain(self) -> None:
        """Runs the functions that were passed to `on_drain`, in that order."""
        for drain in self._drains:
            await drain()

    async def cancel_background(self) -> None:
        """Cancels the background tasks, and waits until they have ended."""
        await self._tasks.cancel()


AnyHost = Host[Any]

Build = Callable[[Host[SettingsT]], AbstractAsyncContextManager[list[Exposed]]]
"""Builds the service; leaving the context closes it, after the last call has been answered."""
