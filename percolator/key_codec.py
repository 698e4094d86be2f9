"""What a codec for row keys has to do."""

from __future__ import annotations

from typing import Protocol, TypeVar

from percolator.errors import SchemaError

K = TypeVar("K")

_METHODS = ("encode", "decode", "encode_prefix", "encode_part", "decode_part")


class KeyCodec(Protocol[K]):
    """Converts row keys to bytes whose order is that of the keys."""

    def encode(self, key: K) -> bytes:
        """The row of a key."""
        ...

    def decode(self, row: bytes) -> K:
        """The key of a row."""
        ...

    def encode_prefix(self, prefix: K) -> bytes:
        """The bytes with which all rows begin whose keys begin with `prefix`."""
        ...

    def encode_part(self, key: K) -> bytes:
        """The key as part of a tuple: its bytes show where they end, and keep the order."""
        ...

    def decode_part(self, row: bytes, start: int) -> tuple[K, int]:
        """The part that begins at `start`, and where the next one begins."""
        ...


def name_of(codec: object) -> str:
    """The name that a table's schema keeps for a codec; empty for one that has none."""
    name = getattr(codec, "name", "")
    return name if isinstance(name, str) else ""


def is_key_codec(codec: object) -> bool:
    """Whether it can encode row keys, and parts of them."""
    return all(callable(getattr(codec, method, None)) for method in _METHODS)


def require_key_codec(codec: object, where: str) -> None:
    """Refuses, where it is declared, what a scan or a tuple could not use.

    A codec for columns has both of a row's own methods, so that single rows could be read and
    written with it. But its bytes need not have the order of the keys: `integer` would put 3 and
    300 before -5.
    """
    if not is_key_codec(codec):
        raise SchemaError(
            f"{where}: {codec!r:.80} is not a codec for row keys, which keep their order and can "
            "be parts of a tuple: use text, raw, uuid, ordered_integer, ordered_timestamp, "
            "ordered_date, tuple_of(...) or hashed(...)"
        )
