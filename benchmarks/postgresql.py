"""The same transactions in PostgreSQL on the same machine, as a point of comparison.

PostgreSQL runs in its own cluster in a temporary directory, with Debian's defaults: every commit is
synced. Each transaction reads one row by its primary key and writes it back, at PostgreSQL's
snapshot isolation level. Each connection runs one transaction at a time. The connections are those
of pgbench, which is written in C, or of psycopg in threads of this process: then both sides of a
comparison are programs in Python.

PostgreSQL refuses to run as root; in that case it runs as the user `postgres`, which its package
creates.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

_SETTINGS = "-c listen_addresses= -c max_connections=200 -c synchronous_commit=on -c fsync=on"
_TRANSACTION = """\
\\set id random(1, {rows})
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT balance FROM accounts WHERE id = :id \\gset
UPDATE accounts SET balance = :balance + 1 WHERE id = :id;
COMMIT;
"""
_READ = "SELECT balance FROM accounts WHERE id = %s"
_WRITE = "UPDATE accounts SET balance = %s WHERE id = %s"
_FILL = """\
CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO accounts SELECT id, 0 FROM generate_series(1, {rows}) AS id;
VACUUM ANALYZE accounts;
CHECKPOINT;
"""
_PAIRS = """\
DROP TABLE IF EXISTS pairs;
CREATE TABLE pairs (key text PRIMARY KEY, value text NOT NULL);
CHECKPOINT;
"""


@dataclass(frozen=True)
class PostgresqlCost:
    """The cost of one slice."""

    transactions: int
    seconds: float
    server_seconds: float
    client_seconds: float

    @property
    def rate(self) -> float:
        return self.transactions / self.seconds

    @property
    def cpu_micros(self) -> float:
        return (self.server_seconds + self.client_seconds) / self.transactions * 1e6


class Postgresql:
    """A running server with a table of accounts."""

    def __init__(self, binaries: Path, directory: Path, postmaster: int) -> None:
        self._binaries = binaries
        self._directory = directory
        self._postmaster = psutil.Process(postmaster)
        self._script = directory / "transaction.sql"
        self._rows = 0

    @property
    def socket_directory(self) -> Path:
        """Where clients find the server: it listens to no network."""
        return self._directory

    def fill(self, rows: int) -> None:
        self._rows = rows
        self._script.write_text(_TRANSACTION.format(rows=rows))
        self._run("psql", "-q", "-v", "ON_ERROR_STOP=1", text=_FILL.format(rows=rows))

    def create_pairs(self) -> None:
        """An empty table `pairs` of key and value, instead of the last one."""
        self._run("psql", "-q", "-v", "ON_ERROR_STOP=1", text=_PAIRS)

    def read_write(self, count: int, connections: int) -> PostgresqlCost:
        """Runs at least `count` transactions."""
        each = -(-count // connections)
        arguments = ["-n", "-M", "prepared", "--max-tries", "100", "-f", str(self._script)]
        arguments += ["-c", str(connections), "-t", str(each)]
        server, client, began = self.server_seconds(), _ended_children_seconds(), time.monotonic()
        self._run("pgbench", *arguments)
        return PostgresqlCost(
            each * connections,
            time.monotonic() - began,
            self.server_seconds() - server,
            _ended_children_seconds() - client,
        )

    def psycopg_read_write(self, count: int, threads: int) -> PostgresqlCost:
        """Runs `count` transactions in `threads` threads of this process, each with a connection.
        All rows are distinct, as in our own slices, so nothing conflicts."""
        rows = random.Random(1).sample(range(1, self._rows + 1), count)
        with ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
            connections = [stack.enter_context(self._connection()) for _ in range(threads)]
            for connection in connections:
                _add_one(connection, rows[0])
            server, client = self.server_seconds(), time.process_time()
            began = time.monotonic()
            shares = [
                pool.submit(_add_to_each, connection, rows[first::threads])
                for first, connection in enumerate(connections)
            ]
            for share in shares:
                share.result()
            return PostgresqlCost(
                count,
                time.monotonic() - began,
                self.server_seconds() - server,
                time.process_time() - client,
            )

    def psycopg_latencies(self, count: int) -> list[float]:
        """Seconds taken by each of `count` transactions of psycopg, one after another."""
        rows = random.Random(2).sample(range(1, self._rows + 1), count + 1)
        seconds = []
        with self._connection() as connection:
            for row in rows:
                began = time.perf_counter()
                _add_one(connection, row)
                seconds.append(time.perf_counter() - began)
        return seconds[1:]

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection]:
        where = str(self._directory)
        with psycopg.connect(host=where, user="postgres", dbname="postgres") as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            # As pgbench with -M prepared: the statements are prepared at their first use.
            connection.prepare_threshold = 0
            yield connection

    def server_seconds(self) -> float:
        """CPU of the postmaster and of its child processes, including those that have ended."""
        while True:
            children = self._postmaster.children(recursive=True)
            try:
                living = [one.cpu_times() for one in (self._postmaster, *children)]
            except psutil.NoSuchProcess:
                continue  # a connection of the last slice has just ended
            if self._postmaster.children(recursive=True) == children:
                ended = living[0].children_user + living[0].children_system
                return sum(times.user + times.system for times in living) + ended

    def _run(self, program: str, *arguments: str, text: str = "") -> None:
        command = [str(self._binaries / program), "-h", str(self._directory), "-U", "postgres"]
        command += [*arguments, "postgres"]
        _run(command, text=text)


def found() -> Path | None:
    """Where PostgreSQL's programs are; None when it is not installed."""
    packaged = Path("/usr/lib/postgresql").glob("*/bin")
    in_path = shutil.which("pg_ctl")
    candidates = sorted(packaged, reverse=True)
    if in_path is not None:
        candidates.append(Path(in_path).resolve().parent)
    for binaries in candidates:
        if all((binaries / name).exists() for name in ("initdb", "pg_ctl", "pgbench", "psql")):
            return binaries
    return None


@contextmanager
def running(binaries: Path) -> Iterator[Postgresql]:
    """A new server that leaves nothing behind."""
    directory = Path(tempfile.mkdtemp(prefix="bench-postgresql-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(directory, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    data = directory / "data"
    control = [*as_user, str(binaries / "pg_ctl"), "-w", "-s", "-D", str(data)]
    log = str(directory / "log")
    try:
        _run([*as_user, str(binaries / "initdb"), "-A", "trust", "-U", "postgres", "-D", str(data)])
        _run([*control, "-l", log, "-o", f"-k {directory} {_SETTINGS}", "start"])
        try:
            postmaster = int((data / "postmaster.pid").read_text().split()[0])
            yield Postgresql(binaries, directory, postmaster)
        finally:
            _run([*control, "-m", "fast", "stop"])
    finally:
        shutil.rmtree(directory)


def _add_to_each(connection: psycopg.Connection, rows: list[int]) -> None:
    for row in rows:
        _add_one(connection, row)


def _add_one(connection: psycopg.Connection, row: int) -> None:
    with connection.transaction(), connection.cursor() as cursor:
        found = cursor.execute(_READ, (row,)).fetchone()
        if found is None:
            raise RuntimeError(f"the benchmark measures nothing: there is no row {row}")
        cursor.execute(_WRITE, (found[0] + 1, row))


def _ended_children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(command: list[str], text: str = "") -> None:
    subprocess.run(command, check=True, input=text, text=True, stdout=subprocess.DEVNULL, cwd="/")
