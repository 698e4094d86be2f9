"""Times to live as people type them."""

from __future__ import annotations

import pytest

from percolator.cli.ttls import column_ttls
from percolator.errors import InvalidArgument


def test_columns_and_times_are_parsed() -> None:
    found = column_ttls(["token=30d", "a=b=1.5s", "hex:ff=0.0001s"])
    assert [(one.column, one.ttl_milliseconds) for one in found] == [
        (b"token", 30 * 86_400_000),
        (b"a=b", 1_500),
        (b"\xff", 1),
    ]
    assert column_ttls(None) == []


def test_no_time_ends_it_only_where_there_is_one() -> None:
    (found,) = column_ttls(["token="], may_be_empty=True)
    assert (found.column, found.ttl_milliseconds) == (b"token", 0)
    with pytest.raises(InvalidArgument, match="--ttl: expected a time such as 90s"):
        column_ttls(["token="])


@pytest.mark.parametrize("text", ["token", "=3s", "", "token=soon", "token=-1s"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--ttl: expected"):
        column_ttls([text])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["token=36501d"], "expected at most 100 years, found '36501d'"),
        (["token=1e99d"], "expected at most 100 years, found '1e99d'"),
        (["token=1d", "hex:746f6b656e=2d"], "column 'hex:746f6b656e' is named twice"),
    ],
)
def test_what_no_column_can_have_is_refused_by_the_name_of_the_option(
    texts: list[str], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        column_ttls(texts)
    assert (caught.value.field, caught.value.reason) == ("--ttl", reason)
