"""Makes and mutates messages by their descriptors, with values that mean something to the cluster.

A request of plain noise is refused by the first check. So most requests begin as valid ones, and
are changed in a few places: a boundary value, a field that is missing, a list with too many
entries, a value that belongs to something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from percolator.v1 import (
    cluster_pb2,
    frames_pb2,
    gateway_pb2,
    lockservice_pb2,
    master_pb2,
    oracle_pb2,
    row_store_pb2,
    tabletserver_pb2,
)
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
    """True if a field with one of these names holds one of its values, anywhere in the message."""
    for place in places(message):
        for field, value in place.ListFields():
            wanted = names.get(field.name)
            if not wanted or field.message_type is not None:
                continue  # another message's field of that name, whose own fields are places, too
            if any(one in wanted for one in (value if field.is_repeated else (value,))):
                return True
    return False


def dials_only(message: Message, vocabulary: Vocabulary) -> bool:
    """True if every address that a server would dial is one of the vocabulary."""
    for place in places(message):
        for field, value in place.ListFields():
            if field.name in CLOSED and value not in vocabulary.of(field.name):
                return False
    return True


# Every method of every service, from the descriptors: a new method is fuzzed without being named.
#
# Only where a method is served, and whether it may wait, is written here. A service that no line
# names stops the run before it begins.

_FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR
    for module in (
        cluster_pb2,
        frames_pb2,
        gateway_pb2,
        lockservice_pb2,
        master_pb2,
        oracle_pb2,
        row_store_pb2,
        tabletserver_pb2,
        health_pb2,
        reflection_pb2,
    )
)

OWN_PACKAGE = "/percolator.v1."

_EVERYWHERE = ("master", "oracle", "lockservice", "tabletserver", "gateway", "worker")
_SERVED_BY = {
    "percolator.v1.OracleService": ("oracle",),
    "percolator.v1.LockService": ("lockservice",),
    "percolator.v1.ClusterService": ("master", "gateway"),
    "percolator.v1.FrameService": ("oracle", "tabletserver"),
    "percolator.v1.MasterService": ("master", "gateway"),
    "percolator.v1.TabletServerService": ("tabletserver",),
    "percolator.v1.GatewayService": ("gateway",),
    "percolator.v1.RowStoreService": ("gateway",),
    "grpc.health.v1.Health": _EVERYWHERE,
    "grpc.reflection.v1alpha.ServerReflection": _EVERYWHERE,
}

MAY_WAIT = {
    "/percolator.v1.MasterService/CreateTable": "returns when its tablets are served",
    "/percolator.v1.MasterService/DeleteTable": "waits for a change of the map in progress",
    "/percolator.v1.MasterService/ChangeObservers": "returns when every tablet knows them",
    "/percolator.v1.MasterService/ReportBackfill": "returns when every tablet knows the observer",
    "/percolator.v1.MasterService/SetChangeFeed": "returns when every tablet knows",
    "/percolator.v1.MasterService/SetTtls": "returns when every tablet knows",
    "/percolator.v1.MasterService/ChangeIndexes": "returns when every tablet knows",
    "/percolator.v1.MasterService/ChangeCodecs": "returns when every tablet knows",
    "/percolator.v1.MasterService/SplitTablet": "returns when both halves are served",
    "/percolator.v1.MasterService/MoveTablet": "returns when it is served there",
    "/percolator.v1.MasterService/DrainServer": "returns when the server has no tablets",
    "/percolator.v1.TabletServerService/WatchNotifications": "has no end",
    "/percolator.v1.TabletServerService/OpenTablet": "waits for the tablet's directory",
    "/percolator.v1.TabletServerService/CloseTablet": "waits until everything is flushed",
    "/percolator.v1.GatewayService/Get": "waits for transactions in its way",
    "/percolator.v1.GatewayService/ScanTable": "waits for transactions in its way",
    "/percolator.v1.GatewayService/FindRows": "waits for transactions in its way",
    "/percolator.v1.GatewayService/FollowChanges": "may have no end",
    "/percolator.v1.GatewayService/Commit": "waits for transactions in its way",
    "/percolator.v1.GatewayService/Resolve": "waits for the tablet of the primary",
    "/grpc.health.v1.Health/Watch": "has no end",
}
"""Methods that may use up the deadline of their caller, with the reason."""


@dataclass(frozen=True)
class Method:
    """One method, and how to call it."""

    path: str
    request: type[Message]
    response: type[Message]
    client_streaming: bool
    server_streaming: bool
    served_by: tuple[str, ...]

    @property
    def own(self) -> bool:
        """True if it is ours: the errors of gRPC's own services carry no details."""
        return self.path.startswith(OWN_PACKAGE)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _method(described: MethodDescriptor) -> Method:
    service = described.containing_service.full_name
    return Method(
        f"/{service}/{described.name}",
        GetMessageClass(described.input_type),
        GetMessageClass(described.output_type),
        described.client_streaming,
        described.server_streaming,
        _SERVED_BY[service],
    )


METHODS: dict[str, Method] = {
    method.path: method
    for file in _FILES
    for service in file.services_by_name.values()
    for method in map(_method, service.methods)
}
