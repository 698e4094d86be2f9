"""The bytes of the mark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.errors import InvalidArgument, StoreFault, StoreUnusable, WrongCluster
from percolator.services.oracle.oracle import Mark
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX

MARK = Mark(1_795_252_739_606, "0123456789abcdef0123456789abcdef")


@given(
    st.integers(0, PHYSICAL_MILLISECONDS_MAX),
    st.text("0123456789abcdef-", max_size=128),
)
def test_a_mark_is_read_as_it_was_written(milliseconds: int, cluster_id: str) -> None:
    mark = Mark(milliseconds, cluster_id)
    assert Mark.decode(mark.encode(), "mark") == mark


def test_the_format_is_the_documented_one() -> None:
    assert MARK.encode() == (
        b"percolator-oracle-mark 1\n"
        b"cluster=0123456789abcdef0123456789abcdef\n"
        b"milliseconds=1795252739606\n"
        b"crc32=1bef8fb2\n"
    )


def test_no_damaged_mark_is_believed() -> None:
    """Every bit flipped, every length cut short, and the contents of torn or empty files."""
    good = MARK.encode()
    damaged = [
        good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
        for at in range(len(good))
        for bit in range(8)
    ]
    damaged += [good[:length] for length in range(len(good))]
    damaged += [b"\0" * len(good), good + b"\n", good * 2, b"\xff" * 4096]
    for data in damaged:
        with pytest.raises((StoreUnusable, WrongCluster)) as refused:
            Mark.decode(data, "coordinator/oracle/e1/mark")
        assert "coordinator/oracle/e1/mark" in str(refused.value)
        assert "\n" not in str(refused.value)


@given(st.binary(max_size=200))
def test_garbage_is_damage(data: bytes) -> None:
    with pytest.raises(StoreUnusable) as refused:
        Mark.decode(data, "mark")
    assert refused.value.fault is StoreFault.DAMAGED


def test_an_epoch_is_kept_and_a_mark_without_one_is_as_in_older_releases() -> None:
    raised = replace(MARK, epoch=7)
    assert Mark.decode(raised.encode(), "mark") == raised
    assert raised.encode().startswith(b"percolator-oracle-mark 2\n")
    assert MARK.encode().startswith(b"percolator-oracle-mark 1\n")


def test_a_newer_format_is_refused_by_its_number() -> None:
    with pytest.raises(WrongCluster, match="format 3, this one knows 2"):
        Mark.decode(b"percolator-oracle-mark 3\nwhatever comes then", "mark")


def test_a_mark_beyond_what_a_timestamp_can_hold_is_damage() -> None:
    with pytest.raises(StoreUnusable):
        Mark.decode(Mark(PHYSICAL_MILLISECONDS_MAX + 1, "").encode(), "mark")


def test_a_cluster_id_that_could_not_be_read_again_is_not_written() -> None:
    for cluster_id in ("two\nlines", "x" * 129, "ä"):
        with pytest.raises(InvalidArgument):
            Mark(1, cluster_id)
