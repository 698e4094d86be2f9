"""The option `columns` names fields of the catalogue, as Spark does: case does not count."""

from __future__ import annotations

import pytest

from percolator import InvalidArgument
from percolator.spark.catalog import FrameCatalog

CATALOGUE = FrameCatalog.parse(
    """{"key": {"name": "url", "type": "text"},
        "columns": {"title": {"type": "text"}, "Visits": {"type": "integer"}}}"""
)


def test_names_ignore_case() -> None:
    found = CATALOGUE.chosen(("VISITS", "Title"))
    assert [field.name for field in found] == ["Visits", "title"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("TITEL",), "no column 'TITEL'; did you mean 'title'"),
        (("visit",), "did you mean 'Visits'"),
        (("Url",), "'Url' is the key, which every row has"),
        (("title", "TITLE"), "names a column twice: title, TITLE"),
    ],
)
def test_a_wrong_name_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CATALOGUE.chosen(names)
