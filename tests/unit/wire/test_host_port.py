"""host:port, as settings, sockets and announcements parse it."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

import percolator
from percolator.errors import InvalidArgument
from percolator.wire.addresses import HostPort, parse_host_port

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
