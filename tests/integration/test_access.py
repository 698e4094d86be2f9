"""Every remote procedure of every service, tried with every kind of credentials.

The list is percolator/wire/methods.py: a new procedure is tried as soon as it exists, and fails
here until its service is known and its role is decided.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

import percolator
from percolator import Column, Table, aio, codecs
from percolator.errors import (
    CellAddress,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    SnapshotTooOld,
    Unauthenticated,
    Unavailable,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.routing.cells import APPLIED, CellMutation
from percolator.services.local.authority import Authority, files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import gateway_pb2
from percolator.v1.frames_pb2 import FramesHello
from percolator.v1.tabletserver_pb2 import WatchNotificationsRequest
from percolator.wire import methods, tls
from percolator.wire.addresses import parse_host_port
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import (
    PLAIN_TEXT,
    SCHEME,
    TLS_VARIABLES,
    TOKEN_VARIABLE,
    Credentials,
)
from percolator.wire.frames import FRAMED, FrameConnection, NotFrames
from percolator.wire.roles import CHECKS_RIGHTS, REQUIRED, Role
from percolator.wire.through import ThroughNetwork
from percolator.wire.tls import CLUSTER_NAME, Tls
from percolator.wire.tokens import Entry, Right, Rights, new_token, token_hash
from percolator.world import Network, StreamMethod, UnaryMethod
from tests.integration.networks import grpc_network
from tests.unfinished import Unfinished

PROCESS_OF = {
    "ClusterService": "master",
    "MasterService": "master",
    "OracleService": "oracle",
    "LockService": "lockservice",
    "TabletServerService": "tabletserver-1",
    "FrameService": "tabletserver-1",
    "GatewayService": "gateway",
    "RowStoreService": "gateway",
}
SECONDS = 5.0
WITHDRAWN_SECONDS = 15.0

Method = UnaryMethod[Any, Any] | StreamMethod[Any, Any]
METHODS: list[Method] = [
    value for value in vars(methods).values() if isinstance(value, UnaryMethod | StreamMethod)
]


@dataclass(frozen=True)
class Running:
    cluster: LocalCluster
    certificates: Path
    audit: Path
    """The directory of the audit files."""

    def token(self, role: str) -> str:
        return (self.certificates / "client" / f"{role}.token").read_text().strip()

    def credentials(self, directory: str = "client", token: str = "") -> Credentials:
        return Credentials(material(files_in(self.certificates / directory)), token)

    def address_of(self, method: Method) -> str:
        service = method.path.split("/")[1].rpartition(".")[2]
        return self.cluster.processes[PROCESS_OF[service]].address


def material(files: Tls) -> tls.TlsMaterial:
    return tls.load(files, "tls_{}".format, serves=False)


def untried(files: Tls) -> tls.TlsMaterial:
    ca, certificate, key = (
        Path(name).read_bytes() for name in (files.ca, files.certificate, files.key)
    )
    return tls.TlsMaterial(files, ca, certificate, key)


def shown_by(process: ServiceProcess) -> list[str]:
    """Its log, and what every process list shows about it."""
    about = Path(f"/proc/{process.pid}")
    files = (process.log, about / "cmdline", about / "environ")
    return [file.read_text(errors="replace") for file in files]


@pytest.fixture(scope="module", name="running")
def _running(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("access")
    with ExitStack() as stack:
        # Only of this cluster: each process needs an audit file of its own.
        with pytest.MonkeyPatch.context() as environment:
            for service in ("master", "gateway"):
                name = f"PERCOLATOR_{service.upper()}_AUDIT"
                environment.setenv(name, str(directory / f"{service}.audit"))
            cluster = stack.enter_context(
                LocalCluster(directory, tablet_servers=1, gateways=1, certificates=certificates)
            )
        yield Running(cluster, certificates, directory)


async def outcome(network: Network, address: str, method: Method) -> PercolatorError | None:
    """The result of an empty request: None or an error about its content if access is granted."""
    try:
        if isinstance(method, UnaryMethod):
            await network.unary(address, method)(method.request(), SECONDS)
        else:
            async for _ in network.stream(address, method)(method.request(), SECONDS):
                break
    except PercolatorError as error:
        return error
    return None


async def outcomes(running: Running, credentials: Credentials) -> dict[str, PercolatorError | None]:
    async with grpc_network(credentials) as network:
        return {
            method.path: await outcome(network, running.address_of(method), method)
            for method in METHODS
        }


def kinds(found: dict[str, PercolatorError | None]) -> dict[str, type[PercolatorError] | None]:
    return {path: None if error is None else type(error) for path, error in found.items()}


async def in_frames(
    running: Running, credentials: Credentials
) -> dict[str, type[PercolatorError] | None]:
    """Results of empty requests that travel in frames, by path."""
    found: dict[str, type[PercolatorError] | None] = {}
    for name in ("oracle", "tabletserver-1"):
        ready = running.cluster.processes[name].wait_ready(SECONDS)
        at = parse_host_port(ready.frames_address, "frames_address")
        hello = FramesHello(server_id=ready.server_id)
        if credentials.token:
            hello.authorization = SCHEME + credentials.token
        context = credentials.tls.client_context if credentials.tls is not None else None
        connection = await FrameConnection.open(at.host, at.port, hello, context, SECONDS)
        for path in filter(connection.takes, FRAMED):
            try:
                await connection.call(path, b"", SECONDS)
            except PercolatorError as error:
                found[path] = type(error)
            else:
                found[path] = None
        connection.close()
    assert set(found) == FRAMED
    return found


Attempt = Callable[[Running], Credentials]
UNKNOWN: dict[str, Attempt] = {
    "no token": lambda running: running.credentials(),
    "a wrong token": lambda running: running.credentials(token=secrets.token_urlsafe(32)),
    "a token and more": lambda running: running.credentials(token=running.token("admin") + "x"),
    "a server that shows a wrong token": lambda running: running.credentials("cluster", "x"),
}


@pytest.mark.parametrize("attempt", UNKNOWN)
async def test_access_requires_a_token_that_the_cluster_knows(
    running: Running, attempt: str
) -> None:
    found = kinds(await outcomes(running, UNKNOWN[attempt](running)))
    assert found == dict.fromkeys(found, Unauthenticated)
    framed = await in_frames(running, UNKNOWN[attempt](running))
    assert framed == dict.fromkeys(FRAMED, Unauthenticated)


@pytest.mark.parametrize("role", [Role.CLIENT, Role.ADMIN, Role.SERVER])
async def test_each_role_may_call_exactly_what_it_is_permitted_to(
    running: Running, role: Role
) -> None:
    if role is Role.SERVER:
        credentials = running.credentials("cluster")
    else:
        credentials = running.credentials(token=running.token(role.name.lower()))
    found = await outcomes(running, credentials)
    denied = {path for path, error in found.items() if isinstance(error, PermissionDenied)}
    assert denied == {path for path in found if REQUIRED[path] > role}
    assert Unauthenticated not in kinds(found).values()
    assert await in_frames(running, credentials) == {path: kinds(found)[path] for path in FRAMED}


async def test_a_certificate_of_another_authority_is_refused(
    running: Running, tmp_path: Path
) -> None:
    stranger = Authority("stranger").issue(tmp_path / "stranger", tls.CLUSTER_NAME)
    trusting = Tls(files_in(running.certificates / "client").ca, stranger.certificate, stranger.key)
    # It trusts the cluster; the cluster does not trust it.
    for credentials in (PLAIN_TEXT, Credentials(untried(trusting))):
        found = kinds(await outcomes(running, credentials))
        assert found == dict.fromkeys(found, Unavailable)
    context = ssl.create_default_context(cafile=trusting.ca)
    context.load_cert_chain(trusting.certificate, trusting.key)
    known = material(files_in(running.certificates / "client"))
    for tls_or_none in (None, replace(known, client_context=context)):
        with pytest.raises((NotFrames, OSError)):
            await in_frames(running, Credentials(tls_or_none, running.token("admin")))


async def test_a_client_without_a_certificate_is_refused(running: Running) -> None:
    ca = material(files_in(running.certificates / "client")).ca
    option = ("grpc.ssl_target_name_override", tls.CLUSTER_NAME)
    for process in running.cluster.processes.values():
        async with grpc.aio.secure_channel(
            process.address, grpc.ssl_channel_credentials(ca), options=[option]
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_refuses_a_server_of_another_name(running: Running, tmp_path: Path) -> None:
    impostor = Authority("impostor")
    server = grpc.aio.server()
    files = impostor.issue(tmp_path / "impostor", tls.CLUSTER_NAME)
    own = material(files)
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(own.key, own.certificate)])
    )
    await server.start()
    try:
        async with grpc_network(running.credentials(token=running.token("admin"))) as network:
            error = await outcome(network, f"127.0.0.1:{port}", methods.DESCRIBE)
    finally:
        await server.stop(None)
    assert isinstance(error, Unavailable)
    assert "CERTIFICATE_VERIFY_FAILED" in error.message


async def through(running: Running, credentials: Credentials) -> dict[str, PercolatorError | None]:
    """Results of the calls of `outcomes`, made through the gateway."""
    gateway = running.cluster.processes["gateway"].address
    async with grpc_network(credentials) as network:
        behind = ThroughNetwork(network, [gateway])
        return {
            method.path: await outcome(behind, running.address_of(method), method)
            for method in METHODS
        }


@pytest.mark.parametrize("role", [None, Role.CLIENT, Role.ADMIN])
async def test_a_gateway_grants_no_access_that_a_direct_call_would_not_have(
    running: Running, role: Role | None
) -> None:
    token = running.token(role.name.lower()) if role else "wrong"
    found = await through(running, running.credentials(token=token))
    if role is None:
        assert kinds(found) == dict.fromkeys(found, Unauthenticated)
        return
    denied = {path for path, error in found.items() if isinstance(error, PermissionDenied)}
    assert denied == {path for path in found if REQUIRED[path] > role}


async def test_a_call_forwarded_by_a_gateway_does_not_count_as_a_servers_own(
    running: Running,
) -> None:
    """Otherwise every client behind a gateway would have a server's permissions."""
    own = running.credentials("cluster").tls
    assert own is not None
    async with grpc.aio.secure_channel(
        running.cluster.processes["master"].address,
        grpc.ssl_channel_credentials(own.ca, own.key, own.certificate),
        options=[("grpc.ssl_target_name_override", tls.CLUSTER_NAME)],
    ) as channel:
        describe = channel.unary_unary(methods.DESCRIBE.path)
        await describe(b"", timeout=SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(b"", timeout=SECONDS, metadata=(("percolator-server", "any"),))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_removed_from_the_file_is_refused_within_seconds(
    running: Running,
) -> None:
    tokens = running.certificates / "cluster" / "tokens.toml"
    before = read_text(tokens)
    table = Table("withdrawn")
    column = table.column("value", codecs.integer)
    files = files_in(running.certificates / "client")
    address = running.cluster.address
    async with aio.connect(address, tls=files, token=running.token("admin")) as operator:
        await operator.create_table(table)
    async with aio.connect(address, tls=files, token=running.token("client")) as database:

        async def write(tx: aio.Transaction) -> None:
            await tx.set("row", column, 1)

        for _ in range(20):
            # Most of them in frames, whose connection has shown its token once.
            await database.run(write)
        replace_text(tokens, before[before.index("[admin]") :])
        try:
            deadline = time.monotonic() + WITHDRAWN_SECONDS
            while await is_let_in(database, write):
                assert time.monotonic() < deadline, "a withdrawn token is accepted"
        finally:
            replace_text(tokens, before)
        deadline = time.monotonic() + WITHDRAWN_SECONDS
        while not await is_let_in(database, write):
            assert time.monotonic() < deadline, "a token that was put back is not accepted"


async def put_back(running: Running, tokens: str) -> None:
    """Restores the file of tokens, and waits until all services have read it: the next test needs
    them."""
    replace_text(running.certificates / "cluster" / "tokens.toml", tokens)
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    credentials = running.credentials(token=running.token("client"))
    while any(
        isinstance(error, Unauthenticated)
        for error in (await outcomes(running, credentials)).values()
    ):
        assert time.monotonic() < deadline, "a token that was put back is not accepted"


async def test_a_token_revoked_in_mid_transaction_commits_nothing(running: Running) -> None:
    tokens = running.certificates / "cluster" / "tokens.toml"
    before = read_text(tokens)
    tables = [Table(name) for name in ("half", "other-half")]
    columns = [table.column("value", codecs.integer) for table in tables]
    files, address = files_in(running.certificates / "client"), running.cluster.address

    async def write_while_revoked(database: aio.Database) -> None:
        async with database.transaction() as tx:
            for column in columns:
                assert await tx.get("row", column) is None
                tx.set("row", column, 1)
            replace_text(tokens, before[before.index("[admin]") :])
            deadline = time.monotonic() + WITHDRAWN_SECONDS
            while await may_read(database, columns):
                assert time.monotonic() < deadline, "a revoked token is accepted"

    async with (
        aio.connect(address, tls=files, token=running.token("admin")) as operator,
        aio.connect(address, tls=files, token=running.token("client")) as database,
    ):
        for table in tables:
            await operator.create_table(table)
        try:
            with pytest.raises(Unauthenticated, match="does not know the token"):
                await write_while_revoked(database)
        finally:
            await put_back(running, before)
        async with operator.snapshot() as snapshot:
            assert [await snapshot.get("row", column) for column in columns] == [None, None]


async def test_a_token_for_some_tables_works_with_a_gateway_and_is_audited(
    running: Running,
) -> None:
    tokens = running.certificates / "cluster" / "tokens.toml"
    before = read_text(tokens)
    files, address = files_in(running.certificates / "client"), running.cluster.address
    async with aio.connect(address, tls=files, token=running.token("admin")) as operator:
        for name in ("granted", "denied"):
            await operator.create_table(Table(name))
    token = new_token()
    rights = Rights((Right("granted", b"eu/"),), (Right("granted", b"eu/"),))
    entry = Entry("shop", Role.CLIENT, token_hash(token), rights=rights)
    gateway = running.cluster.processes["gateway"].address

    def put(table: str, row: bytes) -> gateway_pb2.CellWrite:
        kind = gateway_pb2.CellWrite.KIND_PUT
        return gateway_pb2.CellWrite(kind=kind, table=table, row=row, column=b"c", value=b"v")

    replace_text(tokens, before + "\n" + entry.text())
    try:
        async with grpc_network(running.credentials(token=token)) as network:

            async def call(method: UnaryMethod[Any, Any], request: Any) -> Any:
                return await network.unary(gateway, method)(request, SECONDS)

            deadline = time.monotonic() + WITHDRAWN_SECONDS
            while await outcome(network, gateway, methods.BEGIN) is not None:
                assert time.monotonic() < deadline, "a new token is not accepted"
            start = (await call(methods.BEGIN, gateway_pb2.BeginRequest())).start_timestamp
            commit = gateway_pb2.CommitRequest(start_timestamp=start)
            commit.writes.extend([put("granted", b"eu/1"), put("denied", b"a")])
            with pytest.raises(PermissionDenied, match=r"may not write .* of table 'denied'"):
                await call(methods.COMMIT, commit)
            del commit.writes[1]
            await call(methods.COMMIT, commit)
            admin = running.credentials(token=running.token("admin"))
            async with grpc_network(admin) as others:
                begin = others.unary(gateway, methods.BEGIN)
                begun = await begin(gateway_pb2.BeginRequest(), SECONDS)
                commit.start_timestamp = begun.start_timestamp
            with pytest.raises(SnapshotTooOld, match="has handed out"):
                await call(methods.COMMIT, commit)
            start = (await call(methods.BEGIN, gateway_pb2.BeginRequest())).start_timestamp
            get = gateway_pb2.GetRequest(start_timestamp=start)
            get.rows.add(table="granted", row=b"eu/1")
            assert (await call(methods.GET, get)).rows[0].cells[0].value == b"v"
        # Some processes may not have read the file again yet.
        refused = (PermissionDenied, Unauthenticated)
        for path, error in (await outcomes(running, running.credentials(token=token))).items():
            assert path in CHECKS_RIGHTS or isinstance(error, refused), (path, error)
    finally:
        await put_back(running, before)
    created = lines_of(running.audit / "master.audit", methods.CREATE_TABLE)
    assert [
        line["who"] for line in created if line.get("request", {}).get("name") == "granted"
    ] == ["admin"]
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    gateway_audit, refusal = running.audit / "gateway.audit", ("shop", "PERMISSION_DENIED")
    while refusal not in [
        (line["who"], line["outcome"]) for line in lines_of(gateway_audit, methods.COMMIT)
    ]:
        assert time.monotonic() < deadline, "a refusal is in no line"
        await asyncio.sleep(0.1)


async def test_the_library_works_with_a_token_for_some_tables(running: Running) -> None:
    tokens = running.certificates / "cluster" / "tokens.toml"
    before = read_text(tokens)
    files, address = files_in(running.certificates / "client"), running.cluster.address
    stock, orders, secret = Table("stock"), Table("orders"), Table("secret")
    count = stock.column("count", codecs.integer, indexed=True)
    order, hidden = orders.column("of", codecs.text), secret.column("x", codecs.integer)
    token = new_token()
    both = (Right("stock"), Right("orders"))
    entry = Entry("shop", Role.CLIENT, token_hash(token), rights=Rights(both, both))

    async def sell(tx: aio.Transaction) -> None:
        tx.set("eu/1", count, 1)
        tx.set("o1", order, "eu/1")

    async with aio.connect(address, tls=files, token=running.token("admin")) as operator:
        await operator.create_table(stock, change_feed=True)
        await operator.create_tables([orders, secret])
        await operator.run(lambda tx: set_one(tx, "row", hidden, 7))
        replace_text(tokens, before + "\n" + entry.text())
        try:
            database = await connected_within(address, files, token, order)
            async with database:
                start = await database.timestamp()
                await database.run(sell)
                async with database.snapshot() as snapshot:
                    assert [row.key async for row in snapshot.scan(stock)] == ["eu/1"]
                    assert [row.key async for row in snapshot.find(count, 1)] == ["eu/1"]
                    assert await snapshot.get("o1", order) == "eu/1"
                    with pytest.raises(PermissionDenied, match="no right to table 'secret'"):
                        await snapshot.get("row", hidden)
                until = await database.timestamp()
                async with database.changes(stock, after=start, until=until) as changes:
                    assert [change.key async for change in changes] == ["eu/1"]
                assert await database.tables() == ["orders", "stock"]
                await leave_lock(operator, "o-forward", commits=True)
                await leave_lock(operator, "o-back", commits=False)
                async with database.snapshot() as snapshot:
                    assert await snapshot.get("o-forward", order) == "left"
                    assert await snapshot.get("o-back", order) is None
                await leave_lock(operator, "o-write", commits=False)
                await database.run(lambda tx: set_one(tx, "o-write", order, "new"))
                async with database.snapshot() as snapshot:
                    assert await snapshot.get("o-write", order) == "new"
                replace_text(tokens, before)
                deadline = time.monotonic() + WITHDRAWN_SECONDS
                while await may_read(database, [order]):
                    assert time.monotonic() < deadline, "a revoked token is accepted"
        finally:
            await put_back(running, before)


async def set_one(tx: aio.Transaction, row: str, column: Column[Any], value: object) -> None:
    tx.set(row, column, value)


async def connected_within(
    address: str, files: Tls, token: str, column: Column[Any]
) -> aio.Database:
    """A connection with a new token, once all services have read it."""
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    while True:
        try:
            database = await aio.connect(address, tls=files, token=token)
        except Unauthenticated:
            assert time.monotonic() < deadline, "a new token is not accepted"
            await asyncio.sleep(0.1)
            continue
        try:
            async with database.snapshot() as snapshot:
                await snapshot.get("eu/0", column)
        except Unauthenticated:
            assert time.monotonic() < deadline, "a new token is not accepted"
            await database.close()
            await asyncio.sleep(0.1)
        else:
            return database


async def leave_lock(operator: aio.Database, row: str, *, commits: bool) -> None:
    """The remains of a writer that dies with a lock in `orders`, whose primary is in `secret`:
    before its commit point, or just after it."""
    engine = operator._engine
    deadline = engine.now() + SECONDS
    tables = {name: await engine.catalog.table(name, deadline) for name in ("orders", "secret")}
    start = await engine.timestamps.get()
    primary = CellAddress(tables["secret"].table_id, codecs.text.encode(row), b"x")
    lock = LockRecord(
        start, 0, 1, RecordKind.PUT, b"", primary, codecs.text.encode("left")
    ).encode()
    cell = CellAddress(tables["orders"].table_id, codecs.text.encode(row), b"of")
    locked = [primary, cell] if commits else [cell]
    made = [
        CellMutation(
            one.table_id,
            steps.prewrite(one.row, one.column, start, lock, None),
            tables["secret" if one is primary else "orders"].schema.version,
        )
        for one in locked
    ]
    assert await engine.cells.mutate(made, deadline) == [APPLIED] * len(made)
    if commits:
        commit_ts = await engine.timestamps.get()
        record = WriteRecord(start, RecordKind.PUT, codecs.integer.encode(1)).encode()
        step = steps.commit_primary(primary.row, primary.column, start, 0, commit_ts, record, ())
        made = [CellMutation(primary.table_id, step, tables["secret"].schema.version)]
        assert await engine.cells.mutate(made, deadline) == [APPLIED]


def test_the_blocking_library_works_with_a_token_for_some_tables(running: Running) -> None:
    tokens = running.certificates / "cluster" / "tokens.toml"
    before = read_text(tokens)
    files, address = files_in(running.certificates / "client"), running.cluster.address
    granted, denied = Table("mine"), Table("yours")
    column, other = granted.column("c", codecs.integer), denied.column("c", codecs.integer)
    token = new_token()
    rights = Rights((Right("mine", b"eu/"),), (Right("mine", b"eu/"),))
    entry = Entry("shop", Role.CLIENT, token_hash(token), rights=rights)
    with percolator.connect(address, tls=files, token=running.token("admin")) as operator:
        operator.create_tables([granted, denied])
    replace_text(tokens, before + "\n" + entry.text())
    try:
        asyncio.run(wait_for_token(address, files, token, column))
        with percolator.connect(address, tls=files, token=token) as database:
            with database.transaction() as tx:
                tx.set("eu/1", column, 1)
                tx.set("eu/2", column, 2)
            with database.snapshot() as snapshot:
                assert [row.key for row in snapshot.scan(granted, prefix="eu/")] == ["eu/1", "eu/2"]
                with pytest.raises(PermissionDenied, match="may not read these rows"):
                    list(snapshot.scan(granted))
                with pytest.raises(PermissionDenied, match="no right to table 'yours'"):
                    snapshot.get("a", other)

            def write_beyond(tx: percolator.Transaction) -> None:
                tx.set("eu/1", column, 3)
                tx.set("us/1", column, 3)

            with pytest.raises(PermissionDenied, match="may not"):
                database.run(write_beyond)
            with database.snapshot() as snapshot:
                assert snapshot.get("eu/1", column) == 1
    finally:
        asyncio.run(put_back(running, before))


async def wait_for_token(address: str, files: Tls, token: str, column: Column[Any]) -> None:
    await (await connected_within(address, files, token, column)).close()


def lines_of(file: Path, method: Method) -> list[dict[str, Any]]:
    """The lines of an audit file about one method."""
    lines = [json.loads(line) for line in read_text(file).splitlines()]
    return [line for line in lines if line["rpc"] == method.path]


async def may_read(database: aio.Database, columns: Sequence[Column[Any]]) -> bool:
    """True if any server that a transaction needs still lets it in."""
    found = []
    for column in columns:
        try:
            async with database.snapshot() as snapshot:
                await snapshot.get("row", column)
        except Unauthenticated:
            found.append(False)
        else:
            found.append(True)
    return any(found)


async def is_let_in(
    database: aio.Database, write: Callable[[aio.Transaction], Awaitable[None]]
) -> bool:
    try:
        await database.run(write)
    except Unauthenticated:
        return False
    return True


def read_text(path: Path) -> str:
    return path.read_text()


def replace_text(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_no_secret_is_in_a_log_a_process_list_or_an_error(running: Running) -> None:
    wrong = secrets.token_urlsafe(32)
    attempts: list[Awaitable[dict[str, PercolatorError | None]]] = [
        outcomes(running, running.credentials(token=token))
        for token in (wrong, running.token("client"), running.token("admin"))
    ]
    said = [str(error) for found in await asyncio.gather(*attempts) for error in found.values()]
    for process in running.cluster.processes.values():
        said += shown_by(process)
    key = material(files_in(running.certificates / "cluster")).key.decode().splitlines()[1]
    for secret in (wrong, running.token("client"), running.token("admin"), key):
        assert not [text for text in said if secret in text]


async def test_idle_streams_of_one_client_leave_the_gateway_to_others(running: Running) -> None:
    gateway = running.cluster.processes["gateway"].address
    watched = WatchNotificationsRequest.Watched(table_id=1, observers=[b"x"])
    request = WatchNotificationsRequest(watched=[watched], listen_only=True)
    network = GrpcNetwork(running.credentials(token=running.token("client")))
    greedy = ThroughNetwork(network, [gateway])
    server = running.address_of(methods.WATCH_NOTIFICATIONS)
    refused: list[PercolatorError] = []

    async def watch() -> None:
        try:
            async for _ in greedy.stream(server, methods.WATCH_NOTIFICATIONS)(request, 60.0):
                pass
        except PercolatorError as error:
            refused.append(error)

    watching = [asyncio.create_task(watch()) for _ in range(520)]
    try:
        deadline = time.monotonic() + 30
        while len(refused) < 20:
            assert time.monotonic() < deadline, f"{len(refused)} of 520 were refused"
            await asyncio.sleep(0.1)
        assert {type(error) for error in refused} == {Overloaded}
        assert "500 watches here at once: 50% (client_quota_percent)" in refused[0].message
        for role in ("client", "admin"):
            async with grpc_network(running.credentials(token=running.token(role))) as others:
                assert await outcome(others, gateway, methods.BEGIN) is None
        async with grpc_network(running.credentials("cluster")) as servers:
            async for _ in servers.stream(server, methods.WATCH_NOTIFICATIONS)(request, SECONDS):
                break
        assert len(refused) == 20
    finally:
        for one in watching:
            one.cancel()
        await asyncio.wait(watching)
        await network.close()


# Certificates, tokens and even the authority are replaced without restarting anything.


things = Table("things")
number = things.column("number", codecs.integer)


@dataclass
class Renewing:
    """The files in use, and two complete sets, of two authorities, to copy them from."""

    used: Path
    sets: tuple[Path, Path]

    def use(self, name: str, *sources: int) -> None:
        """Installs a file from one of the sets, or the concatenation of both sets' versions."""
        text = "\n".join((self.sets[source] / name).read_text() for source in sources)
        new = self.used / f"{name}.new"
        new.write_text(text)
        new.replace(self.used / name)

    def use_both(self) -> None:
        """Step 1: accept whatever either authority has signed."""
        self.use("cluster/tokens.toml", 0, 1)
        for side in ("cluster", "client"):
            self.use(f"{side}/ca.pem", 0, 1)

    def show_new(self) -> None:
        """Step 2: present the new certificates and tokens, one file after another."""
        for side in ("cluster", "client"):
            for name in ("certificate.pem", "key.pem"):
                self.use(f"{side}/{name}", 1)
        self.use("client/admin.token", 1)

    def forget_old(self) -> None:
        """Step 3: accept only what the new authority has signed."""
        self.use("cluster/tokens.toml", 1)
        for side in ("cluster", "client"):
            self.use(f"{side}/ca.pem", 1)


@pytest.fixture(name="renewing")
def _renewing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renewing:
    renewing = Renewing(tmp_path / "used", (tmp_path / "old", tmp_path / "new"))
    for directory in (*renewing.sets, renewing.used):
        make_all(directory)
    # One file cannot contain two entries with the same name.
    tokens = renewing.sets[1] / "cluster" / "tokens.toml"
    tokens.write_text(tokens.read_text().replace("[client]", "[c2]").replace("[admin]", "[a2]"))
    for side in ("cluster", "client"):
        for path in (renewing.sets[0] / side).iterdir():
            renewing.use(f"{side}/{path.name}", 0)
    for part, name in TLS_VARIABLES.items():
        monkeypatch.setenv(name, getattr(files_in(renewing.used / "client"), part))
    monkeypatch.setenv(TOKEN_VARIABLE, str(renewing.used / "client" / "admin.token"))
    return renewing


@pytest.fixture(name="cluster")
def _cluster(renewing: Renewing, tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path / "data", tablet_servers=1, gateways=1, certificates=renewing.used
    ) as cluster:
        yield cluster


def shown_at(address: str, files: Tls) -> str:
    """The serial number of the certificate presented to a new connection."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    at = parse_host_port(address, "address")
    with (
        socket.create_connection((at.host, at.port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname=CLUSTER_NAME) as secured,
    ):
        certificate = secured.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def shown(cluster: LocalCluster, renewing: Renewing) -> set[str]:
    """The serial numbers that all services present, on all their ports."""
    files = files_in(renewing.used / "client")
    ports = [one.wait_ready(10.0) for one in cluster.processes.values()]
    addresses = [
        address
        for one in ports
        for address in (one.address, one.frames_address, one.metrics_address)
    ]
    return {shown_at(address, files) for address in addresses if address}


@pytest.mark.timeout(120)
async def test_everything_is_renewed_while_programs_keep_running(
    cluster: LocalCluster, renewing: Renewing
) -> None:
    async with (
        aio.connect(cluster.address) as direct,
        aio.connect(cluster.gateway_address) as behind,
    ):
        await direct.create_table(things)

        async def count(database: aio.Database) -> int:
            async def one_more(tx: aio.Transaction) -> int:
                found = (await tx.get("row", number) or 0) + 1
                await tx.set("row", number, found)
                return found

            return await database.run(one_more)

        assert await count(direct) == 1
        before = shown(cluster, renewing)
        assert len(before) == 1
        renewing.use_both()
        assert await count(behind) == 2
        renewing.show_new()
        after = shown(cluster, renewing)
        assert len(after) == 1
        assert after.isdisjoint(before)
        renewing.forget_old()
        assert await count(direct) == 3
        # The others have to reconnect to it, each with the current contents of its files.
        cluster.processes["tabletserver-1"].kill()
        cluster.restart("tabletserver-1")
        assert [await count(direct), await count(behind)] == [4, 5]
        await until_refused(cluster, renewing)
        assert [await count(direct), await count(behind)] == [6, 7]


async def until_refused(cluster: LocalCluster, renewing: Renewing) -> None:
    """Returns once the former token is no longer accepted."""
    token = (renewing.sets[0] / "client" / "admin.token").read_text().strip()
    files = files_in(renewing.used / "client")
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    while True:
        try:
            async with aio.connect(cluster.address, tls=files, token=token):
                assert time.monotonic() < deadline, "a former token is still accepted"
        except Unauthenticated:
            return


@pytest.mark.timeout(120)
def test_a_certificate_of_the_former_authority_is_no_longer_accepted(
    cluster: LocalCluster, renewing: Renewing
) -> None:
    renewing.use_both()
    renewing.show_new()
    renewing.forget_old()
    former = files_in(renewing.sets[0] / "client")
    trusting = Tls(files_in(renewing.used / "client").ca, former.certificate, former.key)
    token = (renewing.used / "client" / "admin.token").read_text().strip()
    with pytest.raises(percolator.errors.InvalidArgument, match="not accepted by"):
        percolator.connect(cluster.address, tls=trusting, token=token)
    for process in cluster.processes.values():
        with pytest.raises(OSError):  # noqa: PT011 (disconnected, with or without an alert)
            speak(process.address, trusting)


def speak(address: str, files: Tls) -> None:
    """Connects and reads: in TLS 1.3, only the first read tells a client that it was refused."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    at = parse_host_port(address, "address")
    with (
        socket.create_connection((at.host, at.port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname=CLUSTER_NAME) as secured,
    ):
        if not secured.recv(1):
            raise ConnectionResetError


# Requests that are begun and not finished, with and without a token, cost a server little.

STREAMS = 100
MIB = 1 << 20
UNAUTHENTICATED = "16"
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PATHS = {
    "oracle": methods.GET_TIMESTAMPS.path,
    "lockservice": methods.TRY_LOCK.path,
    "tabletserver-1": methods.MUTATE.path,
    "gateway": methods.GET.path,
}


@pytest.fixture(scope="module")
def unfinished_cluster(
    certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(
        directory, tablet_servers=1, gateways=1, certificates=certificates
    ) as started:
        yield started


@pytest.fixture
def unfinished_tls(certificates: Path) -> ssl.SSLContext:
    files = files_in(certificates / "client")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    return context


def memory(unfinished_cluster: LocalCluster, name: str) -> int:
    return int(psutil.Process(unfinished_cluster.processes[name].pid).memory_info().rss)


def address(unfinished_cluster: LocalCluster, name: str) -> str:
    return unfinished_cluster.processes[name].wait_ready(10).address


def token(certificates: Path) -> list[tuple[str, str]]:
    text = (certificates / "client" / "client.token").read_text().strip()
    return [("authorization", f"Bearer {text}")]


@pytest.mark.real_time
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PATHS)
async def test_of_a_caller_without_a_token_nothing_is_received(
    name: str, unfinished_cluster: LocalCluster, unfinished_tls: ssl.SSLContext
) -> None:
    before = memory(unfinished_cluster, name)
    async with Unfinished(address(unfinished_cluster, name), unfinished_tls) as caller:
        await caller.begin([PATHS[name]] * STREAMS, MIB)
        assert set(caller.answers.values()) == {UNAUTHENTICATED}
        assert len(caller.answers) == STREAMS
        assert memory(unfinished_cluster, name) - before < 16 * MIB


@pytest.mark.real_time
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "size", "most"),
    [
        ("oracle", 1 * MIB, 16 * MIB),
        ("lockservice", 1 * MIB, 16 * MIB),
        ("tabletserver-1", 16 * MIB, 64 * MIB),
        ("gateway", 16 * MIB, 64 * MIB),
    ],
)
async def test_the_unfinished_requests_of_a_client_take_its_share_and_others_get_through(
    name: str,
    size: int,
    most: int,
    unfinished_cluster: LocalCluster,
    certificates: Path,
    unfinished_tls: ssl.SSLContext,
) -> None:
    before = memory(unfinished_cluster, name)
    async with Unfinished(address(unfinished_cluster, name), unfinished_tls) as caller:
        await caller.begin([PATHS[name]] * STREAMS, size, token(certificates))
        assert len(caller.streams) == STREAMS
        assert caller.sent > most / 4  # this is what fills memory without a limit
        assert memory(unfinished_cluster, name) - before < most + 32 * MIB
        files = files_in(certificates / "client")
        secret = (certificates / "client" / "admin.token").read_text().strip()
        async with aio.connect(unfinished_cluster.address, tls=files, token=secret) as operator:
            table = Table(f"while_{name.partition('-')[0]}")
            column = table.column("value", codecs.integer)
            await operator.create_table(table)

            async def write(tx: aio.Transaction) -> None:
                await tx.set("row", column, 1)

            await operator.run(write)


@pytest.mark.real_time
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["oracle", "tabletserver-1"])
@pytest.mark.parametrize("path", [HEALTH, WATCH, REFLECTION])
async def test_requests_that_need_no_token_have_a_small_share(
    name: str, path: str, unfinished_cluster: LocalCluster, unfinished_tls: ssl.SSLContext
) -> None:
    before = memory(unfinished_cluster, name)
    async with Unfinished(address(unfinished_cluster, name), unfinished_tls) as caller:
        await caller.begin([path] * STREAMS, 16 * MIB)
        assert memory(unfinished_cluster, name) - before < 48 * MIB
