"""`percolator status` names tablet servers that take no writes, and the cause."""

from __future__ import annotations

from percolator.cli.overview import Overview
from percolator.cli.servers import remarks
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.v1.master_pb2 import TabletServerInfo

FULL = TabletServerInfo(
    address="b:1", writes_refused=ErrorDetail(message="1 MiB are free on the disk")
)


def test_a_server_that_takes_no_writes_is_a_problem_that_names_it_and_the_cause() -> None:
    found = Overview(DescribeResponse(), servers=[TabletServerInfo(address="a:1"), FULL])
    refusals = [one for one in found.problems() if "writes" in one]
    assert refusals == ["tablet server b:1 takes no writes: 1 MiB are free on the disk"]


def test_what_is_unusual_about_a_server_stands_beside_it() -> None:
    assert remarks(TabletServerInfo(address="a:1")) == ""
    assert remarks(TabletServerInfo(address="a:1", draining=True)) == "draining"
    assert remarks(FULL) == "takes no writes"
