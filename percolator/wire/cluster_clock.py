"""Time that most machines of a cluster agree on.

The process that asks may be the one whose clock is wrong. So the majority counts, and each host has
one vote, since the processes of a host share a clock. If two halves disagree, the earlier time
counts: a delay can be made up for, but timestamps from the future cannot be taken back.

A majority of the hosts that are known at the moment proves nothing: a master that has just begun to
lead may have heard only from its own host, whose clock is wrong. So hosts that have not reported
their clocks count as well (`hosts_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median_low

from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.addresses import parse_host_port

CLOCK_SECONDS_MAX = 30.0
"""A clock that is further off is reported. A smaller difference may come from a registration that
took long to arrive."""


def clocks_of(described: DescribeResponse) -> dict[str, int]:
    """The servers' wall clocks when the master answered, by address, in milliseconds.

    Servers whose clock the master does not know are missing.
    """
    if not described.wall_milliseconds:
        return {}
    return {
        server.address: described.wall_milliseconds + server.clock_lead_milliseconds
        for server in described.servers
        if server.HasField("clock_lead_milliseconds")
    }


def hosts_of(addresses: Iterable[str]) -> set[str]:
    """The hosts on which these servers run."""
    return {parse_host_port(address, "address").host for address in addresses}


def majority(clocks: Mapping[str, int]) -> int | None:
    """The time on most hosts, in milliseconds; None without any clock. `clocks` is by address."""
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for address, milliseconds in clocks.items():
        hosts[parse_host_port(address, "address").host].append(milliseconds)
    return median_low(map(median_low, hosts.values())) if hosts else None
