"""A service process from start to exit.

Start: find the cluster (waiting for a master, and saying so), build the service, listen, serve,
register, and only then report SERVING. Every mistake of the surroundings (port in use, directory
not writable, another cluster) is one line and exit code 2.

End, on SIGTERM or SIGINT: NOT_SERVING, the service's own drain, no new calls, answer those in
progress, exit code 0; code 1 when some had to be cut off after `drain_seconds`. A second signal
ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from percolator.errors import InvariantViolation, NotReady, PercolatorError, WrongCluster
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.channels import GrpcNetwork
from percolator.world import MachineClock, World, machine_random
from services.chassis import logs, metrics
from services.chassis.files import Files, RealFiles
from services.chassis.membership import Membership, Registration
from services.chassis.ready_file import ReadyFile
from services.chassis.rpc import Exposed, Gate
from services.chassis.server import CannotListen, Server, listening_metrics
from services.chassis.service_settings import ServiceSettings
from services.chassis.version import version

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)
T = TypeVar("T")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""The settings or the surroundings are wrong: starting again unchanged is useless."""

_DRAINING_RETRY_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
"""For the last answers to leave; streams of health and reflection end with it."""


@dataclass
class Host(Generic[SettingsT]):
    """What the process offers to the service that it was started for."""

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
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a background task has failed: the process is about to drain and exit."""
    _drains: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Runs `drain` at shutdown, while calls are still answered: to hand tablets over."""
        self._drains.append(drain)

    def background(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Runs `work` until it ends, at most as long as the process.

        If it fails, the process drains and exits with code 1: a service whose renewals have
        quietly stopped is worse than none.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
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


def run(settings: SettingsT, kind: cluster.ServiceKind, build: Build[SettingsT]) -> int:
    """Runs the service until a signal ends it. Returns the exit code."""
    logs.configure(settings.service, settings.log_format, settings.log_level)
    try:
        return asyncio.run(_start_and_run(settings, kind, build))
    except _Refused as refused:
        sys.stderr.write(f"{settings.service}: {refused}\n")
        return EXIT_REFUSED


async def _start_and_run(
    settings: SettingsT, kind: cluster.ServiceKind, build: Build[SettingsT]
) -> int:
    return await _Process(settings, kind, build).run()


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class _Stopped(Exception):
    """A signal came while the process was still starting."""


class _Refused(Exception):
    """The surroundings do not allow to start."""


class _Process(Generic[SettingsT]):
    """One run, from start to exit code."""

    def __init__(
        self, settings: SettingsT, kind: cluster.ServiceKind, build: Build[SettingsT]
    ) -> None:
        self._settings = settings
        self._kind = kind
        self._build = build
        self._log = structlog.get_logger(f"percolator.{settings.service}")
        self._stop = asyncio.Event()
        self._gate = Gate(settings.concurrency_max)
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        self._watch_signals(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            try:
                host, server = await self._start(stack)
            except _Stopped:
                return EXIT_OK
            except InvariantViolation:
                raise
            except (CannotListen, OSError, PercolatorError) as error:
                raise _Refused(_one_line(error)) from error
            await self._until_stopped(host)
            deadline = asyncio.get_running_loop().time() + self._settings.drain_seconds
            await self._drain(host, server, deadline)
            try:
                async with asyncio.timeout_at(deadline):
                    await stack.aclose()
            except TimeoutError:
                self._log.error("closing took too long", drain_seconds=self._settings.drain_seconds)
                self._exit_code = EXIT_FAILED
        self._log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    # ------------------------------------------------------------------------- start

    async def _start(self, stack: AsyncExitStack) -> tuple[Host[SettingsT], Server]:
        settings = self._settings
        ready_file = stack.enter_context(ReadyFile(settings.ready_file))
        registry = metrics.process_registry(settings.service)
        metrics_bound = stack.enter_context(listening_metrics(registry, settings))
        network = GrpcNetwork()
        stack.push_async_callback(network.close)
        files = RealFiles()
        stack.callback(files.close)
        world = World(MachineClock(), network, machine_random())
        server = Server(settings, self._gate, registry, world.clock)
        bound = await server.start()
        stack.push_async_callback(server.stop, 0.0)

        membership = Membership(world, settings.masters)
        await self._unless_stopped(membership.find_cluster())
        announced = cluster.Server(
            kind=self._kind,
            server_id=f"{world.random.getrandbits(128):032x}",
            address=str(settings.advertised(bound)),
            metrics_address=str(metrics_bound.dialable()) if metrics_bound else "",
            version=version(),
        )
        host = Host(
            settings=settings,
            world=world,
            files=files,
            server_id=announced.server_id,
            cluster_id=membership.cluster_id,
            announced=announced,
            log=self._log,
            metrics_registry=registry,
        )
        stack.push_async_callback(host.cancel_background)
        host.background("event loop lag", metrics.watch_event_loop(registry))
        exposed = await self._unless_stopped(stack.enter_async_context(self._build(host)))
        await server.expose(exposed)

        if settings.masters:
            registration = Registration(world, membership, self._belonging(server))
            keeping = host.background("registration", registration.keep(announced))
            await self._unless_stopped(registration.accepted(keeping))
        await server.set_serving()
        ready_file.write(announced)
        self._log.info(
            "ready",
            address=announced.address,
            listen=str(bound),
            metrics=announced.metrics_address,
            server_id=host.server_id,
            cluster_id=membership.cluster_id,
            version=version(),
        )
        return host, server

    def _belonging(self, server: Server) -> Callable[[WrongCluster | None], Awaitable[None]]:
        async def belonging(error: WrongCluster | None) -> None:
            self._gate.refuse(error)
            await (server.set_serving() if error is None else server.set_not_serving())

        return belonging

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or `_Stopped` when a signal comes first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _Stopped
            return working.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    # --------------------------------------------------------------------------- end

    async def _until_stopped(self, host: Host[SettingsT]) -> None:
        stopping = asyncio.ensure_future(self._stop.wait())
        failing = asyncio.ensure_future(host.failed.wait())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failing.cancel()
        if host.failed.is_set():
            self._exit_code = EXIT_FAILED

    async def _drain(self, host: Host[SettingsT], server: Server, deadline: float) -> None:
        self._log.info("draining", calls=self._gate.in_flight)
        await server.set_draining()
        try:
            async with asyncio.timeout_at(deadline):
                await host.drain()
                # Not `stop` first: it hangs up on callers, and leaves them not knowing whether
                # their call was executed. This tells them that it was not.
                self._gate.close(
                    NotReady(
                        "the server is shutting down", retry_after_seconds=_DRAINING_RETRY_SECONDS
                    )
                )
                await self._gate.idle.wait()
        except TimeoutError:
            self._log.error("calls were cut off", calls=self._gate.in_flight)
            self._exit_code = EXIT_FAILED
        await server.stop(_FLUSH_SECONDS)

    def _watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stop.is_set():
                # Not an exception: whatever hangs might catch it.
                os._exit(128 + number)
            loop.call_soon_threadsafe(self._stop.set)

        # Not loop.add_signal_handler: the second signal must work when the loop is stuck.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
