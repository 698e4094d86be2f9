"""What the process offers to the service that it was started for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from percolator.v1 import cluster_pb2 as cluster
from percolator.world import World
from services.chassis.files import Files
from services.chassis.rpc import Exposed, Relay
from services.chassis.service_settings import ServiceSettings

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


@dataclass
class Host(Generic[SettingsT]):
    """The surroundings of one service, and where it registers what concerns the process."""

    settings: SettingsT
    world: World
    files: Files
    server_id: str
    """Random, new with every start of the process."""
    cluster_id: str
    """As a master told it; empty when the settings name no masters."""
    announced: cluster.Server
    """How this process is announced to its cluster."""
    log: structlog.stdlib.BoundLogger
    metrics_registry: CollectorRegistry
    relay: Relay | None = None
    """Set by a service that passes calls on to others."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a background task has failed: the process is about to drain and exit."""
    _drains: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Runs `drain` at shutdown, while calls are still answered: to hand tablets over."""
        self._drains.append(drain)

    def background(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Runs `work` until it ends, at most as long as the process.

        If it fails, the process drains and exits with code 1: a service whose renewals have
        quietly stopped is worse than none.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.log.error("a background task failed", task=task.get_name(), exc_info=error)
            self.failed.set()

    async def drain(self) -> None:
        """Runs what `on_drain` was given, in that order."""
        for drain in self._drains:
            await drain()

    async def cancel_background(self) -> None:
        """Ends the background tasks, and waits for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Build = Callable[[Host[SettingsT]], AbstractAsyncContextManager[list[Exposed]]]
"""Builds the service; leaving the context closes it, after the last call was answered."""
