"""One list of addresses is enough to find a cluster."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import percolator
from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.backoff import Backoff, pause_seconds
from percolator.wire.cluster import describe, parse_addresses
from percolator.wire.frames import UNUSED_SECONDS, ByAddress
from percolator.world import Network, UnaryMethod
from tests.simulation.virtual_time import VirtualClock
from tests.unit.refusals import refused
from tests.unit.unary_network import UnaryNetwork


class FakeNetwork(UnaryNetwork):
    """Answers Describe at some addresses, and fails at the others."""

    def __init__(self, answers: dict[str, DescribeResponse | PercolatorError]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.timeouts: list[float] = []

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> DescribeResponse:
        self.asked.append(address)
        self.timeouts.append(timeout)
        answer = self.answers[address]
        if isinstance(answer, PercolatorError):
            raise answer
        return answer


def test_a_list_of_addresses_is_split_at_commas() -> None:
    assert parse_addresses("a:1, [::1]:7100,host-7.example:65535") == [
        "a:1",
        "[::1]:7100",
        "host-7.example:65535",
    ]


@pytest.mark.parametrize(
    "text", ["", " ", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "a:1/x", "a b:1"]
)
def test_malformed_addresses_are_refused_by_field(text: str) -> None:
    with refused("masters"):
        parse_addresses(text, field="masters")


async def test_the_first_address_that_answers_describes_the_cluster() -> None:
    answer = DescribeResponse(cluster_id="one")
    network = FakeNetwork({"a:1": Unavailable("refused"), "b:2": answer, "c:3": answer})
    found = await describe(cast(Network, network), ["a:1", "b:2", "c:3"], 1.0)
    assert (found.cluster_id, network.asked) == ("one", ["a:1", "b:2"])


async def test_when_no_address_answers_each_is_named_with_its_error() -> None:
    network = FakeNetwork({"a:1": Unavailable("refused"), "b:2": Unavailable("reset")})
    with pytest.raises(Unavailable, match=r"a:1: refused; b:2: reset"):
        await describe(cast(Network, network), ["a:1", "b:2"], 1.0)


async def test_the_addresses_share_the_timeout() -> None:
    """Otherwise, a silent first one would leave no time for the others."""
    network = FakeNetwork({"a:1": Unavailable("silent"), "b:2": DescribeResponse()})
    await describe(cast(Network, network), ["a:1", "b:2"], 1.0)
    assert network.timeouts == [0.5, 0.5]


# host:port, as settings, sockets and announcements parse it.

hosts = st.one_of(
    st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}\Z"),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


@given(hosts, st.integers(0, 65_535))
def test_an_address_reads_back_as_it_was_written(host: str, port: int) -> None:
    address = HostPort(host, port)
    assert parse_host_port(str(address), "listen") == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "host", "host:", ":7100", "host:port", "host:65536", "host:-1", "host:+1",
        "host:7100 ", " host:7100", "ho st:7100", "::1:7100", "[::1]", "[::g]:7100", "[]:7100",
        "http://host:7100", "host/path:7100", "host:7_100", "host:٧", "a" * 300 + ":1", "-a:1",
        "a..b:1", ".a:1", "a" * 64 + ":1", "a." * 130 + "a:1", "host:1\n", "host\n:1",
    ],
)  # fmt: skip
def test_a_malformed_address_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_host_port(text, "listen")
    assert caught.value.field == "listen"
    assert "\n" not in caught.value.reason


def test_an_address_with_a_scheme_is_refused_with_an_example_of_one_without() -> None:
    with pytest.raises(
        InvalidArgument, match=r"without a scheme, as in localhost:7100, found 'http"
    ):
        percolator.connect("http://localhost:7100")


@pytest.mark.parametrize(
    ("text", "loopback", "wildcard"),
    [
        ("localhost:1", True, False),
        ("127.0.0.1:1", True, False),
        ("127.8.8.8:1", True, False),
        ("[::1]:1", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("10.0.0.1:1", False, False),
        ("localhost.example.org:1", False, False),
        ("example.org:1", False, False),
    ],
)
def test_loopback_and_wildcard_addresses_are_recognised(
    text: str, loopback: bool, wildcard: bool
) -> None:
    address = parse_host_port(text, "listen")
    assert (address.is_loopback(), address.is_wildcard()) == (loopback, wildcard)


def test_a_wildcard_is_dialled_by_the_name_of_the_machine() -> None:
    assert HostPort("0.0.0.0", 7).dialable() == HostPort(socket.gethostname(), 7)
    assert HostPort("::1", 7).dialable() == HostPort("::1", 7)


# What is kept for an address is dropped when it was long unused, and made again when needed.


class Kept:
    """In use until a test says otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.since: float | None = None

    def unused_since(self) -> float | None:
        return self.since

    def leave(self) -> None:
        self.since = asyncio.get_running_loop().time()


async def test_what_was_long_unused_is_dropped_when_another_address_comes() -> None:
    dropped: list[Kept] = []
    kept = ByAddress(Kept, dropped.append)
    first = kept.get("a:1")
    first.leave()
    await asyncio.sleep(UNUSED_SECONDS - 1.0)
    second = kept.get("b:1")
    assert dropped == []
    second.leave()
    await asyncio.sleep(2.0)
    assert kept.get("b:1") is second, "a known address drops nothing"
    assert dropped == []
    kept.get("c:1")
    assert (dropped, {one.address for one in kept}) == ([first], {"b:1", "c:1"})


async def test_what_is_in_use_stays_however_long_that_takes() -> None:
    kept = ByAddress(Kept)
    first = kept.get("a:1")
    await asyncio.sleep(100 * UNUSED_SECONDS)
    kept.get("b:1")
    assert kept.get("a:1") is first


async def test_an_address_that_comes_back_is_made_again() -> None:
    kept = ByAddress(Kept)
    first = kept.get("a:1")
    first.leave()
    await asyncio.sleep(UNUSED_SECONDS + 1.0)
    kept.get("b:1").leave()
    again = kept.get("a:1")
    assert again is not first
    assert kept.get("a:1") is again


async def test_servers_that_move_again_and_again_leave_no_more_than_those_in_use() -> None:
    kept = ByAddress(Kept)
    for time in range(200):
        for server in range(5):
            kept.get(f"10.0.{time}.{server}:1").leave()
        await asyncio.sleep(UNUSED_SECONDS + 1.0)
    assert len(kept) == 5


# Pauses double up to the longest, and randomness spreads callers out.


class Chance(random.Random):
    """Always the same number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
async def test_pauses_double_up_to_the_longest_and_up_to_half_is_random(
    chance: float, share: float
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    backoff = Backoff(clock, Chance(chance), 0.1, 1.0)
    pauses = [backoff.next_seconds() for _ in range(6)]
    assert pauses == pytest.approx([share * pause for pause in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)])
    assert backoff.rounds == 6


def test_after_any_number_of_attempts_the_pause_is_the_longest() -> None:
    for doublings in (10, 100, 10_000, 10**9):
        assert pause_seconds(Chance(1.0), 0.1, 1.0, doublings=doublings) == 1.0


def test_a_longer_pause_that_a_server_asked_for_is_kept() -> None:
    def pause(asked_seconds: float) -> float:
        return pause_seconds(Chance(1.0), 0.1, 1.0, doublings=2, asked_seconds=asked_seconds)

    assert [pause(0.0), pause(0.3), pause(7.0)] == [0.4, 0.4, 7.0]


async def test_a_pause_ends_at_the_deadline_and_no_attempt_follows() -> None:
    loop = asyncio.get_running_loop()
    backoff = Backoff(VirtualClock(loop), Chance(1.0), 1.0, 8.0)
    assert await backoff.pause(2.5)
    assert not await backoff.pause(2.5)
    assert loop.time() == 2.5
    assert not await backoff.pause(2.5)
    assert loop.time() == 2.5
