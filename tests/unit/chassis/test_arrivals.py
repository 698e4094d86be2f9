"""Memory for requests: what arrives at a time, for whom, and for how long.

One client cannot use up what other clients, administrators and servers need.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn

import grpc
import pytest
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
)
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from percolator.errors import Overloaded, PercolatorError
from percolator.services.chassis.access import (
    LOCAL,
    Access,
    CallerIdentity,
    Grant,
    Tokens,
    machine_of,
    peer_name,
)
from percolator.services.chassis.metrics import watch_event_loop
from percolator.services.chassis.rpc import (
    BUCKETS_SECONDS,
    HASTY_MAX,
    HASTY_SECONDS,
    Arrivals,
    Gate,
    Held,
    NoMoreRequests,
    Quota,
    Quotas,
    RpcMetrics,
)
from percolator.services.chassis.server import CONNECTION_STREAMS_MAX, Health, OpenCalls
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.roles import Role
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import token_hash
from percolator.world import MachineClock
from tests.simulation.virtual_time import VirtualClock


@pytest.fixture
@asynccontextmanager
async def arrivals() -> AsyncIterator[Arrivals]:
    """Memory for four of the largest requests."""
    yield Arrivals(REQUEST, 4 * LARGEST, SECONDS)


REQUEST = 1_000
LARGEST = 2 * REQUEST
"""The size that a request counts as until it has arrived."""
SECONDS = 60.0


class Call:
    """A call whose request arrives when the test says so."""

    def __init__(self, peer: str = "a", names: tuple[bytes, ...] = ()) -> None:
        self._peer = peer
        self._names = names
        self._request: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.begun = False
        """True once somebody receives its request."""

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> tuple[bytes, ...]:
        return self._names

    async def read(self) -> Any:
        self.begun = True
        return await self._request

    async def abort(self, _: grpc.StatusCode, details: str, trailers: object) -> NoReturn:
        raise Overloaded(details, retry_after_seconds=1.0)

    def send(self, request: Any) -> None:
        self._request.set_result(request)


def receiving(
    arrivals: Arrivals, call: Call, caller: CallerIdentity | None = None
) -> asyncio.Task[Held]:
    return asyncio.create_task(arrivals.receive(call, caller))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def require_empty(arrivals: Arrivals) -> None:
    assert (arrivals.used, arrivals.hasty, arrivals.shares) == (0, 0, {})
    assert not arrivals.waiting


async def require_given_back(arrivals: Arrivals, cancelled: Sequence[asyncio.Task[Any]]) -> None:
    """Nothing is left of these calls, which are cancelled, nor of any other."""
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    require_empty(arrivals)


async def answered(call: Call, receiving: asyncio.Task[Held], raw: bytes = b"") -> None:
    """Sends the request of a call, and releases it as after the answer."""
    call.send(raw)
    (await receiving).release()


async def test_a_request_takes_what_the_largest_would_until_it_has_arrived() -> None:
    arrivals, call = Arrivals(REQUEST, 100 * LARGEST, SECONDS), Call()
    task = receiving(arrivals, call)
    await settle()
    assert arrivals.used == LARGEST
    call.send(b"small")
    held = await task
    assert (held.raw, arrivals.used) == (b"small", 5)
    held.release()
    require_empty(arrivals)


async def test_requests_above_the_share_of_their_connection_arrive_one_after_another(
    arrivals: Arrivals,
) -> None:
    calls = [Call() for _ in range(3)]
    tasks = [receiving(arrivals, call) for call in calls]
    await settle()
    assert [call.begun for call in calls] == [True, False, False]
    calls[0].send(bytes(1))
    await settle()
    # Its memory is in use until it is answered, and the largest one would not fit beside it.
    assert [call.begun for call in calls] == [True, False, False]
    (await tasks[0]).release()
    await settle()
    assert [call.begun for call in calls] == [True, True, False]
    tasks[1].cancel()
    await settle()
    assert calls[2].begun
    await answered(calls[2], tasks[2])
    require_empty(arrivals)


async def test_a_call_that_is_cancelled_while_it_waits_is_passed_over(arrivals: Arrivals) -> None:
    calls = [Call() for _ in range(3)]
    tasks = [receiving(arrivals, call) for call in calls]
    await settle()
    tasks[1].cancel()
    await answered(calls[0], tasks[0])
    tasks[0] = receiving(arrivals, again := Call())
    await settle()
    assert (calls[2].begun, again.begun) == (True, False)
    await answered(calls[2], tasks[2])
    await answered(again, tasks[0])
    require_empty(arrivals)


async def test_a_call_that_is_cancelled_at_its_turn_gives_its_memory_back(
    arrivals: Arrivals,
) -> None:
    first, second = Call(), Call()
    tasks = [receiving(arrivals, first), receiving(arrivals, second)]
    await settle()
    first.send(b"x")
    held = await tasks[0]
    held.release()
    tasks[1].cancel()  # before it runs
    await settle()
    assert not second.begun
    require_empty(arrivals)


async def test_a_request_that_waits_too_long_for_others_of_its_connection_is_refused(
    arrivals: Arrivals,
) -> None:
    first, second = Call(), Call()
    task = receiving(arrivals, first)
    await settle()
    first.send(b"x")
    held = await task
    with pytest.raises(Overloaded, match="requests of this connection use all memory for them"):
        await arrivals.receive(second)
    assert arrivals.refused["budget"] == 1
    held.release()
    require_empty(arrivals)


async def test_a_request_that_never_arrives_is_refused_and_its_memory_is_free(
    arrivals: Arrivals,
) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(Overloaded, match="has not arrived within 60 s"):
        await arrivals.receive(Call())
    assert asyncio.get_running_loop().time() - began == pytest.approx(SECONDS)
    assert arrivals.refused["late"] == 1
    require_empty(arrivals)


async def slow_uploads(arrivals: Arrivals) -> list[asyncio.Task[Held]]:
    """Requests of four connections that use the whole budget, and do not arrive."""
    tasks = [receiving(arrivals, Call(f"slow {one}")) for one in range(4)]
    await settle()
    assert arrivals.used == arrivals.bytes_max
    return tasks


async def test_above_the_budget_a_request_passes_that_arrives_at_once(arrivals: Arrivals) -> None:
    uploads = await slow_uploads(arrivals)
    call = Call("quick")
    task = receiving(arrivals, call)
    await asyncio.sleep(HASTY_SECONDS / 2)
    call.send(b"quick")
    held = await task
    assert held.raw == b"quick"
    assert arrivals.hasty == 0  # or a few long calls would keep all others out
    assert arrivals.used == arrivals.bytes_max + len(b"quick")
    held.release()
    await require_given_back(arrivals, uploads)


async def test_above_the_budget_a_request_is_refused_that_does_not_arrive_at_once(
    arrivals: Arrivals,
) -> None:
    uploads = await slow_uploads(arrivals)
    began = asyncio.get_running_loop().time()
    with pytest.raises(Overloaded, match=r"of all callers .* \(request_bytes_total_max\)"):
        await arrivals.receive(Call("slow too"))
    assert asyncio.get_running_loop().time() - began == pytest.approx(HASTY_SECONDS)
    await require_given_back(arrivals, uploads)


async def test_above_the_budget_a_few_requests_arrive_at_a_time_and_others_wait(
    arrivals: Arrivals,
) -> None:
    uploads = await slow_uploads(arrivals)
    few = [receiving(arrivals, Call(f"few {one}")) for one in range(HASTY_MAX)]
    await settle()
    more = [Call(f"more {one}") for one in range(HASTY_MAX + 1)]
    waiting = [receiving(arrivals, call) for call in more]
    await settle()
    assert not any(call.begun for call in more)
    few[0].cancel()
    await settle()
    assert [call.begun for call in more] == [True] + HASTY_MAX * [False]
    waiting[1].cancel()
    uploads[0].cancel()
    await settle()
    assert [call.begun for call in more[:4]] == [True, False, True, False]
    await asyncio.sleep(1.5 * HASTY_SECONDS)  # the others of the few are refused
    assert all(call.begun for call in (*more[:1], *more[2:]))
    await require_given_back(arrivals, [*uploads, *few, *waiting])


async def test_a_request_that_waits_too_long_for_those_of_all_others_is_refused() -> None:
    arrivals = Arrivals(REQUEST, 4 * LARGEST, 0.05)
    uploads = await slow_uploads(arrivals)
    few = [receiving(arrivals, Call(f"few {one}")) for one in range(HASTY_MAX)]
    await settle()
    for upload in uploads:
        upload.cancel()
    uploads = await slow_uploads(arrivals)
    with pytest.raises(Overloaded, match="requests of all callers use all memory for them"):
        await arrivals.receive(Call("one more"))
    await require_given_back(arrivals, [*uploads, *few])


async def test_small_requests_of_long_calls_do_not_keep_others_from_arriving(
    arrivals: Arrivals,
) -> None:
    uploads = await slow_uploads(arrivals)
    answered_late = []
    for one in range(10 * HASTY_MAX):
        task = receiving(arrivals, call := Call(f"long {one}"))
        call.send(b"small")
        answered_late.append(await task)
    for held in answered_late:
        held.release()
    await require_given_back(arrivals, uploads)


async def test_large_requests_above_the_budget_do_not_add_up(arrivals: Arrivals) -> None:
    uploads = await slow_uploads(arrivals)
    held: list[Held] = []
    tasks = []
    for one in range(10 * HASTY_MAX):
        tasks.append(receiving(arrivals, call := Call(f"large {one}")))
        await settle()
        if call.begun:
            call.send(bytes(LARGEST))
            held.append(await tasks[-1])
    assert sum(len(one.raw) for one in held) == 2 * HASTY_MAX * LARGEST
    for received in held:
        received.release()
    await require_given_back(arrivals, [*uploads, *tasks])


def client(name: bytes) -> CallerIdentity:
    return CallerIdentity(Role.CLIENT, (name, "machine"))


async def test_one_client_leaves_half_of_the_budget_to_others_however_it_connects() -> None:
    arrivals = Arrivals(REQUEST, 8 * LARGEST, SECONDS)
    calls = [Call(f"connection {one}") for one in range(20)]
    tasks = [receiving(arrivals, call, client(b"one")) for call in calls]
    await settle()
    assert (arrivals.used, arrivals.hasty) == (arrivals.bytes_max // 2, 0)
    other = Call("gateway", (CLUSTER_NAME.encode(),))
    task = receiving(arrivals, other, client(b"other"))
    await settle()
    assert other.begun
    await answered(other, task, b"x")
    # Its own requests wait for each other.
    await answered(calls[0], tasks[0], b"x")
    await settle()
    assert [call.begun for call in calls] == 5 * [True] + 15 * [False]
    await require_given_back(arrivals, tasks)


@pytest.mark.parametrize(
    ("caller", "is_trusted"),
    [
        (CallerIdentity(Role.SERVER), True),
        (CallerIdentity(Role.ADMIN), True),
        (CallerIdentity(Role.CLIENT, (b"token", "machine")), False),
        (CallerIdentity(Role.ADMIN, (b"", "machine")), False),
    ],
    ids=["server", "administrator", "client", "anybody where there are no tokens"],
)
async def test_requests_of_clients_take_no_memory_of_administrators_and_servers(
    caller: CallerIdentity, is_trusted: bool
) -> None:
    gate = Gate(concurrency_max=10, request_bytes_max=REQUEST)
    task = asyncio.create_task(gate.receive(Call(), caller))
    await settle()
    usual, trusted, *_ = gate.arrivals
    assert (usual.used, trusted.used) == ((0, LARGEST) if is_trusted else (LARGEST, 0))
    task.cancel()


async def test_unfinished_health_checks_of_one_machine_do_not_stop_those_of_others() -> None:
    gate = Gate(concurrency_max=10, request_bytes_max=REQUEST)
    check = Health().handler(OpenCalls(gate.open)).service(_Details("Check")).stream_unary

    def checking(peer: str) -> tuple[Call, asyncio.Task[bytes]]:
        call = Call(peer)
        return call, asyncio.create_task(check(None, call))

    attack = [checking(f"ipv4:10.0.0.1:{port}") for port in range(50) for _ in range(10)]
    await settle()
    assert sum(call.begun for call, _ in attack) == 2
    call, task = checking("ipv4:10.0.0.2:1")
    call.send(b"")
    assert await task
    await require_given_back(gate.open, [one for _, one in attack])


async def test_a_connection_may_have_few_unfinished_health_checks() -> None:
    gate = Gate(concurrency_max=10, request_bytes_max=REQUEST)
    check = Health().handler(OpenCalls(gate.open)).service(_Details("Check")).stream_unary
    few = [asyncio.create_task(check(None, Call())) for _ in range(CONNECTION_STREAMS_MAX)]
    await settle()
    with pytest.raises(Overloaded, match="16 calls are open on this connection"):
        await check(None, Call())
    for task in few:
        task.cancel()
    await settle()
    call = Call()
    call.send(b"")
    assert await check(None, call)
    require_empty(gate.open)


async def test_the_watches_of_one_machine_leave_half_of_the_streams_to_others() -> None:
    gate = Gate(concurrency_max=10, request_bytes_max=REQUEST)
    watch = Health().handler(OpenCalls(gate.open, 6)).service(_Details("Watch")).stream_stream

    def watching(peer: str) -> AsyncGenerator[bytes, None]:
        call = Call(peer)
        call.send(b"")
        found: AsyncGenerator[bytes, None] = watch(None, call)
        return found

    attack = [watching(f"ipv4:10.0.0.1:{port}") for port in range(3)]
    for stream in attack:
        assert await anext(stream)
    with pytest.raises(Overloaded, match="3 streams of this machine are open, half of open_stre"):
        await anext(watching("ipv4:10.0.0.1:9"))
    other = watching("ipv4:10.0.0.2:1")
    assert await anext(other)
    await attack.pop().aclose()
    again = watching("ipv4:10.0.0.1:9")
    assert await anext(again)
    for stream in (*attack, other, again):
        await stream.aclose()
    require_empty(gate.open)


class _Details(NamedTuple):
    """Of a call to the health service."""

    name: str
    invocation_metadata: tuple[()] = ()

    @property
    def method(self) -> str:
        return f"/grpc.health.v1.Health/{self.name}"


async def test_a_client_that_waits_does_not_use_up_the_connection_of_a_gateway() -> None:
    arrivals = Arrivals(REQUEST, 8 * LARGEST, SECONDS)

    def call() -> Call:
        return Call("gateway", (CLUSTER_NAME.encode(),))

    tasks = [receiving(arrivals, call(), client(b"one")) for _ in range(100)]
    await settle()
    other = call()
    tasks.append(receiving(arrivals, other, client(b"other")))
    await settle()
    assert other.begun
    await require_given_back(arrivals, tasks)


async def test_a_server_may_use_the_whole_budget_on_one_connection(arrivals: Arrivals) -> None:
    """Through it come the calls of all callers of a gateway."""
    calls = [Call("gateway", (CLUSTER_NAME.encode(),)) for _ in range(4)]
    tasks = [receiving(arrivals, call) for call in calls]
    await settle()
    assert all(call.begun for call in calls)
    for call, task in zip(calls, tasks, strict=True):
        await answered(call, task)
    require_empty(arrivals)


async def test_a_caller_that_sends_no_request_is_told_so() -> None:
    arrivals, call = Arrivals(REQUEST, 4 * LARGEST, SECONDS), Call()
    call.send(grpc.aio.EOF)
    with pytest.raises(NoMoreRequests, match="request: is missing"):
        await arrivals.receive(call)
    require_empty(arrivals)


async def test_what_has_arrived_in_another_way_is_refused_above_the_budget() -> None:
    arrivals = Arrivals(REQUEST, LARGEST, SECONDS)
    held = [arrivals.hold(bytes(REQUEST)) for _ in range(2)]
    with pytest.raises(Overloaded):
        arrivals.hold(b"x")
    for one in held:
        one.release()
    arrivals.hold(b"x").release()
    require_empty(arrivals)


GREEDY = CallerIdentity(Role.CLIENT, (b"a token", "192.0.2.1"))
OTHER = CallerIdentity(Role.CLIENT, (b"another", "192.0.2.1"))
ELSEWHERE = CallerIdentity(Role.CLIENT, (b"a token", "192.0.2.2"))
ADMIN = CallerIdentity(Role.ADMIN)
SERVER = CallerIdentity(Role.SERVER)


def taken(quota: Quota, caller: CallerIdentity) -> int:
    """How many one caller gets, one after another, until it is refused."""
    count = 0
    try:
        while count < 1_000:
            quota.take(caller)
            count += 1
    except Overloaded:
        pass
    return count


def test_one_client_gets_half_and_all_clients_leave_a_reserve() -> None:
    quota = Quota("calls", "calls_max", 100)
    assert taken(quota, GREEDY) == 50
    assert taken(quota, OTHER) == 40, "all clients together have 90"
    assert taken(quota, ELSEWHERE) == 0
    assert taken(quota, ADMIN) == 5, "administrators leave half of the reserve"
    assert taken(quota, SERVER) == 5
    for _ in range(40):
        quota.give_back(OTHER)
    assert taken(quota, GREEDY) == 0, "its own half is still in use"
    assert taken(quota, ELSEWHERE) == 40


def test_what_is_given_back_leaves_nothing_behind() -> None:
    quota = Quota("calls", "calls_max", 100)
    for caller in (GREEDY, OTHER, ADMIN, SERVER):
        quota.take(caller, 3)
        quota.take(caller, 0)
    assert (quota.used, quota.used_by_clients, quota.most_used) == (12, 6, 3)
    for caller in (GREEDY, OTHER, ADMIN, SERVER):
        quota.give_back(caller, 3)
        quota.give_back(caller, 0)
    assert (quota.used, quota.used_by_clients, quota.most_used) == (0, 0, 0)
    assert not quota._by_client, "clients that came once would fill the memory"


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_however_small_a_limit_is_each_kind_of_caller_can_use_some(limit: int) -> None:
    for caller in (GREEDY, ADMIN, SERVER):
        assert taken(Quota("calls", "calls_max", limit), caller) >= 1


def test_a_refusal_says_which_quota_was_reached_and_what_sets_it() -> None:
    quotas = Quotas(client_percent=20, clients_percent=30)
    registry = CollectorRegistry()
    registry.register(quotas)
    quota = quotas.of("sessions", "sessions_max", 10, retry_after_seconds=2.5)
    taken(quota, GREEDY)
    for caller, limit, sentence in (
        (GREEDY, "client", r"2 sessions .* 20% \(client_quota_percent\) of sessions_max, 10"),
        (OTHER, "clients", r"3 sessions .* 30% \(clients_quota_percent\) of sessions_max, 10"),
        (SERVER, "all", r"10 sessions .* limit is sessions_max, 10"),
    ):
        taken(quota, caller)
        labels = {"what": "sessions", "limit": limit}
        before = registry.get_sample_value("percolator_quota_refused_total", labels)
        with pytest.raises(Overloaded) as caught:
            quota.take(caller)
        assert re.search(sentence, caught.value.message), caught.value.message
        assert caught.value.retry_after_seconds == 2.5
        after = registry.get_sample_value("percolator_quota_refused_total", labels)
        assert before is not None
        assert after == before + 1
    used = {
        by: registry.get_sample_value("percolator_quota_used", {"what": "sessions", "by": by})
        for by in ("all", "clients", "client")
    }
    assert used == {"all": 10, "clients": 3, "client": 2}


def test_idle_streams_do_not_take_the_place_of_calls() -> None:
    gate = Gate(concurrency_max=4, request_bytes_max=1_024, streams_max=4)
    for _ in range(2):
        gate.enter(GREEDY, is_stream=True)
    with pytest.raises(Overloaded, match="streams_max"):
        gate.enter(GREEDY, is_stream=True)
    gate.enter(GREEDY)
    assert gate.in_flight == 3
    gate.leave(GREEDY)
    assert not gate.idle.is_set()
    for _ in range(2):
        gate.leave(GREEDY, is_stream=True)
    assert gate.idle.is_set()


@pytest.mark.parametrize(
    ("peer", "machine"),
    [
        ("ipv4:192.0.2.7:51234", "192.0.2.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:51234", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::9]:443", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:51234", "192.0.2.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:51234", "fe80::/64"),
        ("ipv4:127.0.0.1:51234", LOCAL),
        ("ipv4:127.9.9.9:51234", LOCAL),
        ("ipv6:%5B::1%5D:51234", LOCAL),
        ("unix:", LOCAL),
        ("unix-abstract:name", LOCAL),
        (peer_name("192.0.2.7"), "192.0.2.7"),
        (peer_name("2001:db8::1"), "2001:db8::/64"),
        (peer_name(""), LOCAL),
    ],
)
def test_a_machine_is_one_client_whatever_ports_and_addresses_it_uses(
    peer: str, machine: str
) -> None:
    assert machine_of(peer) == machine


class KnownTokens(Tokens):
    def __init__(self) -> None:
        grants = (Grant("shop", Role.CLIENT), Grant("boss", Role.ADMIN))
        self._grants = {token_hash(grant.name): grant for grant in grants}


def identified(
    *metadata: tuple[str, str], tokens: bool = True, names: tuple[str, ...] = ()
) -> CallerIdentity:
    access = Access(
        KnownTokens() if tokens else None,
        MachineClock(),
        any_certificate_is_admin=not tokens,
    )
    encoded = [name.encode() for name in names]
    return access.require(
        "/p", Role.CLIENT, metadata, lambda: encoded, lambda: "ipv4:192.0.2.1:5000"
    )


def bearer(token: str) -> tuple[str, str]:
    return AUTHORIZATION, SCHEME + token


def test_a_client_is_its_token_at_its_machine() -> None:
    assert identified(bearer("shop")).client == (token_hash("shop"), "192.0.2.1")
    assert identified(bearer("boss")) == ADMIN._replace(name="boss", machine="192.0.2.1")
    assert identified(names=(CLUSTER_NAME,)) == SERVER
    # Where no tokens are required, programs may do what administrators may, and are limited.
    assert identified(tokens=False).client == (b"", "192.0.2.1")
    assert identified(tokens=False, names=(CLUSTER_NAME,)) == SERVER


def test_only_a_gateway_is_believed_which_machine_is_behind_it() -> None:
    relayed = ((SERVER_METADATA, "a server"), (FORWARDED_METADATA, "198.51.100.9"))
    digest = token_hash("shop")
    through_gateway = identified(bearer("shop"), *relayed, names=(CLUSTER_NAME,))
    assert through_gateway.client == (digest, "198.51.100.9")
    pretending = identified(bearer("shop"), *relayed, names=("a client",))
    assert pretending.client == (digest, "192.0.2.1")
    with pytest.raises(PercolatorError):
        identified(*relayed, names=(CLUSTER_NAME,))


# The health service, as load balancers watch it.

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


async def asking(name: str = "") -> AsyncIterator[HealthCheckRequest]:
    """The request of a watcher."""
    yield HealthCheckRequest(service=name)


def watching(health: Health, name: str = "") -> tuple[list[int], asyncio.Task[None]]:
    """The statuses that a watcher receives, and its task."""
    told: list[int] = []

    async def watch() -> None:
        async for response in health.watch(asking(name), None):
            told.append(response.status)  # noqa: PERF401  # one by one is what is tested

    return told, asyncio.create_task(watch())


async def test_every_watcher_is_told_every_change_until_the_end() -> None:
    health = Health()
    whole, first = watching(health)
    shop, second = watching(health, "Shop")
    await settle()
    health.add(["Shop"])
    for is_serving in (True, False, True):
        await settle()
        health.set_serving(is_serving)
    await settle()
    health.finish()
    await asyncio.gather(first, second)
    assert whole == [NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert shop == [UNKNOWN, *whole]


async def test_all_services_are_listed_with_their_status() -> None:
    health = Health()
    health.add(["Shop"])
    health.set_serving(True)
    answer = await health.list(HealthListRequest(), None)
    assert {name: one.status for name, one in answer.statuses.items()} == {
        "": SERVING,
        "Shop": SERVING,
    }


async def test_a_watcher_that_leaves_takes_nothing_from_the_others() -> None:
    health = Health()
    _, leaving = watching(health)
    told, staying = watching(health)
    await settle()
    leaving.cancel()
    await settle()
    health.set_serving(True)
    await settle()
    assert told == [NOT_SERVING, SERVING]
    staying.cancel()


async def test_after_the_end_nothing_serves_again() -> None:
    health = Health()
    health.finish()
    health.set_serving(True)
    told, watch = watching(health)
    await watch
    assert told == [NOT_SERVING]


async def test_an_end_that_comes_while_an_answer_leaves_is_told_too() -> None:
    """A watcher that saw SERVING, and then only the end of the stream, would not know."""
    health = Health()
    health.set_serving(True)
    watch = health.watch(asking(), None)
    assert (await anext(watch)).status == SERVING
    health.finish()
    assert [response.status async for response in watch] == [NOT_SERVING]


# Figures of calls, as Prometheus reads them.


@given(st.lists(st.floats(min_value=0, max_value=20), max_size=50))
def test_a_histogram_counts_every_call_in_each_bucket_that_it_fits(seconds: list[float]) -> None:
    calls = RpcMetrics()
    registry = CollectorRegistry()
    registry.register(calls)
    method = calls.method("Shop", "Sell")
    for spent in seconds:
        method.in_flight += 1
        method.finished("OK", spent)
    labels = {"service": "Shop", "method": "Sell"}
    for bound in BUCKETS_SECONDS:
        found = registry.get_sample_value(
            "percolator_rpc_seconds_bucket", {**labels, "le": str(bound)}
        )
        assert found == sum(spent <= bound for spent in seconds)
    assert registry.get_sample_value("percolator_rpc_seconds_count", labels) == len(seconds)
    assert registry.get_sample_value("percolator_rpc_in_flight", labels) == 0


async def test_the_event_loops_lateness_is_measured() -> None:
    registry = CollectorRegistry()
    clock = VirtualClock(asyncio.get_running_loop())
    watching = asyncio.create_task(watch_event_loop(registry, clock))
    await asyncio.sleep(1.1)
    watching.cancel()
    assert registry.get_sample_value("percolator_event_loop_lag_seconds_count") == 4
    assert registry.get_sample_value("percolator_event_loop_lag_seconds_sum") == 0


class SlowClock(VirtualClock):
    """The clock of a loop that is so busy that its timers fire late."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + 0.03)


async def test_a_busy_event_loop_shows_by_its_lateness_and_its_tasks() -> None:
    registry = CollectorRegistry()
    clock = SlowClock(asyncio.get_running_loop())
    watching = asyncio.create_task(watch_event_loop(registry, clock))
    busy = [asyncio.create_task(asyncio.sleep(10)) for _ in range(5)]
    await asyncio.sleep(0.3)
    lag = registry.get_sample_value("percolator_event_loop_lag_seconds_sum")
    assert lag == pytest.approx(0.03)
    assert registry.get_sample_value("percolator_event_loop_tasks") == 7  # this one, the watch, 5
    for task in (watching, *busy):
        task.cancel()
