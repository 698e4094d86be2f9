"""Everything that decodes bytes which somebody else has written: records, keys, errors, pages."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from percolator import codecs
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    PercolatorError,
    TabletMoved,
)
from percolator.formats.hidden_cells import acknowledgement_column, observed_column
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.tablet import keys
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.addresses import parse_host_port
from percolator.wire.status import from_detail, status_code, to_detail, to_trailer

_START, _COMMIT = 7 << 18, 8 << 18
_VALUES: tuple[codecs.Codec[Any], ...] = (
    codecs.integer,
    codecs.boolean,
    codecs.text,
    codecs.float,
    codecs.json,
    codecs.raw,
)


class Differs(Exception):
    """What was decoded is encoded as something else, or decoded differently a second time."""


def decode(data: bytes) -> None:
    """The first byte says by what the others are decoded."""
    if data:
        _DECODERS[data[0] % len(_DECODERS)](data[1:])


def _lock(data: bytes) -> None:
    try:
        found = LockRecord.decode(data)
    except InvariantViolation:
        return
    if found.encode() != data and LockRecord.decode(found.encode()) != found:
        raise Differs(f"a lock: {data.hex()}")


def _write(data: bytes) -> None:
    try:
        found = WriteRecord.decode(data)
    except InvariantViolation:
        return
    if WriteRecord.decode(found.encode()) != found:
        raise Differs(f"a write record: {data.hex()}")


def _key(data: bytes) -> None:
    try:
        found = keys.decode(data)
    except InvariantViolation:
        return
    again = keys.encode(found.space, found.row, found.column, found.timestamp, found.qualifier)
    if again != data:
        raise Differs(f"a key: {data.hex()} is encoded as {again.hex()}")


def _hidden(data: bytes) -> None:
    observed_column(data)


def _error(data: bytes) -> None:
    try:
        detail = ErrorDetail.FromString(data)
    except DecodeError:
        return
    error = from_detail(detail)
    if not isinstance(error, PercolatorError):
        raise Differs(f"an error: {data.hex()}")
    text, code = str(error), status_code(error)
    Status.FromString(to_trailer(code, text, to_detail(error)))


def _address(data: bytes) -> None:
    try:
        found = parse_host_port(data.decode("utf-8", "replace"), "address")
    except PercolatorError:
        return
    if parse_host_port(str(found), "address") != found:
        raise Differs(f"an address: {found}")


def _value(data: bytes) -> None:
    """What a codec reads it may refuse to write: it reads more of JSON than it writes."""
    for codec in _VALUES:
        with suppress(PercolatorError):
            codec.encode(codec.decode(data))


_DECODERS = (_lock, _write, _key, _hidden, _error, _address, _value)


def seeds() -> list[bytes]:
    """A valid input for each decoder."""
    primary = CellAddress(7, b"row", b"column")
    lock = LockRecord(_START, _COMMIT, 5_000, RecordKind.PUT, bytes(16), primary, b"value").encode()
    write = WriteRecord(_START, RecordKind.LOCK_ONLY, last_change=_COMMIT).encode()
    key = keys.encode(keys.WRITE, b"r\0ow", b"column", _COMMIT)
    moved = TabletMoved("moved", tablet_id=1, epoch=2)
    conflict = ConflictError("lost", cell=primary, start_timestamp=_START)
    errors = [to_detail(error).SerializeToString() for error in (moved, conflict)]
    valid = [
        (0, [lock]),
        (1, [write, WriteRecord(_START, RecordKind.PUT, b"value").encode()]),
        (2, [key]),
        (3, [acknowledgement_column(b"observer", b"column")]),
        (4, errors),
        (5, [b"localhost:7100", b"[::1]:0"]),
        (6, [bytes(8), b"text", json.dumps({"a": [1, None]}).encode()]),
    ]
    return [bytes([place]) + one for place, inputs in valid for one in inputs]
