"""What a stream leaves in Spark's checkpoint."""

from __future__ import annotations

import json

import pytest

from percolator.errors import InvalidArgument
from percolator.spark.stream_progress import Offset


@pytest.mark.parametrize(
    "offset",
    [Offset(), Offset(7, 3), Offset(7, 3, snapshot=True), Offset(2**63 - 1, 3, after=6)],
)
def test_an_offset_comes_back_as_it_was_and_its_text_does_not_change(offset: Offset) -> None:
    text = json.dumps(offset.json())
    assert Offset.parse(json.loads(text)) == offset
    assert json.dumps(Offset.parse(json.loads(text)).json()) == text


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"offset": 3},
        {"timestamp": "7"},
        {"timestamp": True},
        {"timestamp": 7, "x": 1},
        7,  # such as the source `rate` has
        None,
        ["timestamp"],
    ],
)
def test_the_checkpoint_of_another_source_is_refused(found: object) -> None:
    with pytest.raises(InvalidArgument, match="not an offset of a stream from percolator"):
        Offset.parse(found)
