"""What converts the values of a column, and the two ways in which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from percolator.errors import SchemaError

T = TypeVar("T")


class Codec(Generic[T]):
    """Converts values of one type to bytes. `encode` refuses all others with `SchemaError`."""

    def __init__(
        self, name: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> None:
        self.name = name
        self.encode = encode
        self.decode = decode

    def __repr__(self) -> str:
        return f"codecs.{self.name}"


def wrong(expected: str, value: object) -> SchemaError:
    """The error about a value of another type."""
    return SchemaError(f"expected {expected}, got {type(value).__name__}")


def damaged(expected: str, data: bytes) -> SchemaError:
    """The error about bytes that another codec has written."""
    return SchemaError(f"{len(data)} stored bytes are not {expected}")
