"""How many there are of something, as people write it: "1 table", "2,048 tables"."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str = "") -> str:
    """The number and the noun; the plural adds an s if none is given."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"
