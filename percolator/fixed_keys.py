"""Row keys that all have the same number of bytes, and so need nothing that says where they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from uuid import UUID

from percolator.column_codec import Codec, damaged, wrong
from percolator.errors import SchemaError

K = TypeVar("K")

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**63 - 1
_NUMBER_BYTES = 8
_UUID_BYTES = 16
_BITS_SHOWN_MAX = 256


class _FixedLength(Generic[K]):
    """Parts of tuples that are encoded as a whole key is."""

    encode: Callable[[K], bytes]
    decode: Callable[[bytes], K]
    _length: int

    def encode_prefix(self, prefix: K) -> bytes:
        """Raises `SchemaError`."""
        raise SchemaError(f"keys of {self!r} have no prefixes: use start and end")

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple."""
        return self.encode(key)

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        end = start + self._length
        return self.decode(row[start:end]), end


class OrderedNumberCodec(_FixedLength[K]):
    """Row keys in the order of the 64-bit numbers that stand for them."""

    _length = _NUMBER_BYTES

    def __init__(
        self,
        name: str,
        number_of: Callable[[K], int],
        key_at: Callable[[int], K],
        named: Callable[[str], object],
    ) -> None:
        """`named` finds the codec by its name when it is unpickled: its functions cannot be
        pickled."""
        self.name = name
        self._named = named

        def encode(key: K) -> bytes:
            return (number_of(key) - INTEGER_MIN).to_bytes(_NUMBER_BYTES, "big")

        def decode(row: bytes) -> K:
            if len(row) != _NUMBER_BYTES:
                raise damaged(f"a key of {self!r}", row)
            return key_at(int.from_bytes(row, "big") + INTEGER_MIN)

        self.encode, self.decode = encode, decode

    def __reduce__(self) -> tuple[Any, ...]:
        return self._named, (self.name,)

    def __repr__(self) -> str:
        return f"codecs.{self.name}"


class UuidCodec(Codec[UUID], _FixedLength[UUID]):
    """UUIDs, whose order is that of their bytes."""

    _length = _UUID_BYTES

    def __init__(self) -> None:
        super().__init__("uuid", _encode_uuid, _decode_uuid)


def stored_integer(key: int) -> int:
    """The number itself. Refuses what does not fit into 64 bits."""
    if isinstance(key, bool) or not isinstance(key, int):
        raise wrong("int", key)
    if not INTEGER_MIN <= key <= INTEGER_MAX:
        raise too_large(key)
    return key


def too_large(number: int) -> SchemaError:
    """The error about an integer that does not fit."""
    # Python shows none with more than 4,300 digits.
    shown = str(number) if number.bit_length() <= _BITS_SHOWN_MAX else "the number"
    return SchemaError(f"{shown} does not fit into 64 bits")


def _encode_uuid(value: UUID) -> bytes:
    if not isinstance(value, UUID):
        raise wrong("UUID", value)
    return value.bytes


def _decode_uuid(data: bytes) -> UUID:
    if len(data) != _UUID_BYTES:
        raise damaged("a UUID", data)
    return UUID(bytes=data)
