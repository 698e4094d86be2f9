"""What converts the values of a column, and the two ways in which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

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


class MadeCodec(Codec[T]):
    """A codec that a function makes. It is pickled as a call of that function, since what the
    function has defined in itself cannot be."""

    def __init__(
        self,
        made_by: tuple[Callable[..., Codec[T]], *tuple[object, ...]],
        name: str,
        encode: Callable[[T], bytes],
        decode: Callable[[bytes], T],
    ) -> None:
        """`made_by` is the function and its arguments."""
        super().__init__(name, encode, decode)
        self._made_by = made_by

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made_by[0], self._made_by[1:]


def wrong(expected: str, value: object) -> SchemaError:
    """The error about a value of another type."""
    return SchemaError(f"expected {expected}, got {type(value).__name__}")


def damaged(expected: str, data: bytes) -> SchemaError:
    """The error about bytes that another codec has written."""
    return SchemaError(f"{len(data)} stored bytes are not {expected}")
