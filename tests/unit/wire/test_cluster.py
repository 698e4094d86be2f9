"""One list of addresses is enough to find a cluster."""

from __future__ import annotations

from typing import Any, cast

import pytest

from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.cluster import describe, parse_addresses
from percolator.world import Network, UnaryMethod
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
    with pytest.raises(InvalidArgument) as caught:
        parse_addresses(text, field="masters")
    assert caught.value.field == "masters"


async def test_the_first_address_that_answers_describes_the_cluster() -> None:
    answer = DescribeResponse(cluster_id="one")
    network = FakeNetwork({"a:1": Unavailable("refused"), "b:2": answer, "c:3": answer})
    found = await describe(cast(Network, network), ["a:1", "b:2", "c:3"], 1.0)
    assert found.cluster_id == "one"
    assert network.asked == ["a:1", "b:2"]


async def test_when_no_address_answers_each_is_named_with_its_error() -> None:
    network = FakeNetwork({"a:1": Unavailable("refused"), "b:2": Unavailable("reset")})
    with pytest.raises(Unavailable, match=r"a:1: refused; b:2: reset"):
        await describe(cast(Network, network), ["a:1", "b:2"], 1.0)


async def test_the_addresses_share_the_timeout() -> None:
    """Otherwise, a silent first one would leave no time for the others."""
    network = FakeNetwork({"a:1": Unavailable("silent"), "b:2": DescribeResponse()})
    await describe(cast(Network, network), ["a:1", "b:2"], 1.0)
    assert network.timeouts == [0.5, 0.5]
