"""JSON in options: refuses what JSON parsers accept silently."""

from __future__ import annotations

import json
from typing import Any

from percolator.errors import InvalidArgument


def parsed(option: str, text: str) -> Any:  # noqa: ANN401 - whatever JSON can say
    """The document in an option. Raises `InvalidArgument` that names the option."""

    def each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
        """If two members have the same name, a JSON parser silently takes the second."""
        found = dict(members)
        if len(found) < len(members):
            names = [name for name, _ in members]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(option, f"{twice!r} appears twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(option, f"is not JSON: {error}") from None
