"""A service process from start to exit.

Start: listen, find the cluster (waiting for a master, and saying so), build the service, answer
calls, register, and only then report SERVING. Every problem of the environment (port in use,
directory not writable, another cluster) is one line and exit code 2; a problem that may pass by
itself (disk full, something not ready) is one line and exit code 1.

End, on SIGTERM, SIGINT or SIGHUP (unless it is ignored, as under nohup): report NOT_SERVING, run
the service's own drain, refuse new calls, answer those in progress, exit code 0; code 1 if some
had to be cut off after `drain_seconds`. A process whose store is gone does none of that: it tells
its callers so, and exits with code 1. A second signal ends the process at once, with code 128 +
signal. A second SIGHUP does not: a terminal that is closed sends one, and its shell another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Generic, NoReturn

import structlog
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    PercolatorError,
    WrongCluster,
)
from percolator.event_loop import new_event_loop
from percolator.services.chassis import descriptors, logs, standard_streams
from percolator.services.chassis.garbage_collector import collect_seldom, skip_imports
from percolator.services.chassis.host import Build, Host, SettingsT
from percolator.services.chassis.membership import Membership, Registration
from percolator.services.chassis.ready_file import ReadyFile
from percolator.services.chassis.refusal import may_pass, one_line
from percolator.services.chassis.serving import metrics
from percolator.services.chassis.serving.gate import Gate
from percolator.services.chassis.serving.quotas import Quotas
from percolator.services.chassis.serving.server import CannotListen, Server, listening_metrics
from percolator.services.chassis.serving.server_tls import ServerTls
from percolator.services.chassis.serving.tokens import Tokens
from percolator.services.chassis.settings.environment import unknown_variables
from percolator.services.chassis.settings.service_settings import StoreSettings
from percolator.services.chassis.store.cluster_identity import STORE_FORMAT
from percolator.services.chassis.store.private_root import close_root, limit_new_files
from percolator.services.chassis.store.real_files import RealFiles
from percolator.services.chassis.version import version
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.addresses import HostPort
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import PLAIN_TEXT
from percolator.wire.through import shutting_down
from percolator.world import MachineClock, World, machine_random

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""The settings or the environment are wrong: starting again unchanged is useless."""

_STANDARD_INPUT = 0
_DRAINING_RETRY_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
"""Time for the last responses to leave; streams of health and reflection end with it."""
_CLOSE_SECONDS_MIN = 5.0
"""Time to close what was built, even if calls have used up `drain_seconds`."""
_LEAVE_SECONDS = 2.0
"""Time for the interpreter to end after that."""


def run(settings: SettingsT, kind: cluster.ServiceKind, build: Build[SettingsT]) -> int:
    """Runs the service until a signal ends it. Returns the exit code."""
    skip_imports()
    standard_streams.occupy()
    descriptors.raise_limit()
    logs.configure(settings.service, settings.log_format, settings.log_level)
    process = _Process(settings, kind, build)
    for name, nearest in unknown_variables(type(settings), os.environ):
        process.log.warning(
            "environment variable is no setting", name=name, nearest=nearest or "none"
        )
    exit_code = EXIT_FAILED
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            exit_code = runner.run(process.run())
        except Exception:  # the process ends here: nothing else could handle it
            process.log.exception("failed")
        except (SystemExit, KeyboardInterrupt):
            # `sys.exit` in a task, such as one that an observer has started, stops the event loop
            # under everything else. Its code would say that all is well, or the settings wrong.
            # Neither is a signal: those have handlers of their own.
            process.log.exception("failed")
            process.exit_at_once(EXIT_FAILED)
        process.end_in_time(exit_code)
    return exit_code


class _Process(Generic[SettingsT]):
    """One run, from start to exit code."""

    def __init__(
        self, settings: SettingsT, kind: cluster.ServiceKind, build: Build[SettingsT]
    ) -> None:
        self.log: structlog.stdlib.BoundLogger = structlog.get_logger(
            f"percolator.{settings.service}"
        )
        self._settings = settings
        self._kind = kind
        self._build = build
        self._ready_file = ReadyFile(settings.ready_file)
        self._quotas = Quotas(settings.client_quota_percent, settings.clients_quota_percent)
        self._gate = Gate(
            settings.concurrency_max,
            settings.request_bytes_max,
            settings.request_bytes_total_max,
            settings.request_seconds_max,
            settings.streams_max,
            self._quotas,
        )
        self._stop = asyncio.Event()
        self._starting: asyncio.Timeout | None = None
        self._draining = False
        self._belongs = True
        self._exit_code = EXIT_OK
        self._registration: Registration | None = None

    async def run(self) -> int:
        self._watch_signals()
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            started = await self._start_unless_stopped(stack)
            if started is not None:
                host, server = started
                await self._until_stopped(host)
                if host.gone:
                    await self._end_without_store(host, server)
                deadline = loop.time() + self._settings.drain_seconds
                await self._drain(host, server, deadline)
                await self._close(stack, max(deadline, loop.time() + _CLOSE_SECONDS_MIN))
                self.log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    # ------------------------------------------------------------------------- start

    async def _start_unless_stopped(
        self, stack: AsyncExitStack
    ) -> tuple[Host[SettingsT], Server] | None:
        """None if the environment does not allow it, or if a signal came first.

        A process that is still waiting for a master ends at once.
        """
        starting = asyncio.timeout(None)
        try:
            # In this very task: a context that `build` enters has to be left in the same task.
            async with starting:
                self._starting = starting
                return await self._start(stack)
        except InvariantViolation:
            raise
        except (CannotListen, OSError, PercolatorError) as error:
            if starting.expired():
                return None
            sys.stderr.write(f"{self._settings.service}: {one_line(error, self._settings)}\n")
            self._exit_code = EXIT_FAILED if may_pass(error) else EXIT_REFUSED
            # Not raised: contexts that `build` has entered would take it for a bug of theirs.
            return None
        finally:
            self._starting = None

    async def _start(self, stack: AsyncExitStack) -> tuple[Host[SettingsT], Server]:
        settings = self._settings
        if settings.stop_with_stdin:
            self._stop_with_stdin(asyncio.get_running_loop())
        self._ready_file.remove()
        stack.callback(self._retract_ready_file)
        registry = metrics.process_registry(settings.service)
        tls = ServerTls(settings.tls) if settings.tls is not None else None
        if tls is not None:
            metrics.tell_expiry(registry, tls.expires_seconds)
        tokens = Tokens(Path(settings.tokens)) if settings.tokens else None
        credentials = tls.as_caller() if tls is not None else PLAIN_TEXT
        network = GrpcNetwork(credentials, is_within=True)
        stack.push_async_callback(network.close)
        world = World(MachineClock(), network, machine_random())
        registry.register(self._quotas)
        server = Server(settings, self._gate, registry, world.clock, tls, tokens, self._quotas)
        bound = await server.start()
        stack.push_async_callback(server.stop, 0.0)
        metrics_bound = stack.enter_context(listening_metrics(registry, settings, tls))

        membership = Membership(world, settings.masters)
        await membership.find_cluster()
        announced = self._announced(world, bound, metrics_bound)
        files = RealFiles()
        stack.callback(files.close)
        host = self._host(files, world, membership.cluster_id, announced, registry)
        stack.push_async_callback(host.cancel_background)
        root = settings.directory if isinstance(settings, StoreSettings) else None
        if root is not None:
            await files.waiting(limit_new_files, root)
        if tokens is not None:
            host.background("follow the tokens", tokens.follow(world.clock))
        exposed = await stack.enter_async_context(self._build(host))
        if root is not None:
            await files.waiting(close_root, root, self.log)
        collect_seldom()
        server.expose(exposed, host.server_id, host.forwarder)
        if settings.masters:
            registration = Registration(world, membership, announced, self._belonging(host, server))
            await registration.until_accepted()
            host.background("registration", registration.keep())
            self._registration = registration
        host.health_changed = partial(self._tell_health, host, server)
        host.health_changed()
        self._ready_file.write(announced, bound, server.frames_address)
        self.log.info(
            "ready",
            address=announced.address,
            listen=str(bound),
            frames=str(server.frames_address or ""),
            metrics=announced.metrics_address,
            server_id=host.server_id,
            cluster_id=host.cluster_id,
            version=announced.version,
        )
        return host, server

    def _announced(
        self, world: World, bound: HostPort, metrics_bound: HostPort | None
    ) -> cluster.Server:
        return cluster.Server(
            kind=self._kind,
            server_id=f"{world.random.getrandbits(128):032x}",
            address=str(self._settings.advertised(bound)),
            metrics_address=str(metrics_bound.dialable()) if metrics_bound else "",
            version=version(),
            store_format=STORE_FORMAT,
        )

    def _host(
        self,
        files: RealFiles,
        world: World,
        cluster_id: str,
        announced: cluster.Server,
        registry: CollectorRegistry,
    ) -> Host[SettingsT]:
        host = Host(
            settings=self._settings,
            world=world,
            files=files,
            server_id=announced.server_id,
            cluster_id=cluster_id,
            announced=announced,
            log=self.log,
            metrics_registry=registry,
            quotas=self._quotas,
        )
        host.background("event loop lag", metrics.watch_event_loop(registry, world.clock))
        return host

    def _belonging(
        self, host: Host[SettingsT], server: Server
    ) -> Callable[[WrongCluster | None], Awaitable[None]]:
        async def belonging(error: WrongCluster | None) -> None:
            self._gate.refuse(error)
            self._belongs = error is None
            self._tell_health(host, server)

        return belonging

    def _tell_health(self, host: Host[SettingsT], server: Server) -> None:
        serving = self._belongs and not self._draining and not host.stalled
        server.health.set_serving(serving)

    # --------------------------------------------------------------------------- end

    async def _until_stopped(self, host: Host[SettingsT]) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        failing = asyncio.create_task(host.failed.wait())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failing.cancel()
        if host.failed.is_set():
            self._exit_code = EXIT_FAILED

    async def _drain(self, host: Host[SettingsT], server: Server, deadline: float) -> None:
        self.log.info("draining", calls=self._gate.in_flight)
        self._retract_ready_file()
        self._draining = True
        server.health.set_serving(False)
        if self._registration is not None and not host.failed.is_set():
            await self._registration.leave()
        try:
            async with asyncio.timeout_at(deadline):
                await host.drain()
        except Exception:  # calls in progress still have to be answered
            self.log.exception("the service's own drain failed")
            self._exit_code = EXIT_FAILED
        # Not `stop` first: it closes connections, and callers would not know whether their calls
        # were executed. This tells them that they were not.
        self._gate.close(shutting_down(self._settings.service, _DRAINING_RETRY_SECONDS))
        try:
            async with asyncio.timeout_at(deadline):
                await self._gate.idle.wait()
        except TimeoutError:
            self._fail("calls were cut off", calls=self._gate.in_flight)
        await server.stop(_FLUSH_SECONDS)

    async def _end_without_store(self, host: Host[SettingsT], server: Server) -> None:
        """Exits at once: an orderly end would hand over, flush or close what is no longer there."""
        watchdog = threading.Timer(3 * _FLUSH_SECONDS, os._exit, (EXIT_FAILED,))
        watchdog.daemon = True
        watchdog.start()
        self._exit_code = EXIT_FAILED
        server.health.set_serving(False)
        self._gate.close(NotReady(f"the store of this server is gone: {host.gone}"))
        self._retract_ready_file()
        await server.stop(_FLUSH_SECONDS)
        self.log.info("stopped", exit_code=self._exit_code)
        self.exit_at_once(self._exit_code)

    def end_in_time(self, exit_code: int) -> None:
        """Ends the process even if something in it never does: a task that ignores cancellation, or
        a thread of the event loop's executor, for which the interpreter would wait. Only code of
        others, such as observers, leaves these behind."""

        def end() -> None:
            self.log.warning("a task or a thread does not end, and is left behind")
            self.exit_at_once(exit_code)

        watchdog = threading.Timer(_LEAVE_SECONDS, end)
        watchdog.daemon = True
        watchdog.start()

    def exit_at_once(self, exit_code: int) -> NoReturn:
        """Ends the process without waiting for anything, or closing it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    async def _close(self, stack: AsyncExitStack, deadline: float) -> None:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await stack.aclose()
        except TimeoutError:
            if not limit.expired():
                raise
            self._fail("closing took too long and was cancelled")
            # What hangs there would keep the interpreter from ending, too.
            self.log.info("stopped", exit_code=self._exit_code)
            self.exit_at_once(self._exit_code)

    def _retract_ready_file(self) -> None:
        try:
            self._ready_file.remove()
        except OSError as error:
            # Launchers that wait for the end watch the process: calls in progress matter more.
            self.log.warning("the ready file cannot be removed", error=str(error))

    def _fail(self, event: str, **context: object) -> None:
        self.log.error(event, **context)
        self._exit_code = EXIT_FAILED

    def _stop_soon(self) -> None:
        self._stop.set()
        if self._starting is not None:
            self._starting.reschedule(0.0)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        signalled = False

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal signalled
            if signalled and number != signal.SIGHUP:
                # Not an exception: the code that hangs might catch it.
                os._exit(128 + number)
            signalled = True
            loop.call_soon_threadsafe(self._stop_soon)

        # Not loop.add_signal_handler: the second signal must work even if the loop is stuck.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, on_signal)

    def _stop_with_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A launcher holds the other end: however it dies, the pipe closes, and we follow."""
        stdin = _STANDARD_INPUT

        def on_readable() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                self._stop_soon()

        try:
            loop.add_reader(stdin, on_readable)
        except OSError:
            # Neither a file nor the null device (`nohup`, a supervisor) ever reports its end.
            raise InvalidArgument(
                "stop_with_stdin", "standard input is closed or a file; expected a pipe"
            ) from None
