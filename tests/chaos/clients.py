"""Client processes, from outside: started, stopped in the middle of a commit, killed, replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from percolator import Row, aio
from percolator.errors import PercolatorError
from tests.chaos.client import Life
from tests.integration.observed_orders import orders, packed, placed, shipped
from tests.isolation.history import History, read_histories

STOP_SECONDS = 45.0
"""Longer than the longest call and the longest close together."""
_CAUGHT_SECONDS = 30.0
_POLL_SECONDS = 0.01
_WRITES = ("put", "delete", "lock", "append")


class ClientFailed(Exception):
    """A client ended by itself: it saw a broken promise or an unexpected error."""


class Follower:
    """Reads a history while it is being written, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.commits = 0
        self.in_progress: set[tuple[str, int]] = set()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for line in complete.splitlines():
            self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        transaction = record["session"], record["number"]
        commit_returned = record["instants"][-1]
        if commit_returned is None and any(o[0] in _WRITES for o in record["operations"]):
            self.in_progress.add(transaction)
        else:
            self.in_progress.discard(transaction)
            self.commits += record["commit_ts"] > 0


class Client:
    """The lives of one client, one after another."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.lives = [life]
        self.disturbed = False
        """True while a fault is active, so that it cannot be expected to work."""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._seen = Follower(self.life.history)
        with self.life.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.life.program, self.life.argument()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def name(self) -> str:
        return self.life.name

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def require_alive(self) -> None:
        if self._process.poll() is not None:
            raise ClientFailed(f"{self.name} exited with {self._process.returncode}: {self.log()}")

    def log(self) -> str:
        return self.life.log.read_text(errors="replace")

    def commits(self) -> int:
        """The number of commits acknowledged in this life so far."""
        self._seen.read()
        return self._seen.commits

    def commits_in_progress(self) -> int:
        """The number of commits sent and not answered now. Only for a stopped client."""
        self._seen.read()
        return len(self._seen.in_progress)

    def catch_in_a_commit(self) -> int:
        """Stops the process (SIGSTOP) while commits are in progress; returns how many."""
        deadline = time.monotonic() + _CAUGHT_SECONDS
        while time.monotonic() < deadline:
            self.require_alive()
            self.signal(signal.SIGSTOP)
            # The signal takes effect some time after the call; only then is the process stopped.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
            if caught := self.commits_in_progress():
                return caught
            self.signal(signal.SIGCONT)
            time.sleep(_POLL_SECONDS)
        raise ClientFailed(f"{self.name} commits nothing")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def begin_another_life(self) -> None:
        self.life = replace(self.life, number=self.life.number + 1)
        self.lives.append(self.life)
        self._process = self._start()

    def stop(self) -> None:
        """Lets it finish what it has begun, and requires a clean end."""
        self.require_alive()
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise ClientFailed(f"{self.name} does not come to rest") from None
        if code:
            raise ClientFailed(f"{self.name} exited with {code}: {self.log()}")


def lives(
    address: str, directory: Path, workload: str, *, seed: int, count: int, sessions: int
) -> list[Life]:
    """The first lives of clients that only differ in their names."""
    return [
        Life(address, f"client-{n}", 1, workload, sessions, str(directory), seed)
        for n in range(1, count + 1)
    ]


class Clients:
    """All clients of a run. Those still alive at the end are killed, whatever happened."""

    def __init__(self, lives: Sequence[Life]) -> None:
        for directory in {life.directory for life in lives}:
            Path(directory).mkdir()
        self.all = [Client(life) for life in lives]

    def wait_until_all_commit(self, seconds: float) -> None:
        """Returns when every client has more acknowledged commits than when this was called."""
        before = {client.name: client.commits() for client in self.all}
        deadline = time.monotonic() + seconds
        for client in self.all:
            while client.commits() <= before[client.name]:
                client.require_alive()
                if time.monotonic() > deadline:
                    raise ClientFailed(f"{client.name} commits nothing: {client.log()}")
                time.sleep(_POLL_SECONDS)

    async def all_commit(self) -> None:
        """Returns when every client to which nothing is being done has committed again."""
        before = {client.life: client.commits() for client in self.all}
        for client in self.all:
            # One that was killed meanwhile has another life, which begins with no commits.
            while not client.disturbed and client.commits() <= before.get(client.life, 0):
                client.require_alive()
                await asyncio.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        for client in self.all:
            client.stop()

    def kill(self) -> None:
        for client in self.all:
            client.kill()

    def history(self) -> History:
        """History recorded by the clients whose workload the isolation checker judges."""
        return read_histories(self.logs_of("tests.chaos.client"))

    def logs_of(self, program: str) -> list[Path]:
        """The files in which the clients of a program recorded their transactions."""
        lives = [life for life in self._lives() if life.program == program]
        return [life.history for life in lives if life.history.exists()]

    def claims(self) -> dict[tuple[str, int], bool]:
        """Outcomes that the library later reported, by session and number: true if committed."""
        claims: dict[tuple[str, int], bool] = {}
        for life in self._lives():
            if life.claims.exists():
                # A line that a kill cut off is no claim: the client did not act on it.
                for line in life.claims.read_text().split("\n")[:-1]:
                    session, number, committed = json.loads(line)
                    claims[session, number] = committed
        return claims

    def logs(self) -> dict[str, str]:
        return {life.log.name: life.log.read_text(errors="replace") for life in self._lives()}

    def _lives(self) -> list[Life]:
        return [life for client in self.all for life in client.lives]


# Orders that are placed while processes are killed; workers' observers handle each once.

PAUSE_SECONDS = 0.1
ANSWERED_SECONDS = 60.0
_ORDERS_POLL_SECONDS = 0.02


class Shop:
    """Places one order after another, each in its own row."""

    def __init__(self, database: aio.Database) -> None:
        self._database = database
        self._next = 0
        self._placed: set[str] = set()
        """The rows of orders whose transactions are known to have committed."""
        self._stopping = False

    @property
    def placed(self) -> int:
        """The number of orders that are known to have been placed."""
        return len(self._placed)

    async def open(self) -> None:
        await self._database.create_table(orders, splits=["5"])

    async def work(self) -> None:
        """Places orders until told to stop."""
        while not self._stopping:
            await self.place()
            await asyncio.sleep(PAUSE_SECONDS)

    async def place(self) -> str:
        """Places the next order and returns its row. One of unknown outcome is placed again."""
        row = f"{self._next % 10}-{self._next}"
        number = self._next
        self._next += 1
        while True:
            try:
                async with self._database.transaction() as tx:
                    if await tx.get(row, placed) is None:
                        await tx.set(row, placed, number)
            except PercolatorError:
                await asyncio.sleep(_ORDERS_POLL_SECONDS)
            else:
                self._placed.add(row)
                return row

    async def handled(self, row: str) -> None:
        """Returns when both observers, one after the other, have handled the order."""
        while True:
            try:
                async with self._database.snapshot() as snapshot:
                    if await snapshot.get(row, shipped) is not None:
                        return
            except PercolatorError:
                pass  # the probe goes on: what matters is how long it takes
            await asyncio.sleep(_ORDERS_POLL_SECONDS)

    def stop(self) -> None:
        self._stopping = True

    async def problems(self) -> list[str]:
        """Which orders are lost, or not handled exactly once, when the observers have finished.

        A probe that was cancelled at the end may or may not have placed its order: it counts if it
        is stored.
        """
        deadline = time.monotonic() + ANSWERED_SECONDS
        while unhandled := _unhandled(found := await self._stored()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        stored = {row.key for row in found if placed in row}
        return [
            *(f"order {row} was placed and is not stored" for row in self._placed - stored),
            *(
                f"order {row.key} is handled and was never placed"
                for row in found
                if row.key not in stored | self._placed
            ),
            *(
                f"order {row}: packed and shipped {times} times, of {len(found)} orders"
                for row, times in unhandled.items()
            ),
        ]

    async def _stored(self) -> list[Row[str]]:
        columns = [placed, packed, shipped]
        async with self._database.snapshot() as snapshot:
            return [row async for row in snapshot.scan(orders, columns=columns)]


def _unhandled(found: list[Row[str]]) -> dict[str, tuple[int, int]]:
    """The orders that were not handled once, with how often each observer handled them."""
    times = {row.key: (row.get(packed, 0), row.get(shipped, 0)) for row in found}
    return {row: both for row, both in times.items() if both != (1, 1)}
