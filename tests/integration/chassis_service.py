"""A service of nothing but the chassis, for the tests of processes: it waits as long as told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Literal

from percolator.errors import InvalidArgument, NotReady
from percolator.v1 import cluster_pb2, oracle_pb2
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.rpc import Exposed
from services.chassis.settings import ListenAddress, ServiceSettings, load

STUCK = 999_999
"""As count: block the whole event loop."""


class WaiterSettings(ServiceSettings):
    """What the tests ask of it."""

    service: ClassVar[str] = "waiter"

    listen: ListenAddress = "127.0.0.1:0"

    store: str = ""
    """A directory to lock a file in."""

    fault: Literal["", "build", "background", "drain", "close", "descriptors", "not ready"] = ""
    """What goes wrong."""


def say(word: str) -> None:
    """Tells the test, which reads it, how far this process has come."""
    sys.stdout.write(json.dumps({"said": word}) + "\n")
    sys.stdout.flush()


class Waiter:
    """Answers after `count` milliseconds."""

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        if not request.count:
            raise InvalidArgument("count", "is 0; expected milliseconds to wait")
        say("called")
        if request.count == STUCK:
            time.sleep(60)  # noqa: ASYNC251  # which is the fault that a test asks for
        await asyncio.sleep(request.count / 1000)
        return GetTimestampsResponse(first=1, count=request.count)


def what_is_standard_error() -> str:
    """If its number was free, it is now whatever was opened first: a socket, or a stored file."""
    with open(os.devnull, "rb") as null:
        return os.devnull if os.path.sameopenfile(2, null.fileno()) else "something else"


async def fail() -> None:
    raise RuntimeError("a bug")


async def say_drained() -> None:
    say("drained")


@asynccontextmanager
async def build(host: Host[WaiterSettings]) -> AsyncIterator[list[Exposed]]:
    """As a real service does: takes its store, may fail, closes at the end."""
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
    host.on_drain(fail if host.settings.fault == "drain" else say_drained)
    async with asyncio.TaskGroup():
        yield [Exposed(oracle_pb2.DESCRIPTOR.services_by_name["OracleService"], Waiter())]
        if host.settings.fault == "close":
            await fail()
        say("closed")


if __name__ == "__main__":
    sys.exit(run(load(WaiterSettings), cluster_pb2.SERVICE_KIND_ORACLE, build))
