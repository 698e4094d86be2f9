"""docs/errors.md says what every error means and what to do."""

from __future__ import annotations

import re
from pathlib import Path

from percolator import errors
from percolator.errors import PercolatorError

GUIDE = Path(__file__).parents[3] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def _declared() -> dict[str, str]:
    return {
        name: kind.retry.name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, PercolatorError)
    }


def test_every_error_stands_in_the_guide_once_and_says_whether_a_retry_is_safe() -> None:
    rows = ROW.findall(GUIDE.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    assert {name: retry for name, retry, *_ in rows} == _declared()


def test_every_error_stands_in_the_tree_of_its_module() -> None:
    tree = set(re.findall(r"[─ ] ?(\w+)", (errors.__doc__ or "").split("Every error")[0]))
    assert set(_declared()) <= tree
