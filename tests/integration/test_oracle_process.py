"""The oracle as a process: killed under load, started twice, with a failing disk or bad state."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from percolator import errors
from percolator.services.chassis import coordinator
from percolator.services.local.process import ServiceProcess
from percolator.services.oracle.oracle import Mark
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire.channels import GrpcNetwork
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, World, machine_random
from tests.integration.oracle_with_clock_ahead import AHEAD_MILLISECONDS

pytestmark = pytest.mark.integration

READY_SECONDS = 30.0


def oracle_process(directory: Path, *arguments: str, program: str = "oracle") -> ServiceProcess:
    arguments = ("--store", str(directory / "store"), *arguments)
    return ServiceProcess("oracle", program, list(arguments), logs=directory, run=directory)


@contextmanager
def running(process: ServiceProcess) -> Iterator[ServiceProcess]:
    process.start()
    try:
        process.wait_ready(READY_SECONDS)
        yield process
    finally:
        stop(process)


def stop(process: ServiceProcess) -> int:
    process.ask_to_stop()
    return process.wait_stopped()


def refused_start(directory: Path) -> str:
    """The last line of an oracle that refuses to start: what is wrong."""
    arguments = ["--store", str(directory / "store"), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [sys.executable, "-m", "percolator.cli", "serve", "oracle", *arguments],
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr.splitlines()[-1]


@asynccontextmanager
async def source_at(address: str) -> AsyncIterator[TimestampSource]:
    network = GrpcNetwork()
    source = TimestampSource(World(MachineClock(), network, machine_random()), [address])
    try:
        yield source
    finally:
        await source.close()
        await network.close()


class Load:
    """Many tasks that request timestamps all the time. Each timestamp must exceed all those that
    any task had received before it was requested."""

    def __init__(self, source: TimestampSource) -> None:
        self._source = source
        self._largest = 0
        self.received: list[int] = []
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(50)]

    async def _ask(self) -> None:
        while True:
            before = self._largest
            timestamp = await self._source.get(timeout_seconds=READY_SECONDS)
            assert timestamp > before
            self._largest = max(self._largest, timestamp)
            self.received.append(timestamp)

    async def more(self, count: int) -> None:
        """Returns once this many more have been received."""
        wanted = len(self.received) + count
        while len(self.received) < wanted:
            await asyncio.sleep(0.01)
            for task in self._tasks:
                if task.done():
                    await task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def test_killed_under_load_with_the_clock_set_back_timestamps_still_increase(
    tmp_path: Path,
) -> None:
    """`kill -9` three times. The first run's clock is two hours ahead of the others'."""
    ahead = oracle_process(tmp_path, program="tests.integration.oracle_with_clock_ahead")
    later = oracle_process(tmp_path)
    ahead.start()
    later.listen_on(ahead.wait_ready(READY_SECONDS).address)
    try:
        async with source_at(ahead.address) as source:
            load = Load(source)
            await load.more(5_000)
            for dying in (ahead, later, later):
                highest = max(load.received)
                dying.kill()
                later.start()
                await asyncio.to_thread(later.wait_ready, READY_SECONDS)
                received = len(load.received)
                await load.more(5_000)
                assert min(load.received[received + 50 :]) > highest
            await load.stop()
        assert len(set(load.received)) == len(load.received)
        physical = load.received[-1] >> 18
        lead = physical - MachineClock().wall_milliseconds()
        assert lead == pytest.approx(AHEAD_MILLISECONDS, abs=60_000)
    finally:
        stop(ahead)
        stop(later)


async def test_a_second_oracle_on_the_same_store_is_refused_and_the_first_continues(
    tmp_path: Path,
) -> None:
    with running(oracle_process(tmp_path)) as first:
        line = await asyncio.to_thread(refused_start, tmp_path)
        assert f"in use by another oracle, the one at {first.address}; with --standby" in line
        async with source_at(first.address) as source:
            assert await source.get() < await source.get()
        assert stop(first) == 0


@contextmanager
def two_oracles(directory: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Two oracles: the first one leads, the second stands by."""
    processes = []
    for name in ("first", "second"):
        own = directory / name
        own.mkdir()
        arguments = ["--store", str(directory / "store"), "--standby"]
        arguments += ["--leader-silence-seconds", "1"]
        processes.append(ServiceProcess("oracle", "oracle", arguments, logs=own, run=own))
    with running(processes[0]), running(processes[1]):
        yield processes[0], processes[1]


async def test_a_standby_replaces_a_paused_oracle_then_a_killed_one_and_continues_above_both(
    tmp_path: Path,
) -> None:
    with two_oracles(tmp_path) as (first, second):
        network = GrpcNetwork()
        world = World(MachineClock(), network, machine_random())
        source = TimestampSource(world, [first.address, second.address])
        ask_first = network.unary(first.address, GET_TIMESTAMPS)
        ask_second = network.unary(second.address, GET_TIMESTAMPS)
        with pytest.raises(errors.NotReady, match=f"the one at {first.address} does"):
            await ask_second(GetTimestampsRequest(count=1), 5)
        load = Load(source)
        await load.more(1_000)
        first.pause()
        # Requested while it is paused: by the time it resumes and answers, it no longer leads.
        late = asyncio.ensure_future(ask_first(GetTimestampsRequest(count=1), READY_SECONDS))
        await load.more(1_000)
        first.resume()
        with pytest.raises(errors.NotReady):
            await late
        await load.more(1_000)
        second.kill()
        await load.more(1_000)
        await load.stop()
        assert len(set(load.received)) == len(load.received)
        await source.close()
        await network.close()
        second.start()
        second.wait_ready(READY_SECONDS)


async def test_on_a_full_disk_it_refuses_instead_of_reusing_and_recovers(tmp_path: Path) -> None:
    """Linux's /dev/full stands in for the disk: each write to it fails with ENOSPC."""
    mark_path = tmp_path / "store" / "coordinator" / "oracle" / "e1" / "mark"
    full = mark_path.with_name("mark.new")
    with running(oracle_process(tmp_path, "--window-seconds", "0.5")) as oracle:
        network = GrpcNetwork()
        ask = network.unary(oracle.address, GET_TIMESTAMPS)
        received = [(await ask(GetTimestampsRequest(count=1), 10)).first]
        while not full.is_symlink():
            # The oracle may be writing its next mark under this very name at this moment.
            try:
                full.symlink_to("/dev/full")
            except FileExistsError:
                await asyncio.sleep(0.001)

        async def ask_until_refused() -> None:
            while True:
                received.append((await ask(GetTimestampsRequest(count=1), 10)).first)

        with pytest.raises(errors.StoreUnusable) as refused:
            await ask_until_refused()
        assert refused.value.fault is errors.StoreFault.DISK_FULL
        stored = coordinator.decode(mark_path.read_bytes(), "mark")
        durable = Mark.decode(stored, "mark").milliseconds
        assert received[-1] < durable << 18
        with pytest.raises(errors.StoreUnusable):
            await ask(GetTimestampsRequest(count=1), 10)
        full.unlink()
        async with source_at(oracle.address) as source:
            received.append(await source.get())
        assert received == sorted(set(received))
        await network.close()


async def test_bad_requests_and_garbage_on_the_port_are_survived(tmp_path: Path) -> None:
    with running(oracle_process(tmp_path)) as oracle:
        host, _, port = oracle.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as garbage:
            garbage.sendall(os.urandom(100_000))
        network = GrpcNetwork()
        ask = network.unary(oracle.address, GET_TIMESTAMPS)
        for count in (0, 1_000_001, 2**32 - 1):
            with pytest.raises(errors.InvalidArgument) as refused:
                await ask(GetTimestampsRequest(count=count), 10)
            assert refused.value.field == "count"
        first = await ask(GetTimestampsRequest(count=1_000_000), 10)
        second = await ask(GetTimestampsRequest(count=1), 10)
        assert second.first >= first.first + 1_000_000
        await network.close()


def test_state_that_cannot_be_trusted_is_refused_in_one_line(tmp_path: Path) -> None:
    good = Mark(1_800_000_000_000, "").encode()
    for name, mark, reason in (
        ("damaged", good.replace(b"18", b"17"), "'mark' of the role 'oracle' is damaged"),
        ("newer", good.replace(b"mark 1", b"mark 3"), "written by a newer version: format 3"),
    ):
        left = tmp_path / name / "store" / "coordinator" / "oracle" / "e1.sealed"
        left.mkdir(parents=True)
        (left / "mark").write_bytes(coordinator.encode(mark))
        assert reason in refused_start(tmp_path / name)


def test_a_store_root_of_a_newer_release_is_refused_although_there_is_no_mark(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "cluster.json").write_text('{"cluster_id": "c", "format": 99}')
    assert "has format 99" in refused_start(tmp_path)
    assert not (store / "coordinator").exists()


def test_a_store_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the directory should be")
    assert f"store: {tmp_path / 'store'}" in refused_start(tmp_path)
