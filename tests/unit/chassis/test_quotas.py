"""One client cannot use up what other clients, administrators and servers need."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry

from percolator.errors import Overloaded, PercolatorError
from percolator.services.chassis.gate import (
    LOCAL,
    Access,
    CallerIdentity,
    Gate,
    Quota,
    Quotas,
    machine_of,
    peer_name,
)
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.roles import Role
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import token_hash

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
        before = registry.get_sample_value(
            "percolator_quota_refused_total", {"what": "sessions", "limit": limit}
        )
        with pytest.raises(Overloaded) as caught:
            quota.take(caller)
        assert re.search(sentence, caught.value.message), caught.value.message
        assert caught.value.retry_after_seconds == 2.5
        after = registry.get_sample_value(
            "percolator_quota_refused_total", {"what": "sessions", "limit": limit}
        )
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


class KnownTokens:
    def role_of(self, digest: bytes) -> Role | None:
        return {token_hash("shop"): Role.CLIENT, token_hash("boss"): Role.ADMIN}.get(digest)


def identified(
    *metadata: tuple[str, str], tokens: bool = True, names: tuple[str, ...] = ()
) -> CallerIdentity:
    access = Access(KnownTokens() if tokens else None)  # type: ignore[arg-type]
    encoded = [name.encode() for name in names]
    return access.require(
        "/p", Role.CLIENT, metadata, lambda: encoded, lambda: "ipv4:192.0.2.1:5000"
    )


def bearer(token: str) -> tuple[str, str]:
    return AUTHORIZATION, SCHEME + token


def test_a_client_is_its_token_at_its_machine() -> None:
    assert identified(bearer("shop")).client == (token_hash("shop"), "192.0.2.1")
    assert identified(bearer("boss")) == ADMIN
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
    by_earlier_gateway = identified(
        bearer("shop"), (FORWARDED_METADATA, "1"), names=(CLUSTER_NAME,)
    )
    assert by_earlier_gateway.client == (digest, "192.0.2.1")
    with pytest.raises(PercolatorError):
        identified(*relayed, names=(CLUSTER_NAME,))
