"""A service process from start to exit, as an operator sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from percolator.errors import InvalidArgument, NotReady, PercolatorError, WrongCluster
from percolator.services.chassis.rpc import Exposed, Gate, RpcEdge, RpcMetrics
from percolator.services.chassis.server import Server
from percolator.services.local.authority import files_in
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import Ready, ServiceProcess
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import (
    DescribeRequest,
    DescribeResponse,
    RegisterRequest,
    RegisterResponse,
)
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import TLS_VARIABLES
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.world import MachineClock
from tests.integration.chassis_service import STUCK, WaiterSettings

ORACLE = "percolator.v1.OracleService"
LONG = 600_000
"""Milliseconds; longer than any test waits."""


async def test_a_ready_service_reports_its_address_and_health(tmp_path: Path) -> None:
    ready_file(tmp_path).write_text('{"address": "left over by a crash", "pid": 1}')
    async with service(tmp_path, "--listen=127.0.0.1:0") as running:
        entry = await running.log_until("ready")
        ready = await running.ready()
        assert ready.pid == running.process.pid
        assert ready.server_id == entry["server_id"]
        assert ready.address == entry["address"] != "127.0.0.1:0"

        assert await health(ready.address) == SERVING
        assert await health(ready.address, ORACLE) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(ready.address, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        assert ORACLE in await listed_services(ready.address)

        await running.call(1)
        with pytest.raises(InvalidArgument):
            await running.call(0)
        metrics = await asyncio.to_thread(scrape, ready.metrics_address)
        ok = f'method="GetTimestamps",service="{ORACLE}"}} 1.0'
        assert f'percolator_rpc_finished_total{{code="OK",{ok}' in metrics
        assert f'percolator_rpc_finished_total{{code="INVALID_ARGUMENT",{ok}' in metrics
        for name in (
            "percolator_build_info",
            "process_resident_memory_bytes",
            "percolator_event_loop_lag_seconds_count",
        ):
            assert f"\n{name}" in metrics


async def test_a_mistyped_variable_is_a_warning_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERCOLATOR_WAITER_LOGLEVEL", "debug")
    async with service(tmp_path, "--listen=127.0.0.1:0") as running:
        entry = await running.log_until("environment variable is no setting")
        assert entry["level"] == "warning"
        assert entry["name"] == "PERCOLATOR_WAITER_LOGLEVEL"
        assert entry["nearest"] == "PERCOLATOR_WAITER_LOG_LEVEL"
        await running.ready()


async def listed_services(address: str) -> list[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), timeout=SECONDS)
        answer = await call.read()
        return [found.name for found in answer.list_services_response.service]


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


async def test_a_call_in_progress_is_answered_before_the_end(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        address = (await running.ready()).address
        calling = asyncio.ensure_future(running.call(1500))
        await running.hears("called")
        running.terminate()
        await running.hears("drained")
        assert await health(address) == NOT_SERVING
        assert await health(address, ORACLE) == NOT_SERVING
        with pytest.raises(NotReady):
            await running.call(1, address)
        assert (await calling).count == 1500
        await running.hears("closed")
        assert await running.exit_code() == 0
        assert not running.ready_file.exists()
        log = [json.loads(line) for line in await running.log()]
        assert [entry["event"] for entry in log] == ["ready", "draining", "stopped"]


async def test_calls_that_do_not_end_are_cut_off_and_the_exit_code_says_so(tmp_path: Path) -> None:
    async with service(tmp_path, "--drain-seconds=0.2") as running:
        calling = asyncio.ensure_future(running.call(LONG))
        await running.hears("called")
        running.terminate()
        with pytest.raises(PercolatorError):
            await calling
        assert await running.exit_code() == 1
        assert any("calls were cut off" in line for line in await running.log())


@pytest.mark.parametrize("fault", ["deaf task", "hanging thread"])
async def test_what_never_ends_does_not_keep_the_process(tmp_path: Path, fault: str) -> None:
    async with service(tmp_path, f"--fault={fault}") as running:
        await running.ready()
        running.terminate()
        assert await running.exit_code() == 0
        assert any("is left behind" in line for line in await running.log())


async def test_an_open_health_watch_does_not_delay_the_end(tmp_path: Path) -> None:
    async with service(tmp_path, "--drain-seconds=600") as running:
        address = (await running.ready()).address
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            running.terminate()
            assert (await watch.read()).status == NOT_SERVING
            assert await running.exit_code() == 0


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("milliseconds", [LONG, STUCK], ids=["busy", "stuck"])
async def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, milliseconds: int, number: signal.Signals, exit_code: int
) -> None:
    """With an exit code that docs/operating.md lists."""
    async with service(tmp_path, "--drain-seconds=600") as running:
        calling = asyncio.ensure_future(running.call(milliseconds))
        await running.hears("called")
        running.terminate()
        # Two pending signals of one kind merge into one: wait until the first was handled.
        if milliseconds == STUCK:
            await taken(running.process.pid, signal.SIGTERM)
        else:
            await running.hears("drained")
        running.process.send_signal(number)
        assert await running.exit_code() == exit_code
        with pytest.raises(PercolatorError):
            await calling


async def taken(pid: int, number: signal.Signals) -> None:
    """Returns once the process has no such signal pending."""
    async with asyncio.timeout(SECONDS):
        while True:
            if not pending_signals(pid) >> (number - 1) & 1:
                return
            await asyncio.sleep(0.01)


def pending_signals(pid: int) -> int:
    """The process's pending signals: one bit each, the lowest for signal 1."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("ShdPnd:"))
    return int(line.split()[1], 16)


async def test_a_closed_terminal_stops_a_service_cleanly_however_many_signals_it_sends(
    tmp_path: Path,
) -> None:
    """The kernel sends one SIGHUP, and the shell another."""
    async with service(tmp_path) as running:
        address = (await running.ready()).address
        call = asyncio.ensure_future(running.call(500, address))
        await running.hears("called")
        running.process.send_signal(signal.SIGHUP)
        await running.hears("drained")
        running.process.send_signal(signal.SIGHUP)
        assert (await call).count == 500
        assert await running.exit_code() == 0


async def test_a_service_that_ignores_closed_terminals_keeps_running(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for its child
    async with service(tmp_path) as running:
        signal.signal(signal.SIGHUP, before)
        address = (await running.ready()).address
        running.process.send_signal(signal.SIGHUP)
        assert (await running.call(1, address)).count == 1


async def test_a_service_raises_its_descriptor_limit_to_the_maximum(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        async with service(tmp_path) as running:
            await running.ready()
            process = psutil.Process(running.process.pid)
            assert process.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_garbage_on_the_port_does_no_harm(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        ready = await running.ready()
        for address in (ready.address, ready.metrics_address):
            host, _, port = address.rpartition(":")
            for garbage in (
                os.urandom(4096),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00",
                b"\x16\x03\x01\x02\x00\x01",
                b"",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                with contextlib.suppress(ConnectionError):
                    writer.write(garbage)
                    await writer.drain()
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), SECONDS)
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        assert (await running.call(1)).first == 1
        assert await health(ready.address) == SERVING
        running.terminate()
        assert await running.exit_code() == 0
        for line in await running.log():
            json.loads(line)


# -------------------------------------------------------------------------- refusing to start


async def refusal(tmp_path: Path, *flags: str) -> str:
    async with service(tmp_path, *flags) as running:
        assert await running.exit_code() == 2
        lines = await running.log()
        assert len(lines) == 1
        assert not running.ready_file.exists()
        return lines[0]


async def test_a_metrics_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = await refusal(tmp_path, f"--metrics-listen={address}")
    assert line == f"waiter: metrics_listen {address}: address already in use"


async def test_neither_the_port_nor_the_store_of_another_service_is_shared(tmp_path: Path) -> None:
    async with service(tmp_path, f"--store={tmp_path}") as first:
        address = (await first.ready()).address
        (tmp_path / "second").mkdir()
        line = await refusal(tmp_path / "second", f"--listen={address}")
        assert line == f"waiter: listen {address}: address already in use"
        (tmp_path / "third").mkdir()
        line = await refusal(tmp_path / "third", f"--store={tmp_path}")
        assert line.startswith("waiter: ")
        await first.call(1)


UNUSABLE = {
    "an address of another machine": (
        "--listen=192.0.2.1:0",
        "listen 192.0.2.1:0: cannot assign requested address",
    ),
    "a store that is not there": (
        "--store={}/none",
        "store: {}/none/LOCK: No such file or directory",
    ),
    "a store that is a file": ("--store={}/file", "store: {}/file/LOCK: Not a directory"),
    "a ready file that cannot be written": (
        "--ready-file={}/none/ready.json",
        "ready_file: {}/none/ready.json.new: No such file or directory",
    ),
}


@pytest.mark.parametrize(("flag", "reason"), UNUSABLE.values(), ids=UNUSABLE)
async def test_what_cannot_be_used_is_named_in_one_line_with_exit_code_2(
    tmp_path: Path, flag: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    line = await refusal(tmp_path, flag.format(tmp_path), "--insecure")
    assert line == f"waiter: {reason.format(tmp_path)}"


async def test_a_start_that_may_succeed_later_is_not_reported_as_a_settings_error(
    tmp_path: Path,
) -> None:
    """A supervisor that gives up on exit code 2 has to retry this one."""
    async with service(tmp_path, "--fault=not ready") as running:
        assert await running.exit_code() == 1
        assert await running.log() == ["waiter: nothing to serve from yet"]


async def test_a_ready_file_that_cannot_be_removed_does_not_prevent_draining(
    tmp_path: Path,
) -> None:
    async with service(tmp_path) as running:
        address = (await running.ready()).address
        running.ready_file.unlink()
        running.ready_file.mkdir()
        call = asyncio.ensure_future(running.call(300, address))
        await running.hears("called")
        running.terminate()
        assert (await call).count == 300
        assert await running.exit_code() == 0
        running.ready_file.rmdir()


def start_and_wait(command: str, directory: Path) -> tuple[int, str]:
    """Runs the test service in a shell with redirections. Returns exit code and last line."""
    service = f"{sys.executable} -m tests.integration.chassis_service"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{service} {command}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("stdin", ["</dev/null", "</etc/passwd", "<&-"])
def test_a_standard_input_that_cannot_report_its_end_is_refused(tmp_path: Path, stdin: str) -> None:
    code, line = start_and_wait(f"--stop-with-stdin {stdin}", tmp_path)
    assert code == 2
    assert line.startswith("waiter: stop_with_stdin: standard input is closed or a file")


def test_a_closed_standard_error_changes_nothing(tmp_path: Path) -> None:
    """Its descriptor must not be reused for a store file, which log lines would then corrupt."""
    code, _ = start_and_wait("--drain-seconds=nan 2>&-", tmp_path)
    assert code == 2
    descriptors = tmp_path / "descriptors"
    fault = f"--fault=descriptors --store={tmp_path} 2>&- >{descriptors}"
    code, _ = start_and_wait(fault, tmp_path)
    assert code == 1
    assert json.loads(descriptors.read_text())["said"] == "/dev/null"


# ----------------------------------------------------------------------------------- bugs


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("build", "RuntimeError: a bug"),
        ("background", "RuntimeError: a bug"),
        ("drain", "RuntimeError: a bug"),
        ("close", "RuntimeError: a bug"),
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
async def test_a_bug_and_a_task_that_exits_are_failures_with_their_traceback_in_the_log(
    tmp_path: Path, fault: str, raised: str
) -> None:
    async with service(tmp_path, f"--fault={fault}") as running:
        if fault in ("drain", "close"):
            await running.ready()
            running.terminate()
        assert await running.exit_code() == 1
        entries = [json.loads(line) for line in await running.log()]
        assert any(raised in entry.get("exception", "") for entry in entries)


async def test_a_process_whose_store_is_gone_ends_with_the_reason(tmp_path: Path) -> None:
    """An orderly end would wait for the store, and a leader would keep its place meanwhile."""
    async with service(tmp_path, "--fault=store", f"--store={tmp_path}") as running:
        assert await running.exit_code() == 1
        entries = [json.loads(line) for line in await running.log()]
        (gone,) = [one for one in entries if one["event"] == "the store is gone"]
        assert "not connected" in gone["reason"]
        assert "draining" not in [one["event"] for one in entries]


# A service process and the masters of its cluster.


class Master:
    """The part of a master that the chassis talks to."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.registered: list[RegisterRequest] = []

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(cluster_id=self.cluster_id)

    async def register(self, request: RegisterRequest) -> RegisterResponse:
        if request.cluster_id != self.cluster_id:
            raise WrongCluster(
                "the cluster is another one", expected=self.cluster_id, found=request.cluster_id
            )
        self.registered.append(RegisterRequest.FromString(request.SerializeToString()))
        return RegisterResponse(cluster_id=self.cluster_id, interval_milliseconds=100)


@asynccontextmanager
async def serving(master: Master, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    edge = RpcEdge(Gate(100, 16 << 20), RpcMetrics(), MachineClock())
    edge.expose([Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], master)])
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((edge,))
    host, _, _ = address.rpartition(":")
    bound = f"{host}:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


async def until(running: Waiter, status: int) -> None:
    """Returns once the process reports this health status."""
    address = (await running.ready()).address
    async with asyncio.timeout(SECONDS):
        while await health(address) != status:  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.02)


async def test_a_service_waits_for_its_master_and_registers_with_it(tmp_path: Path) -> None:
    # A port that was free a moment ago: nothing listens there yet.
    async with serving(Master("")) as address:
        pass
    master = Master("shop")
    async with service(tmp_path, f"--masters={address}") as running:
        waiting = await running.log_until("waiting for a master")
        assert waiting["masters"] == address
        assert not running.ready_file.exists()
        async with serving(master, address):
            entry = await running.log_until("ready")
            ready = await running.ready()
        assert entry["cluster_id"] == "shop"
        announced = master.registered[0].server
        assert master.registered[0].cluster_id == "shop"
        assert announced.version
        assert announced == cluster_pb2.Server(
            kind=cluster_pb2.SERVICE_KIND_ORACLE,
            address=ready.address,
            metrics_address=ready.metrics_address,
            server_id=ready.server_id,
            version=announced.version,
        )
        # Losing the master does not stop the service.
        await running.log_until("not registered")
        assert (await running.call(1)).first == 1
        assert await health(ready.address) == SERVING
        async with serving(master, address):
            await running.log_until("registered again")
        running.terminate()
        assert await running.exit_code() == 0
        for line in await running.log():
            json.loads(line)


async def test_a_service_that_waits_for_its_master_can_be_stopped(tmp_path: Path) -> None:
    async with service(tmp_path, "--masters=127.0.0.1:1") as running:
        await running.log_until("waiting for a master")
        running.terminate()
        assert await running.exit_code() == 0


class TwoFacedMaster(Master):
    """Two masters of different clusters behind one address."""

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(cluster_id="another")


async def test_a_service_between_two_clusters_does_not_start(tmp_path: Path) -> None:
    async with (
        serving(TwoFacedMaster("shop")) as address,
        service(tmp_path, f"--masters={address}") as running,
    ):
        assert await running.exit_code() == 2
        last = (await running.log())[-1]
    register = "/percolator.v1.ClusterService/Register"
    assert last == f"waiter: the cluster is another one [{register} at {address}]"


async def test_a_service_refuses_to_serve_while_its_master_belongs_to_another_cluster(
    tmp_path: Path,
) -> None:
    master = Master("shop")
    async with serving(master) as address, service(tmp_path, f"--masters={address}") as running:
        await running.ready()
        master.cluster_id = "robbers"
        await until(running, NOT_SERVING)
        with pytest.raises(WrongCluster) as caught:
            await running.call(1)
        assert (caught.value.expected, caught.value.found) == ("robbers", "shop")
        master.cluster_id = "shop"
        await until(running, SERVING)
        assert (await running.call(1)).first == 1


# More simultaneous calls than a server can process.


BURST = 6_000
"""Twice as many as gRPC itself queues by default."""


async def test_a_burst_of_calls_is_answered_and_none_is_reported_cancelled() -> None:
    """A client that sees CANCELLED has to assume that its call may have been executed."""
    server = Server(WaiterSettings(), Gate(10, 256 << 20), CollectorRegistry(), MachineClock())
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest())

            async def code() -> str:
                try:
                    await check(health_pb2.HealthCheckRequest())
                except grpc.aio.AioRpcError as error:
                    return str(error.code().name)
                return "OK"

            codes = Counter(await asyncio.gather(*(code() for _ in range(BURST))))
    finally:
        await server.stop(0.0)
    # One connection may have 16 calls whose requests have not arrived; on a busy machine, more have
    # not. A refused call was not executed, and says so.
    assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert codes["OK"] > BURST // 2


# The test service as a process of the local launcher, with access to its output.

SECONDS = 20.0
"""How long to wait before a test fails because something is stuck."""

_NAME = "waiter"

T = TypeVar("T")


class Waiter:
    """One running process of the test service. Its progress words and its log are in one file."""

    def __init__(self, directory: Path, flags: tuple[str, ...]) -> None:
        self.process = ServiceProcess(
            _NAME, "tests.integration.chassis_service", list(flags), logs=directory, run=directory
        )
        self.ready_file = ready_file(directory)
        self.network = GrpcNetwork()
        self._heard = 0
        self._logged = 0

    async def ready(self) -> Ready:
        if self.process.ready is not None:
            return self.process.ready
        return await asyncio.to_thread(self.process.wait_ready, SECONDS)

    async def call(self, milliseconds: int, address: str = "") -> GetTimestampsResponse:
        """Makes a call that takes this many milliseconds."""
        call = self.network.unary(address or (await self.ready()).address, GET_TIMESTAMPS)
        return await call(GetTimestampsRequest(count=milliseconds), SECONDS)

    async def hears(self, word: str) -> None:
        """Returns once the process has printed this word, which must be the next one it prints."""

        def next_word() -> str | None:
            said = [entry["said"] for entry in self._entries() if "said" in entry]
            return said[self._heard] if len(said) > self._heard else None

        assert await self._until(next_word, f"saying {word!r}") == word
        self._heard += 1

    async def log_until(self, event: str) -> dict[str, Any]:
        """Waits for the next log line with this event, and returns it."""

        def logged() -> dict[str, Any] | None:
            entries = self._entries()
            for at in range(self._logged, len(entries)):
                if entries[at].get("event") == event:
                    self._logged = at + 1
                    return entries[at]
            return None

        return await self._until(logged, f"logging {event!r}")

    async def log(self) -> list[str]:
        """Waits for the process to exit, then returns what it wrote to standard error."""
        await self.exit_code()
        return [line for line in self._lines() if not line.startswith('{"said"')]

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait_stopped, SECONDS)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def _lines(self) -> list[str]:
        """The complete lines, without one that is still being written."""
        text = self.process.log.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def _entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines() if line.startswith("{")]

    async def _until(self, look: Callable[[], T | None], what: str) -> T:
        async with asyncio.timeout(SECONDS):
            while True:
                has_ended = self.process.exit_code is not None
                found = look()
                if found is not None:
                    return found
                assert not has_ended, f"ended without {what}: {self._lines()}"
                await asyncio.sleep(0.01)


def ready_file(directory: Path) -> Path:
    return directory / f"{_NAME}.ready.json"


@asynccontextmanager
async def service(directory: Path, *flags: str) -> AsyncIterator[Waiter]:
    """A process with these flags; killed if it is left running."""
    running = Waiter(directory, flags)
    running.process.start()
    try:
        yield running
    finally:
        await running.network.close()
        if running.process.exit_code is None:
            running.process.kill()
        running.process.wait_stopped()


async def health(address: str, name: str = "") -> int:
    """The status that the health service reports."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
        return int(answer.status)


SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)


# What a container's health check finds, with and without TLS.


@pytest.fixture(scope="module", name="cluster")
def _cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), tablet_servers=0, oracles=2, certificates=certificates
    ) as started:
        yield started


def probed(ready_file: Path, certificates: Path | None) -> tuple[int, str]:
    environment = dict(os.environ)
    if certificates is not None:
        files = files_in(certificates / "cluster")
        environment |= {name: getattr(files, part) for part, name in TLS_VARIABLES.items()}
    done = subprocess.run(
        [sys.executable, "-m", "percolator.services.chassis.health_probe", str(ready_file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_every_ready_service_including_standbys_is_healthy(
    cluster: LocalCluster, certificates: Path
) -> None:
    for name in cluster.processes:
        ready_file = cluster.data / "run" / f"{name}.ready.json"
        assert probed(ready_file, certificates) == (0, ""), name


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.3:0"])
async def test_a_service_is_asked_where_it_listens_whatever_address_others_dial(
    tmp_path: Path, listen: str
) -> None:
    """Such as that of a proxy, or the published port of a container."""
    async with service(tmp_path, f"--listen={listen}", "--advertise=proxy:80") as running:
        assert (await running.ready()).address == "proxy:80"
        assert probed(running.ready_file, None) == (0, "")


async def test_a_service_is_asked_directly_where_the_environment_names_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with service(tmp_path, "--listen=127.0.0.1:0") as running:
        await running.ready()
        assert probed(running.ready_file, None) == (0, "")


def test_a_service_that_is_not_ready_is_not_healthy(
    cluster: LocalCluster, certificates: Path, tmp_path: Path
) -> None:
    code, said = probed(tmp_path / "none.json", certificates)
    assert (code, said) == (1, f"not ready: {tmp_path / 'none.json'} does not exist\n")


def test_a_service_that_does_not_answer_is_not_healthy(
    cluster: LocalCluster, certificates: Path
) -> None:
    master = cluster.processes["master"]
    ready_file = cluster.data / "run" / "master.ready.json"
    master.pause()
    try:
        code, said = probed(ready_file, certificates)
    finally:
        master.resume()
    assert code == 1
    assert "127.0.0.1:" in said
    # In plain text it gets no answer either.
    assert probed(ready_file, None)[0] == 1
