"""The test service as a process of the local launcher, with access to its output."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from percolator.services.local.process import Ready, ServiceProcess
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS

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
