"""Makes and mutates messages by their descriptors, with values that mean something to the cluster.

A request of plain noise is refused by the first check. So most requests begin as valid ones, and
are changed in a few places: a boundary value, a field that is missing, a list with too many
entries, a value that belongs to something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from percolator.world import Random

_DEPTH_MAX = 6
_PLACES_MAX = 500
_LONG_BYTES = (256, 1_024, 4_096, 65_536, 65_537, 1 << 20)
_REPEATS = (2, 16, 257, 4_097, 10_001)
_REPEATED_BYTES_MAX = 1 << 20


Field = Any
"""A field's descriptor: its class depends on how protobuf is built."""


CLOSED = frozenset({"address", "metrics_address"})
"""Fields that name what a server dials. They take values of the vocabulary only, so that nothing is
sent to another machine."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = (
    "",
    " ",
    "a",
    "\0",
    "..",
    "../../etc",
    "a/b",
    "percolator.",
    "ü\U0001f600\u202e",
    "%s{}",
    "a:1",
)
_NUMBERS = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))


class Vocabulary:
    """Values that occur in the cluster, by the names of the fields that hold them."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[Any]] = defaultdict(list)

    def put(self, name: str, values: Sequence[Any]) -> None:
        self._values[name] = list(values)

    def of(self, name: str) -> Sequence[Any]:
        """The values for a field; a longer name takes those of its last word."""
        known = self._values
        return known.get(name) or known.get(name.rpartition("_")[2]) or known.get(name[:-1]) or ()

    def learn(self, message: Message) -> None:
        """Takes in the short values of a message that a client has really sent."""
        for field, value in message.ListFields():
            for one in _entries(field, value):
                if field.message_type is not None:
                    self.learn(one)
                elif field.name not in CLOSED and len(str(one)) <= 64:
                    self._note(field.name, one)

    def _note(self, name: str, value: Any) -> None:
        known = self._values[name]
        if value not in known:
            known.append(value)
            del known[:-40]


def scalar(field: Field, chance: Random, vocabulary: Vocabulary) -> Any:
    """A value for one entry of the field: one that is known, or a boundary."""
    known = [one for one in vocabulary.of(field.name) if _fits(field, one)]
    if field.name in CLOSED or (known and chance.random() < 0.6):
        return chance.choice(known)
    return boundary(field, chance)


def boundary(field: Field, chance: Random) -> Any:
    kind = field.cpp_type
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        near = 1 << chance.randrange(most.bit_length())
        return chance.choice((least, 0, 1, near - 1, near, most - 1, most))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice([*field.enum_type.values_by_number, 99, 2**31 - 1, -1])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_NUMBERS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice((*_TEXTS, "x" * chance.choice(_LONG_BYTES[:5])))
    return _noise(chance)


def _noise(chance: Random) -> bytes:
    length = chance.choice((0, 1, 2, 8, 9, 16, 17, 21, 40))
    if chance.random() < 0.1:
        return chance.choice((b"\0", b"\xff")) * chance.choice(_LONG_BYTES[:5])
    return chance.choice((b"\0" * length, b"\xff" * length, chance.randbytes(length)))


def _fits(field: Field, value: Any) -> bool:
    kind = field.cpp_type
    if isinstance(value, bool):
        return bool(kind == FieldDescriptor.CPPTYPE_BOOL)
    if isinstance(value, int):
        if kind in _INTEGERS:
            least, most = _INTEGERS[kind]
            return least <= value <= most
        return bool(kind == FieldDescriptor.CPPTYPE_ENUM)
    if isinstance(value, str):
        return bool(field.type == FieldDescriptor.TYPE_STRING)
    return isinstance(value, bytes) and bool(field.type == FieldDescriptor.TYPE_BYTES)


# ----------------------------------------------------------------------------- whole messages


def generated(described: Any, chance: Random, vocabulary: Vocabulary) -> Message:
    """A message made up from its descriptor alone."""
    message: Message = GetMessageClass(described)()
    _fill(message, chance, vocabulary, _DEPTH_MAX)
    return message


def _fill(message: Message, chance: Random, vocabulary: Vocabulary, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() < (0.75 if depth > 2 else 0.4):
            _set(message, field, chance, vocabulary, depth)


def _set(
    message: Message, field: Field, chance: Random, vocabulary: Vocabulary, depth: int
) -> None:
    if field.is_repeated:
        entries = getattr(message, field.name)
        for _ in range(chance.choice((0, 1, 1, 2, 3, 5))):
            if field.message_type is None:
                entries.append(scalar(field, chance, vocabulary))
            elif depth:
                _fill(entries.add(), chance, vocabulary, depth - 1)
    elif field.message_type is None:
        setattr(message, field.name, scalar(field, chance, vocabulary))
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth:
            _fill(inner, chance, vocabulary, depth - 1)


# ---------------------------------------------------------------------------------- mutations


def mutate(message: Message, chance: Random, vocabulary: Vocabulary) -> None:
    """Changes one thing somewhere in the message."""
    place = chance.choice(list(places(message)))
    if not place.DESCRIPTOR.fields:
        return
    field: Field = chance.choice(place.DESCRIPTOR.fields)
    if chance.random() < 0.2:
        place.ClearField(field.name)
    elif field.is_repeated:
        _mutate_list(place, field, chance, vocabulary)
    else:
        _mutate_value(place, field, chance, vocabulary)


def _mutate_list(place: Message, field: Field, chance: Random, vocabulary: Vocabulary) -> None:
    entries = getattr(place, field.name)
    if not entries or chance.random() < 0.4:
        _set(place, field, chance, vocabulary, 2)
        return
    kept = list(entries)
    if chance.random() < 0.3:
        kept.pop(chance.randrange(len(kept)))
    elif chance.random() < 0.5:
        chance.shuffle(kept)
    else:
        kept.append(chance.choice(kept))
    copies = [_copy(one) for one in kept]
    place.ClearField(field.name)
    getattr(place, field.name).extend(copies)


def _mutate_value(place: Message, field: Field, chance: Random, vocabulary: Vocabulary) -> None:
    value = getattr(place, field.name)
    if isinstance(value, bytes) and value and chance.random() < 0.5:
        setattr(place, field.name, damaged(value, chance))
    elif isinstance(value, int) and field.cpp_type in _INTEGERS and chance.random() < 0.4:
        least, most = _INTEGERS[field.cpp_type]
        near = value + chance.choice((-1, 1, -(1 << 18), 1 << 18))
        setattr(place, field.name, min(max(near, least), most))
    else:
        _set(place, field, chance, vocabulary, 2)


def grow(message: Message, chance: Random) -> None:
    """Makes one list, or one value, far longer than it should be."""
    lists: list[tuple[Message, Field]] = []
    values: list[tuple[Message, Field]] = []
    for place in places(message):
        for field in place.DESCRIPTOR.fields:
            if field.is_repeated and len(getattr(place, field.name)):
                lists.append((place, field))
            elif field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated:
                values.append((place, field))
    if lists and (not values or chance.random() < 0.6):
        place, field = chance.choice(lists)
        entry = _copy(getattr(place, field.name)[0])
        size = entry.ByteSize() if isinstance(entry, Message) else len(str(entry))
        count = min(chance.choice(_REPEATS), _REPEATED_BYTES_MAX // max(size, 1))
        getattr(place, field.name).extend([entry] * max(count, 2))
    elif values:
        place, field = chance.choice(values)
        setattr(place, field.name, b"x" * chance.choice(_LONG_BYTES))


def _entries(field: FieldDescriptor, value: Any) -> Iterable[Any]:
    """The values of a field: of a map, such as the states in an answer about health, without its
    keys."""
    if not field.is_repeated:
        return (value,)
    entries: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    return entries


def places(message: Message) -> Iterator[Message]:
    """The message and all messages in it, outermost first; not all of very many."""
    waiting = [message]
    for number, place in enumerate(waiting):
        if number == _PLACES_MAX:
            return
        yield place
        for field, value in place.ListFields():
            if field.message_type is not None:
                waiting.extend(_entries(field, value))


def damaged(data: bytes, chance: Random) -> bytes:
    """The bytes with a few of them changed, missing, or duplicated."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if not changed:
            return chance.randbytes(8)
        at, until = sorted(chance.choices(range(len(changed) + 1), k=2))
        match chance.randrange(5):
            case 0:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1:
                changed[at % len(changed)] = chance.choice((0, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at:until]
            case 3:
                changed[at:at] = changed[at : at + 64]
            case _:
                changed[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(changed)


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def mentions(message: Message, names: Mapping[str, frozenset[Any]]) -> bool:
    """Whether a field with one of these names holds one of its values, anywhere in the message."""
    for place in places(message):
        for field, value in place.ListFields():
            wanted = names.get(field.name)
            if not wanted or field.message_type is not None:
                continue  # another message's field of that name, whose own fields are places, too
            if any(one in wanted for one in (value if field.is_repeated else (value,))):
                return True
    return False


def dials_only(message: Message, vocabulary: Vocabulary) -> bool:
    """Whether every address that a server would dial is one of the vocabulary."""
    for place in places(message):
        for field, value in place.ListFields():
            if field.name in CLOSED and value not in vocabulary.of(field.name):
                return False
    return True
