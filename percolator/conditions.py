"""Conditions on the values of a row: which rows a scan keeps.

Programs write them with columns, and tablet servers send only the rows that match:

    where=(age >= 18) & name.startswith("A") | left.is_null()

Values are compared, not bytes: each is read with the column's codec, and compared as Python does.
Text is compared by code point, which is the order of its UTF-8 bytes. A column without a value
matches nothing but `is_null()`, as in SQL. A value that the codec cannot read is an error where the
scan comes to its row, whatever the other parts of the condition say; so the order of the parts
never matters.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Protocol

from percolator import codecs
from percolator.codecs.readable import quoted, value_codec
from percolator.codecs.values import Codec
from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.v1.cells_pb2 import RowFilter

DEPTH_MAX = 16
"""How deeply conditions may be nested. Parts that are joined by the same operator are side by side.
"""
PARTS_MAX = 256
OPERANDS_MAX = 1_000
BYTES_MAX = 64 << 10
"""The limit of the whole condition, as a message."""

_COMPARED = {
    RowFilter.KIND_EQUAL: operator.eq,
    RowFilter.KIND_NOT_EQUAL: operator.ne,
    RowFilter.KIND_LESS: operator.lt,
    RowFilter.KIND_AT_MOST: operator.le,
    RowFilter.KIND_GREATER: operator.gt,
    RowFilter.KIND_AT_LEAST: operator.ge,
}
_JOINED = {RowFilter.KIND_ALL: operator.and_, RowFilter.KIND_ANY: operator.or_}
_NULLS = {RowFilter.KIND_NULL: operator.is_, RowFilter.KIND_NOT_NULL: operator.is_not}
_BYTES = ("raw", "text")
"""Codecs whose values have prefixes."""

Cells = Mapping[bytes, Sequence[bytes | None]]
"""By column: the value in each row, None for a row without one."""


class ComparedColumn(Protocol):
    """A column, as far as conditions know it."""

    name: bytes
    codec: Codec[Any]


class Condition:
    """A condition on a row, made with the operators and methods of its columns, `&` and `|`."""

    __slots__ = ("columns", "message")

    def __init__(self, message: RowFilter, columns: tuple[Any, ...]) -> None:
        self.message = message
        """Do not change it: other conditions may have been made of it."""
        self.columns = columns
        """Its columns, each a `Column`."""

    def __and__(self, other: Condition) -> Condition:
        return self._joined(RowFilter.KIND_ALL, other)

    def __or__(self, other: Condition) -> Condition:
        return self._joined(RowFilter.KIND_ANY, other)

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        raise UsageError(
            "a condition is judged row by row, and is neither true nor false: use & and | instead "
            "of and, or and chained comparisons, with brackets around each part"
        )

    def _joined(self, kind: RowFilter.Kind, other: Condition) -> Condition:
        require_condition(other, "where")
        parts: list[RowFilter] = []
        for one in (self.message, other.message):
            parts += one.parts if one.kind == kind else (one,)
        joined = RowFilter(kind=kind, parts=parts)
        require_small(joined, "where")
        columns = dict.fromkeys((*self.columns, *other.columns))
        return Condition(joined, tuple(columns))

    def __repr__(self) -> str:
        return f"Condition({self.message!s:.200})"


def require_condition(condition: object, field: str) -> None:
    if isinstance(condition, bool):
        raise InvalidArgument(
            field,
            f"expected a condition, got {condition}: == and != compare columns, not values; write "
            "column.equals(value), column.is_in(values), column.is_null()",
        )
    if not isinstance(condition, Condition):
        raise InvalidArgument(
            field,
            f"expected a condition such as column >= value, got {type(condition).__name__}",
        )


def compared(column: ComparedColumn, kind: RowFilter.Kind, values: Sequence[object]) -> Condition:
    """A condition on one column. Raises `SchemaError` for values that do not fit it."""
    codec = column.codec
    if kind in _NULLS:
        return Condition(RowFilter(kind=kind, column=column.name), (column,))
    _require_comparable(kind, codec.name, f"column {quoted(column.name)}")
    try:
        operands = [codec.encode(value) for value in values]
    except SchemaError as error:
        hint = "; use is_null()" if None in values else ""
        raise SchemaError(f"column {quoted(column.name)}: {error.message}{hint}") from None
    message = RowFilter(kind=kind, column=column.name, codec=codec.name, operands=operands)
    require_small(message, "where")
    return Condition(message, (column,))


def listed_operands(values: object) -> list[Any]:
    """The values of `is_in`. Refuses text, which would count as its letters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgument("values", f"expected a list, got {type(values).__name__}")
    found = [*islice(values, OPERANDS_MAX + 1)]
    if len(found) > OPERANDS_MAX:
        raise InvalidArgument("values", f"at most {OPERANDS_MAX} allowed")
    return found


def _require_comparable(kind: int, codec: str, where: str) -> None:
    if kind == RowFilter.KIND_PREFIX and codec not in _BYTES:
        raise SchemaError(f"{where}: values of codec {codec or 'stored'} have no prefixes")
    if not codec:
        raise SchemaError(f"{where} has no codec that servers know: only is_null() can be asked")
    if _reader(codec) is None:
        raise SchemaError(f"{where}: values of codec {codec} have no order: use is_null() only")


def require_small(message: RowFilter, field: str) -> None:
    """Raises `InvalidArgument` for a condition that is too large, or too deeply nested."""
    size = message.ByteSize()
    if size > BYTES_MAX:
        raise InvalidArgument(field, f"has {size} bytes, at most {BYTES_MAX} allowed")
    operands = 0
    for parts, (depth, part) in enumerate(_parts(message), 1):
        operands += len(part.operands)
        if depth > DEPTH_MAX:
            raise InvalidArgument(field, f"is nested more than {DEPTH_MAX} deep")
        if parts > PARTS_MAX:
            raise InvalidArgument(field, f"has more than {PARTS_MAX} parts")
        if operands > OPERANDS_MAX:
            raise InvalidArgument(field, f"compares with more than {OPERANDS_MAX} values")


def _parts(message: RowFilter) -> Iterator[tuple[int, RowFilter]]:
    left = [(1, message)]
    while left:
        depth, part = left.pop()
        yield depth, part
        left += ((depth + 1, one) for one in part.parts)


def necessary(message: RowFilter) -> list[RowFilter]:
    """Comparisons of single columns, of which at least one holds wherever the condition does; none
    if there is no such list. Among several lists, that which is likely to hold for fewest rows."""
    if _only_column(message):
        return [message]
    if message.kind == RowFilter.KIND_ANY:
        found = [*map(necessary, message.parts)]
        return [*chain.from_iterable(found)] if all(found) else []
    lists: list[list[RowFilter]] = []
    together: dict[bytes, list[RowFilter]] = {}
    for part in message.parts:
        column = _only_column(part)
        if column:
            together.setdefault(column, []).append(part)
        else:
            lists += filter(None, (necessary(part),))
    for parts in together.values():
        lists.append(parts if len(parts) == 1 else [RowFilter(kind=message.kind, parts=parts)])
    return min(lists, key=_width, default=[])


def _only_column(message: RowFilter) -> bytes:
    """The column that all parts compare with values; empty if there are others, or a null."""
    leaves = [part for _, part in _parts(message) if not part.parts]
    columns = {b"" if part.kind in _NULLS else part.column for part in leaves}
    return columns.pop() if len(columns) == 1 else b""


def _width(comparisons: list[RowFilter]) -> tuple[int, int, int]:
    """Smaller if they are likely to hold for fewer rows: an equality for fewer than a range, and a
    range with two ends for fewer than one that is open."""
    kinds = [min(_WIDTHS.get(part.kind, 2) for _, part in _parts(one)) for one in comparisons]
    return len(comparisons), max(kinds), -sum(len(one.parts) for one in comparisons)


_WIDTHS = {RowFilter.KIND_EQUAL: 0, RowFilter.KIND_ONE_OF: 1, RowFilter.KIND_PREFIX: 1}


# Evaluation, of many rows at a time.


class Predicate:
    """Says of many rows at a time which ones a condition keeps."""

    def __init__(self, message: RowFilter, field: str = "filter") -> None:
        """Raises `InvalidArgument` for a message that makes no sense."""
        require_small(message, field)
        self.message = message
        compared = {(part.column, part.codec) for _, part in _parts(message) if part.column}
        self.codecs = tuple(sorted(compared))
        """Columns, each with the name of a codec that reads it; empty if its values are not read.
        """
        self.columns = tuple(sorted({column for column, _ in compared}))
        self._decide = _decider(message, field)
        self.packed_bytes = _NUMBER_BYTES if {codec for _, codec in compared} <= {*_PACKED} else 0
        """The size of every value that can be read; 0 if they differ. See `keeps_packed`."""
        if len(compared) != 1:
            self.packed_bytes = 0
        self.keeps_empty = self.keeps(dict.fromkeys(self.columns, (None,)), 1)[0]
        """It keeps rows that have none of its columns."""

    def keeps(self, cells: Cells, rows: int) -> list[bool]:
        """For each row, True if it is kept. Raises `SchemaError` if a value cannot be read."""
        return self._decide(_Values(cells, rows))

    def keeps_packed(self, packed: bytes, rows: int, *, skipped: int) -> list[bool]:
        """As `keeps`, for rows that all have a value of the only column, which has `packed_bytes`:
        they are one behind the other, each after so many other bytes."""
        values = _Values({}, rows)
        for column, codec in self.codecs:
            values.unpack(column, codec, packed, skipped)
        return self._decide(values)

    def keeps_row(self, row: Mapping[bytes, bytes | None]) -> bool:
        """True if one row, given by column, is kept."""
        return self.keeps({column: (row.get(column),) for column in self.columns}, 1)[0]

    def evaluate(self, cells: Cells, rows: int) -> tuple[list[bool], set[int]]:
        """As `keeps`, and which rows have a value that cannot be read: their answers count for
        nothing."""
        try:
            return self.keeps(cells, rows), set()
        except SchemaError:
            answers, unreadable = [], set()
            for at in range(rows):
                try:
                    answers += self.keeps({name: cells[name][at : at + 1] for name in cells}, 1)
                except SchemaError:
                    answers.append(False)
                    unreadable.add(at)
            return answers, unreadable


class _Values:
    """The values of some rows. Each column is read once, however often it is compared."""

    def __init__(self, cells: Cells, rows: int) -> None:
        self.cells = cells
        self.rows = rows
        self._read: dict[tuple[bytes, str], Sequence[Any]] = {}

    def unpack(self, column: bytes, codec: str, packed: bytes, skipped: int) -> None:
        """Reads the values of a column from behind the other bytes, without taking them apart."""
        kind, reader = _PACKED[codec]
        found = struct.unpack(">" + f"{skipped}x{kind}" * self.rows, packed)
        _require_in_range(kind, reader, found)
        self._read[column, codec] = found

    def present(self, column: bytes, codec: str, read: _Reader) -> Sequence[Any]:
        """The values of the rows that have one."""
        found = self._read.get((column, codec))
        if found is None:
            stored = [value for value in self.cells[column] if value is not None]
            try:
                found = read(stored) if stored else []
            except SchemaError as error:
                raise SchemaError(f"column {quoted(column)}: {error.message}") from None
            self._read[column, codec] = found
        return found

    def spread(self, column: bytes, answers: list[bool]) -> list[bool]:
        """Answers about rows with a value, as answers about all rows."""
        if len(answers) == self.rows:
            return answers
        left = iter(answers)
        return [value is not None and next(left) for value in self.cells[column]]


_Reader = Callable[[list[bytes]], list[Any]]
_Decider = Callable[[_Values], list[bool]]


def _decider(message: RowFilter, field: str) -> _Decider:
    kind, parts = message.kind, message.parts
    if kind in _JOINED:
        if not parts or message.column or message.codec or message.operands:
            raise InvalidArgument(field, f"kind {kind}: expected parts and nothing else")
        deciders = [_decider(one, f"{field}.parts[{at}]") for at, one in enumerate(parts)]
        return partial(_join, _JOINED[kind], deciders)
    if parts or not message.column:
        raise InvalidArgument(field, f"kind {kind}: expected a column and no parts")
    if kind in _NULLS:
        if message.operands:
            raise InvalidArgument(f"{field}.operands", "expected none")
        return partial(_is_null, _NULLS[kind], message.column)
    if kind not in _COMPARED and kind not in (RowFilter.KIND_ONE_OF, RowFilter.KIND_PREFIX):
        raise InvalidArgument(f"{field}.kind", f"{kind} is not a kind of condition")
    read = _reader(message.codec)
    if read is None or (kind == RowFilter.KIND_PREFIX and message.codec not in _BYTES):
        raise InvalidArgument(f"{field}.codec", f"{message.codec!r} cannot be compared like this")
    if kind != RowFilter.KIND_ONE_OF and len(message.operands) != 1:
        raise InvalidArgument(f"{field}.operands", "expected exactly one")
    try:
        operands = read(list(message.operands)) if message.operands else []
    except SchemaError as error:
        raise InvalidArgument(f"{field}.operands", error.message) from None
    compare: _Comparison
    if kind == RowFilter.KIND_ONE_OF:
        compare = partial(map, frozenset(operands).__contains__)
    elif kind == RowFilter.KIND_PREFIX:
        compare = partial(_begins, operands[0])
    else:
        compare = partial(_compare, _COMPARED[kind], operands[0])
    return partial(_compare_column, message.column, message.codec, read, compare)


_Comparison = Callable[[Sequence[Any]], Iterator[bool]]


def _join(
    join: Callable[[bool, bool], bool], deciders: Sequence[_Decider], values: _Values
) -> list[bool]:
    # None is left out, even where the others have decided: a value that cannot be read is an error.
    first, *others = [decide(values) for decide in deciders]
    for one in others:
        first = [*map(join, first, one)]
    return first


def _is_null(compare: Callable[[Any, Any], bool], column: bytes, values: _Values) -> list[bool]:
    return [*map(compare, values.cells[column], repeat(None))]


def _compare_column(
    column: bytes, codec: str, read: _Reader, compare: _Comparison, values: _Values
) -> list[bool]:
    return values.spread(column, [*compare(values.present(column, codec, read))])


def _compare(
    holds: Callable[[Any, Any], bool], operand: object, values: Sequence[Any]
) -> Iterator[bool]:
    return map(holds, values, repeat(operand))


def _begins(prefix: bytes, values: Sequence[bytes]) -> Iterator[bool]:
    return map(bytes.startswith, values, repeat(prefix))


# Reading the values of a whole page at once: a call for each would take most of the time.


def _reader(codec: str) -> _Reader | None:
    """Reader of values of this codec for comparison; None if they cannot be compared."""
    known = _READERS.get(codec)
    if known is None and codec.startswith("decimal("):
        found = value_codec(codec)
        known = None if found is None else partial(_one_by_one, found)
    return known


def _one_by_one(codec: Codec[Any], values: list[bytes]) -> list[Any]:
    return [*map(codec.decode, values)]


def _numbers(kind: str, codec: Codec[Any], values: list[bytes]) -> list[Any]:
    if {*map(len, values)} != {_NUMBER_BYTES}:
        return _one_by_one(codec, values)  # which raises
    found = [*struct.unpack(f">{len(values)}{kind}", b"".join(values))]
    _require_in_range(kind, codec, found)
    return found


def _require_in_range(kind: str, codec: Codec[Any], numbers: Sequence[Any]) -> None:
    """Raises `SchemaError` if one is no value: a moment or a day may be out of range."""
    if codec not in (codecs.timestamp, codecs.date):
        return
    for extreme in (min(numbers), max(numbers)):
        codec.decode(struct.pack(f">{kind}", extreme))


def _texts(values: list[bytes]) -> list[bytes]:
    try:
        b"\0".join(values).decode()  # no character spans a zero byte
    except UnicodeDecodeError:
        _one_by_one(codecs.text, values)  # which raises
    return values


def _booleans(codec: Codec[Any], values: list[bytes]) -> list[bytes]:
    _one_by_one(codec, [*{*values}])
    return values


def _uuids(codec: Codec[Any], values: list[bytes]) -> list[bytes]:
    return values if {*map(len, values)} == {16} else _one_by_one(codec, values)


def _read_raw(values: list[bytes]) -> list[bytes]:
    return values


_NUMBER_BYTES = 8
_PACKED: dict[str, tuple[str, Codec[Any]]] = {
    "integer": ("q", codecs.integer),
    "timestamp": ("q", codecs.timestamp),
    "date": ("q", codecs.date),
    "float": ("d", codecs.float),
}
"""Codecs of numbers, with how `struct` names them."""
_READERS: dict[str, _Reader] = {
    "raw": _read_raw,
    "text": _texts,
    "boolean": partial(_booleans, codecs.boolean),
    "uuid": partial(_uuids, codecs.uuid),
    **{name: partial(_numbers, *packed) for name, packed in _PACKED.items()},
}
