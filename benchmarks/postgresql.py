"""Transactions in PostgreSQL on the same machine, as a point of comparison.

PostgreSQL runs in its own cluster in a temporary directory, with Debian's defaults: every commit is
synced. Transactions run at PostgreSQL's snapshot isolation level, and conflicts are retried. There
are two kinds (`Work`): one reads a row by its primary key and writes it back, the other transfers
between two random rows. Each connection runs one transaction at a time. The connections are those
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
from psycopg import errors

_SETTINGS = "-c listen_addresses= -c max_connections=200 -c synchronous_commit=on -c fsync=on"
_READ_WRITE_SCRIPT = """\
\\set id random(1, {rows})
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT balance FROM accounts WHERE id = :id \\gset
UPDATE accounts SET balance = :balance + 1 WHERE id = :id;
COMMIT;
"""
_TRANSFER_SCRIPT = """\
\\set source random(1, {rows})
\\set target 1 + (:source - 1 + random(1, {rows} - 1)) % {rows}
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT balance AS source_balance FROM accounts WHERE id = :source \\gset
SELECT balance AS target_balance FROM accounts WHERE id = :target \\gset
UPDATE accounts SET balance = :source_balance - 1 WHERE id = :source;
UPDATE accounts SET balance = :target_balance + 1 WHERE id = :target;
COMMIT;
"""
_READ = "SELECT balance FROM accounts WHERE id = %s"
_WRITE = "UPDATE accounts SET balance = %s WHERE id = %s"
_FILL = """\
DROP TABLE IF EXISTS accounts;
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
    latencies: tuple[float, ...] = ()
    """Seconds of each transaction, its retries included."""

    @property
    def rate(self) -> float:
        return self.transactions / self.seconds

    @property
    def cpu_micros(self) -> float:
        return (self.server_seconds + self.client_seconds) / self.transactions * 1e6


@dataclass(frozen=True)
class Work:
    """One kind of transaction: as a script of pgbench, and as a function for psycopg."""

    script: str
    rows_each: int
    run: Callable[[psycopg.Connection, Sequence[int]], None]
    """Runs it once, on `rows_each` distinct rows. The caller retries it after a conflict."""


class Postgresql:
    """A running server with a table of accounts."""

    def __init__(self, binaries: Path, directory: Path, postmaster: int) -> None:
        self._binaries = binaries
        self._directory = directory
        self._postmaster = psutil.Process(postmaster)
        self._rows = 0

    @property
    def socket_directory(self) -> Path:
        """Where clients find the server: it listens to no network."""
        return self._directory

    def fill(self, rows: int) -> None:
        self._rows = rows
        self._run("psql", "-q", "-v", "ON_ERROR_STOP=1", text=_FILL.format(rows=rows))

    def create_pairs(self) -> None:
        """An empty table `pairs` of key and value, instead of the last one."""
        self._run("psql", "-q", "-v", "ON_ERROR_STOP=1", text=_PAIRS)

    def run_pgbench(self, work: Work, count: int, connections: int) -> PostgresqlCost:
        """Runs at least `count` transactions."""
        each = -(-count // connections)
        script, logs = self._directory / "transaction.sql", self._directory / "pgbench"
        script.write_text(work.script.format(rows=self._rows))
        arguments = ["-n", "-M", "prepared", "--max-tries", "1000", "-f", str(script)]
        arguments += ["-c", str(connections), "-t", str(each), "-l", "--log-prefix", str(logs)]
        server, client, began = self.server_seconds(), _ended_children_seconds(), time.monotonic()
        self._run("pgbench", *arguments)
        seconds = time.monotonic() - began
        latencies = []
        for log in self._directory.glob("pgbench.*"):
            # client, transaction, microseconds, and when it ended
            latencies += [int(line.split()[2]) / 1e6 for line in log.read_text().splitlines()]
            log.unlink()
        return PostgresqlCost(
            each * connections,
            seconds,
            self.server_seconds() - server,
            _ended_children_seconds() - client,
            tuple(latencies),
        )

    def run_psycopg(self, work: Work, count: int, threads: int, seed: int = 1) -> PostgresqlCost:
        """Runs `count` transactions in `threads` threads of this process, each with a connection.

        The rows of transactions that read and write one row are distinct, as in our own slices.
        """
        chance = random.Random(seed)
        everything = range(1, self._rows + 1)
        rows: list[tuple[int, ...]]
        if work.rows_each == 1:
            rows = [(row,) for row in chance.sample(everything, count)]
        else:
            rows = [tuple(chance.sample(everything, work.rows_each)) for _ in range(count)]
        with ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
            connections = [stack.enter_context(self._connection()) for _ in range(threads)]
            for connection in connections:
                _retried(work, connection, rows[0])
            server, client = self.server_seconds(), time.process_time()
            began = time.monotonic()
            shares = [
                pool.submit(_timed, work, connection, rows[first::threads])
                for first, connection in enumerate(connections)
            ]
            latencies = [seconds for share in shares for seconds in share.result()]
            return PostgresqlCost(
                count,
                time.monotonic() - began,
                self.server_seconds() - server,
                time.process_time() - client,
                tuple(latencies),
            )

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
def running_if_installed() -> Iterator[Postgresql | None]:
    binaries = found()
    if binaries is None:
        print("PostgreSQL is not installed (Debian: apt-get install postgresql); skipping its rows")
        yield None
    else:
        with running(binaries) as server:
            yield server


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


def _timed(
    work: Work, connection: psycopg.Connection, portions: Sequence[Sequence[int]]
) -> list[float]:
    """Seconds of each transaction, one after another."""
    latencies = []
    for rows in portions:
        began = time.perf_counter()
        _retried(work, connection, rows)
        latencies.append(time.perf_counter() - began)
    return latencies


def _retried(work: Work, connection: psycopg.Connection, rows: Sequence[int]) -> None:
    while True:
        try:
            work.run(connection, rows)
        except (errors.SerializationFailure, errors.DeadlockDetected):
            continue  # the transaction was rolled back: another one committed first
        else:
            return


def _add_one(connection: psycopg.Connection, rows: Sequence[int]) -> None:
    (row,) = rows
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute(_WRITE, (_balance(cursor, row) + 1, row))


def _transfer(connection: psycopg.Connection, rows: Sequence[int]) -> None:
    source, target = rows
    with connection.transaction(), connection.cursor() as cursor:
        from_source, from_target = _balance(cursor, source), _balance(cursor, target)
        cursor.execute(_WRITE, (from_source - 1, source))
        cursor.execute(_WRITE, (from_target + 1, target))


def _balance(cursor: psycopg.Cursor, row: int) -> int:
    found = cursor.execute(_READ, (row,)).fetchone()
    if found is None:
        raise RuntimeError(f"the benchmark measures nothing: there is no row {row}")
    return int(found[0])


READ_WRITE = Work(_READ_WRITE_SCRIPT, 1, _add_one)
TRANSFER = Work(_TRANSFER_SCRIPT, 2, _transfer)


def _ended_children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(command: list[str], text: str = "") -> None:
    subprocess.run(command, check=True, input=text, text=True, stdout=subprocess.DEVNULL, cwd="/")
