"""A service that is only the chassis, for process tests: each call waits as long as requested."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Literal

from percolator.errors import InvalidArgument, NotReady
from percolator.services.chassis.files import OpenFile, RealFiles
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import ListenAddress, ServiceSettings, load
from percolator.v1 import cluster_pb2, oracle_pb2
from percolator.v1.oracle_pb2 import (
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    CheckTimestampsRequest,
    CheckTimestampsResponse,
    GetTimestampsRequest,
    GetTimestampsResponse,
)

STUCK = 999_999
"""A value of `count` that blocks the whole event loop."""


class WaiterSettings(ServiceSettings):
    """Settings that make the service behave as a test needs."""

    service: ClassVar[str] = "waiter"

    listen: ListenAddress = "127.0.0.1:0"

    store: str = ""
    """A directory in which to lock a file."""

    fault: Literal[
        "",
        "build",
        "background",
        "drain",
        "close",
        "descriptors",
        "not ready",
        "store",
        "deaf task",
        "hanging thread",
        "exit",
        "interrupt",
    ] = ""
    """The fault to produce."""


def say(word: str) -> None:
    """Tells the test, which reads this output, how far the process has got."""
    sys.stdout.write(json.dumps({"said": word}) + "\n")
    sys.stdout.flush()


class Waiter:
    """Answers after `count` milliseconds."""

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        if not request.count:
            raise InvalidArgument("count", "is 0; expected milliseconds to wait")
        say("called")
        if request.count == STUCK:
            time.sleep(60)  # noqa: ASYNC251  # a test asks for exactly this fault
        await asyncio.sleep(request.count / 1000)
        return GetTimestampsResponse(first=1, count=request.count)

    async def advance_epoch(self, request: AdvanceEpochRequest) -> AdvanceEpochResponse:
        raise AssertionError("nobody calls this")

    async def check_timestamps(self, request: CheckTimestampsRequest) -> CheckTimestampsResponse:
        raise AssertionError("nobody calls this")


def what_is_standard_error() -> str:
    """File that descriptor 2 refers to. If it was free: the first thing opened, a socket or
    file."""
    with open(os.devnull, "rb") as null:
        return os.devnull if os.path.sameopenfile(2, null.fileno()) else "something else"


async def fail() -> None:
    raise RuntimeError("a bug")


async def ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def exit_without_an_error() -> None:
    sys.exit()


async def interrupt_itself() -> None:
    raise KeyboardInterrupt


async def say_drained() -> None:
    say("drained")


def start_of_others(fault: str) -> None:
    """Starts what never ends, or ends the process, as an observer may."""
    loop = asyncio.get_running_loop()
    if fault == "deaf task":
        _left.append(loop.create_task(ignore_cancellation()))
    if fault == "hanging thread":
        _left.append(loop.run_in_executor(None, threading.Event().wait))
    if fault == "exit":
        _left.append(loop.create_task(exit_without_an_error()))
    if fault == "interrupt":
        _left.append(loop.create_task(interrupt_itself()))


_left: list[asyncio.Future[None] | asyncio.Future[bool]] = []


class DeadStore(RealFiles):
    """As a mount of a file system in user space whose program has died."""

    async def create(self, path: Path, *, exclusive: bool = True) -> OpenFile:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))


@asynccontextmanager
async def build(host: Host[WaiterSettings]) -> AsyncIterator[list[Exposed]]:
    """Behaves like a real service: locks its store, may fail, and closes at the end."""
    if host.settings.fault == "build":
        await fail()
    if host.settings.fault == "not ready":
        raise NotReady("nothing to serve from yet")
    if host.settings.store:
        await host.files.lock(Path(host.settings.store) / "LOCK")
    if host.settings.fault == "descriptors":
        say(what_is_standard_error())
        await fail()
    if host.settings.fault == "background":
        host.background("buggy", fail())
    if host.settings.fault == "store":
        host.files = DeadStore()
        host.watch_store(Path(host.settings.store))
    start_of_others(host.settings.fault)
    host.on_drain(fail if host.settings.fault == "drain" else say_drained)
    async with asyncio.TaskGroup():
        yield [Exposed(oracle_pb2.DESCRIPTOR.services_by_name["OracleService"], Waiter())]
        if host.settings.fault == "close":
            await fail()
        say("closed")


if __name__ == "__main__":
    sys.exit(run(load(WaiterSettings), cluster_pb2.SERVICE_KIND_ORACLE, build))
