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
import difflib
import errno
import gc
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Generic, Literal, NoReturn

import structlog
from prometheus_client import CollectorRegistry
from structlog.stdlib import BoundLogger
from structlog.types import EventDict, Processor

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    PercolatorError,
    Retry,
    StoreFault,
    StoreUnusable,
    WrongCluster,
)
from percolator.process import (
    make_private,
    new_event_loop,
    private_opener,
    tune_garbage_collector,
    umask_below,
)
from percolator.services.chassis import metrics
from percolator.services.chassis.access import Tokens
from percolator.services.chassis.audit import Audit
from percolator.services.chassis.files import RealFiles
from percolator.services.chassis.host import Build, Host, SettingsT
from percolator.services.chassis.membership import Membership, Registration
from percolator.services.chassis.process import raise_descriptor_limit, version
from percolator.services.chassis.rpc import Gate, Quotas
from percolator.services.chassis.server import CannotListen, Server, ServerTls, listening_metrics
from percolator.services.chassis.settings import (
    ServiceSettings,
    StoreSettings,
    environment_name,
    occupy_standard_streams,
)
from percolator.v1 import cluster_pb2 as cluster
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.addresses import HostPort
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import ENVIRONMENT_VARIABLE
from percolator.wire.credentials import PLAIN_TEXT, TLS_VARIABLES, TOKEN_VARIABLE
from percolator.wire.through import shutting_down
from percolator.world import MachineClock, World, machine_random

NEW_OBJECTS = 20_000
"""Between two collections of new objects: about five batches of a hundred mutations."""
YOUNG_COLLECTIONS = 50
"""Young collections for each collection of their survivors; also those for each full one."""


def skip_imports() -> None:
    """Excludes what was imported from collection. It stays, so nothing looks through it before.

    Tunes Python's garbage collector for a service that handles many rows.

    Nearly all objects here are freed by their reference count, while those that are indexed, queued
    or in flight live long and are numerous. Scanning them after every 700 new objects, which is the
    default, cost a tablet server 5 to 10 % of its whole CPU time.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)


_TRACEBACK_CHARACTERS_MAX = 32_768
_SENT_TO_NOBODY = "ExecuteBatchError raised in core by servicer method"


def configure_logs(service: str, log_format: Literal["auto", "human", "json"], level: str) -> None:
    """Routes structlog and the standard library's logging, also of other packages, to stderr.

    Structured logs: one line per event, for humans on a terminal, else JSON. All code logs with
    `structlog.get_logger("percolator.NAME")`, with the event as a short constant text and the
    variable parts as keywords: `log.info("tablet opened", tablet=7, epoch=3)`.
    """
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks are text before they come to the console, which would have rich make them, if it is
    # installed: those show local variables, and so tokens, keys and stored values.
    plain = structlog.dev.plain_traceback
    last: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        if human
        else structlog.processors.JSONRenderer()
    )
    renderers: list[Processor] = [
        structlog.processors.format_exc_info,
        _with_short_traceback,
        last,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    handler.addFilter(_is_no_caller_that_left)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def _with_short_traceback(_: object, __: str, entry: EventDict) -> EventDict:
    """Leaves out the middle of a long traceback: the message of an observer's error may contain
    the whole value that it could not handle."""
    text = entry.get("exception", "")
    if len(text) > _TRACEBACK_CHARACTERS_MAX:
        half = _TRACEBACK_CHARACTERS_MAX // 2
        left_out = len(text) - 2 * half
        entry["exception"] = f"{text[:half]} ({left_out} characters left out) {text[-half:]}"
    return entry


def _is_no_caller_that_left(record: logging.LogRecord) -> bool:
    """False for what gRPC logs, with a traceback, when a caller has gone just before its answer was
    to be sent: any caller could fill the disk with them."""
    text = record.msg
    return not (isinstance(text, str) and text.startswith(_SENT_TO_NOBODY))


class ReadyFile:
    """Exists exactly while the process is ready; a file that was left over is removed at start.

    JSON: {"address", "listen", "frames_address", "metrics_address", "server_id", "pid"}. Others
    dial `address`, which may be that of a proxy; `listen` is where this process takes calls.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(
        self, server: cluster.Server, listen: HostPort, frames_address: HostPort | None
    ) -> None:
        """Writes the file, which appears at once with its whole content."""
        if self._path is None:
            return
        content = {
            "address": server.address,
            "listen": str(listen),
            "frames_address": str(frames_address or ""),
            "metrics_address": server.metrics_address,
            "server_id": server.server_id,
            "pid": os.getpid(),
        }
        temporary = self._path.with_name(self._path.name + ".new")
        with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(json.dumps(content) + "\n")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Removes the file: the process is not ready yet, or no longer."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


_PATH_SETTINGS = ("store", "ready_file", "trace_file")
_TEMPORARY = ".new"
"""The suffix of a file that is about to replace another one."""

_MAY_PASS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
_LASTING_FAULTS = (StoreFault.DAMAGED, StoreFault.READ_ONLY)


def may_pass(error: Exception) -> bool:
    """True if the same start may succeed later with unchanged settings.

    A full disk may be cleared, and another service may become ready. A port in use, a wrong path, a
    damaged file or another cluster's store stay as they are.
    """
    if isinstance(error, StoreUnusable):
        return error.fault not in _LASTING_FAULTS
    if isinstance(error, PercolatorError):
        return error.retry is not Retry.USELESS
    return isinstance(error, OSError) and error.errno in _MAY_PASS


def one_line(error: Exception, settings: ServiceSettings) -> str:
    """The error in one line and, for a file, the setting to change."""
    if isinstance(error, OSError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        return f"{_setting_of(name, settings)}{name}: {error.strerror}"
    return " ".join(str(error).split())


def _setting_of(name: str, settings: ServiceSettings) -> str:
    path = Path(name.removesuffix(_TEMPORARY)).absolute()
    for setting in _PATH_SETTINGS:
        value: str | Path | None = getattr(settings, setting, None)
        if value and path.is_relative_to(Path(value).absolute()):
            return f"{setting}: "
    return ""


_PREFIX = "PERCOLATOR_"

SERVICES = tuple(
    name.removeprefix("SERVICE_KIND_").replace("_", "")
    for name, kind in ServiceKind.items()
    if kind != ServiceKind.SERVICE_KIND_UNSPECIFIED
)
"""Names of services in their environment variables, such as TABLETSERVER."""

_OF_CLIENTS = {ENVIRONMENT_VARIABLE, TOKEN_VARIABLE, *TLS_VARIABLES.values()}

_INVENTED = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""The variables that Kubernetes sets in each container for a service called percolator-oracle."""

_LIKENESS_OF_FIELDS = 0.5
_LIKENESS_OF_NAMES = 0.9
"""Without the prefix of the service, a name is only reported if it is nearly one of its own."""


def unknown_variables(
    kind: type[ServiceSettings], environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Variables that look like settings of this service, and the nearest that exists, or "".

    Finds variables in the environment that were meant for a service, and that it does not know.

    They are not refused: container platforms invent some with any prefix, and one environment may
    serve several programs.
    """
    own = environment_name(kind, "")
    known = [environment_name(kind, field) for field in ("config", *kind.model_fields)]
    of_services = tuple(f"{_PREFIX}{service}_" for service in SERVICES)
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or name in _OF_CLIENTS:
            continue
        if _INVENTED.search(name):
            continue
        if name.startswith(own):
            fields = [one.removeprefix(own) for one in known]
            nearest = _nearest(name.removeprefix(own), fields, _LIKENESS_OF_FIELDS)
            yield name, own + nearest if nearest else ""
        elif not name.startswith(of_services):
            with_service = own + name.removeprefix(_PREFIX)
            is_missing = with_service in known  # as in PERCOLATOR_LOG_LEVEL
            nearest = with_service if is_missing else _nearest(name, known, _LIKENESS_OF_NAMES)
            if nearest:
                yield name, nearest


def _nearest(name: str, among: Sequence[str], likeness: float) -> str:
    return next(iter(difflib.get_close_matches(name, among, n=1, cutoff=likeness)), "")


def limit_new_files(root: Path) -> None:
    """Sets the umask of the process: LevelDB has no other way to choose the mode of its files."""
    try:
        os.umask(umask_below(root))
    except OSError:
        os.umask(0o077)  # it is made with this, or opening it says what is wrong


def close_root(root: Path, log: BoundLogger) -> None:
    """Takes the access of others from a root that was made for everybody, once it is known to be
    that of this cluster."""
    try:
        if make_private(root):
            log.warning("other users could read the store, and no longer can", store=str(root))
    except OSError as error:
        log.warning(
            "other users can read the store, and this process cannot change that",
            store=str(root),
            reason=str(error),
        )


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
    occupy_standard_streams()
    raise_descriptor_limit()
    configure_logs(settings.service, settings.log_format, settings.log_level)
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
        audit = None
        if settings.audit:
            limits = settings.audit_bytes_max, settings.audit_files_max
            audit = Audit(Path(settings.audit), world.clock, *limits)
            stack.callback(audit.close)
        server = Server(
            settings, self._gate, registry, world.clock, tls, tokens, self._quotas, audit
        )
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
        if audit is not None:
            host.background("write the audit file", audit.keep())
        exposed = await stack.enter_async_context(self._build(host))
        if root is not None:
            await files.waiting(close_root, root, self.log)
        # Everything is built: it stays, so nothing looks through it again.
        tune_garbage_collector(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)
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
