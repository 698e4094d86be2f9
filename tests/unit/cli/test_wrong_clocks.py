"""`percolator status` names clocks that differ from the others, and timestamps that do."""

from __future__ import annotations

import pytest

from percolator.cli.overview import Overview
from percolator.v1.cluster_pb2 import DescribeResponse, Server, ServiceKind

HOUR = 3_600_000
NOW = 1_800_000_000_000


def problems(
    leads: dict[str, int], *, timestamps: int | None = 0, is_live: bool = True
) -> list[str]:
    """The problems if tablet servers and the oracle are this far ahead of the master's clock."""
    servers = [
        Server(kind=ServiceKind.SERVICE_KIND_TABLET_SERVER, address=one, clock_lead_milliseconds=ms)
        for one, ms in leads.items()
    ]
    servers.append(
        Server(kind=ServiceKind.SERVICE_KIND_MASTER, address="master:1", clock_lead_milliseconds=0)
    )
    cluster = DescribeResponse(
        servers=servers, wall_milliseconds=NOW, timestamp_lead_milliseconds=timestamps
    )
    found = Overview(cluster, is_live=is_live).problems()
    return [one for one in found if "clock" in one]


def test_clocks_that_agree_are_not_a_problem() -> None:
    assert not problems({"a:1": 900, "b:1": -20_000}, timestamps=29_000)


@pytest.mark.parametrize(
    ("lead", "how"), [(2 * HOUR, "7,200 s ahead of"), (-400 * 24 * HOUR, "34,560,000 s behind")]
)
def test_a_clock_that_is_off_is_named(lead: int, how: str) -> None:
    [problem] = problems({"a:1": lead, "b:1": 0})
    assert problem.startswith(f"the clock of tablet server a:1 is {how} most others")


def test_the_masters_own_clock_is_named_if_it_is_the_one_that_is_off() -> None:
    """On the wire, all other clocks are relative to it. Timestamps follow the other clocks."""
    [problem] = problems({"a:1": -2 * HOUR, "b:1": -2 * HOUR}, timestamps=-2 * HOUR)
    assert problem.startswith("the clock of master master:1 is 7,200 s ahead of most others")


def test_timestamps_far_from_the_clocks_are_named_even_if_all_clocks_are_right_again() -> None:
    [problem] = problems({"a:1": 0, "b:1": 0}, timestamps=2 * HOUR)
    assert problem.startswith("the oracle's timestamps are 7,200 s ahead of most clocks")
    [problem] = problems({"a:1": 0, "b:1": 0}, timestamps=-2 * HOUR)
    assert problem.startswith("the oracle's timestamps are 7,200 s behind most clocks")


def test_unknown_clocks_are_not_a_problem() -> None:
    assert not problems({}, timestamps=None)
    assert not problems({"a:1": HOUR, "b:1": 0}, is_live=False)
