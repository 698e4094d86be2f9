"""Dataclasses and pydantic models as JSON: an object with a member for each field."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from percolator.codecs.values import Codec, MadeCodec, damaged, wrong
from percolator.errors import SchemaError

M = TypeVar("M")
V = TypeVar("V")


class Unfit(Exception):
    """A value that does not fit; `place` says where in the model it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = ""


class Form(NamedTuple):
    """The form of a type in JSON, and the way back. Both raise `Unfit`."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def require(kind: type[V], value: object) -> V:
    """The value itself. Refuses a value of another type, even a subclass: a `bool` is not an `int`,
    and a subclass would come back as its base."""
    if type(value) is not kind:
        raise Unfit(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def model(kind: type[M]) -> Codec[M]:
    """A codec for instances of one dataclass or pydantic model.

    A field with a default may be added later: rows that were written without it get the default.
    A dataclass refuses stored fields that it does not have, since writing it back would lose them,
    and a field whose type could not be read back exactly is refused here. pydantic models follow
    their own configuration; what would come back different is refused when it is written.
    """
    if isinstance(kind, type):
        # A program that declares such a model has imported pydantic: the library need not.
        pydantic = sys.modules.get("pydantic")
        if pydantic is not None and issubclass(kind, pydantic.BaseModel):
            if not hasattr(kind, "model_dump_json"):
                raise SchemaError(f"model {kind.__name__}: pydantic 2 is needed")
            return _pydantic_codec(kind)
        if dataclasses.is_dataclass(kind):
            return _dataclass_codec(kind)
    raise SchemaError(f"expected a dataclass or a pydantic model, got {kind!r:.80}")


def _dataclass_codec(kind: type[M]) -> Codec[M]:
    form = model_form(kind, {})

    def encode(value: M) -> bytes:
        try:
            packed = form.pack(value)
            return json.dumps(packed, ensure_ascii=False, separators=(",", ":")).encode()
        except Unfit as unfit:
            raise _unfit(kind, unfit) from None
        except (ValueError, RecursionError) as error:  # an int of thousands of digits; a circle
            raise SchemaError(f"model {kind.__name__}: {error}") from None

    def decode(data: bytes) -> M:
        try:
            found: M = form.unpack(json.loads(data))
        except Unfit as unfit:
            raise _unfit(kind, unfit) from None
        except (ValueError, RecursionError):
            raise damaged("JSON", data) from None
        return found

    return MadeCodec((model, kind), f"model({kind.__name__})", encode, decode)


def _unfit(kind: type[Any], unfit: Unfit) -> SchemaError:
    field = f", field {unfit.place.removeprefix('.')!r}" if unfit.place else ""
    return SchemaError(f"model {kind.__name__}{field}: {unfit.reason}")


def _pydantic_codec(kind: type[Any]) -> Codec[Any]:
    def encode(value: Any) -> bytes:  # noqa: ANN401 - an instance of `kind`
        if type(value) is not kind:
            raise wrong(kind.__name__, value)
        try:
            data: bytes = value.model_dump_json(
                by_alias=True, round_trip=True, warnings="error"
            ).encode()
        except ValueError as error:
            raise SchemaError(f"model {kind.__name__}: {error}") from None
        # Otherwise a field that is excluded, secret or NaN would be lost, and only a reader would
        # notice.
        if not _same(decode(data), value):
            raise SchemaError(f"model {kind.__name__}: read back from JSON, it would differ")
        return data

    def decode(data: bytes) -> Any:  # noqa: ANN401 - an instance of `kind`
        try:
            return kind.model_validate_json(data)
        except ValueError as error:
            raise SchemaError(f"model {kind.__name__}: {_first_reason(error)}") from None

    return MadeCodec((model, kind), f"model({kind.__name__})", encode, decode)


def _same(found: Any, given: Any) -> bool:  # noqa: ANN401 - parts of models
    """True if the value read back equals the one given, with moments in any time zones.

    Python has a moment in an hour that clocks show twice, or never, equal to none of another zone.
    """
    if found == given:
        return True
    if isinstance(found, datetime) and isinstance(given, datetime):
        zones = found.utcoffset(), given.utcoffset()
        return None not in zones and found - given == timedelta()
    if type(found) is not type(given):
        return False
    if isinstance(given, list | tuple):
        return len(found) == len(given) and all(map(_same, found, given))
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(_same(found[key], given[key]) for key in given)
    if hasattr(given, "__pydantic_fields_set__"):
        return found.__pydantic_private__ == given.__pydantic_private__ and _same(
            [
                found.__pydantic_extra__,
                *(getattr(found, name) for name in type(given).model_fields),
            ],
            [
                given.__pydantic_extra__,
                *(getattr(given, name) for name in type(given).model_fields),
            ],
        )
    if dataclasses.is_dataclass(given):
        names = [field.name for field in dataclasses.fields(given)]
        return all(_same(getattr(found, name), getattr(given, name)) for name in names)
    return False


def _first_reason(error: ValueError) -> str:
    """Pydantic's message about the first field, without the input, which may be long."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"field {place!r}: {first['msg']}" if place else str(first["msg"])


# ---------------------------------------------------------------------------- fields of dataclasses

_SUPPORTED = (
    "str, int, float, bool, datetime, date, UUID, Decimal, enums of str or int, dataclasses, "
    "list[...], tuple[...], dict[str, ...] and ... | None"
)


def model_form(kind: type[Any], known: dict[type[Any], Form]) -> Form:
    """The form of a dataclass. `known` has those that are being made: a model may hold itself."""
    if kind in known:
        return known[kind]
    fields = dataclasses.fields(kind)
    forms: dict[str, Form] = {}
    optional: set[str] = set()
    known[kind] = form = Form(
        lambda value: _packed(kind, forms, value), lambda data: _model(kind, forms, optional, data)
    )
    try:
        hints = typing.get_type_hints(kind)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise SchemaError(
            f"model {kind.__name__}: its types cannot be determined: {error}"
        ) from None
    for field in fields:
        where = f"model {kind.__name__}, field {field.name!r}"
        if not field.init:
            raise SchemaError(f"{where}: it has init=False, so it could not be read back")
        forms[field.name] = _form(hints[field.name], where, known)
        if not (field.default is field.default_factory is dataclasses.MISSING):
            optional.add(field.name)
    # A class that cannot be made from its fields could be written, and never read.
    try:
        inspect.signature(kind).bind(**dict.fromkeys(forms))
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"model {kind.__name__}: it cannot be made from its fields, so it could not be read "
            f"back: {error}"
        ) from None
    return form


def _packed(kind: type[Any], forms: dict[str, Form], value: object) -> dict[str, Any]:
    require(kind, value)
    return {name: _at(f".{name}", form.pack, getattr(value, name)) for name, form in forms.items()}


def _model(kind: type[Any], forms: dict[str, Form], optional: set[str], data: object) -> object:
    values: dict[str, Any] = require(dict, data)
    missing = [name for name in forms if name not in values and name not in optional]
    if missing:
        raise Unfit(f"{kind.__name__} needs a field {missing[0]!r}, which is not stored")
    # Leaving it out would lose it: the program would write the model back without it.
    unknown = [name for name in values if name not in forms]
    if unknown:
        raise Unfit(f"a field {unknown[0]!r} is stored, which {kind.__name__} does not have")
    found = {name: _at(f".{name}", forms[name].unpack, part) for name, part in values.items()}
    try:
        return kind(**found)
    except (TypeError, ValueError) as error:
        raise Unfit(f"{kind.__name__} refuses what is stored: {error}") from None


def _at(place: str, convert: Callable[[Any], Any], value: object) -> Any:  # noqa: ANN401 - either way
    try:
        return convert(value)
    except Unfit as unfit:
        unfit.place = place + unfit.place
        raise


# ---------------------------------------------------------------------------- types of fields


def _form(hint: Any, where: str, known: dict[type[Any], Form]) -> Form:  # noqa: ANN401 - a type
    if hint in _PLAIN:
        return _PLAIN[hint]
    parts = typing.get_args(hint)
    # `typing.List` alone has an origin, too, but does not say what its items are.
    origin = typing.get_origin(hint) if hasattr(hint, "__args__") else None
    if origin in (types.UnionType, typing.Union):
        others = [part for part in parts if part is not types.NoneType]
        if len(others) == 1:
            form = _form(others[0], where, known)
            return Form(
                lambda value: None if value is None else form.pack(value),
                lambda data: None if data is None else form.unpack(data),
            )
    elif origin is list:
        return _sequence(list, _form(parts[0], where, known))
    elif origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return _sequence(tuple, _form(parts[0], where, known))
    elif origin is tuple and Ellipsis not in parts:
        return _fixed([_form(part, where, known) for part in parts])
    elif origin is dict and parts[0] is str:
        return _by_name(_form(parts[1], where, known))
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return model_form(hint, known)
    elif (
        isinstance(hint, type)
        and issubclass(hint, Enum)
        and all(type(member.value) in (str, int) for member in hint)
    ):
        return member_form(hint)
    shown = hint.__name__ if isinstance(hint, type) else hint
    raise SchemaError(f"{where}: {shown} is none of {_SUPPORTED}")


def _sequence(kind: type[Any], form: Form) -> Form:
    def converted(source: type[Any], convert: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - either way
        parts = enumerate(require(source, value))
        return [_at(f"[{place}]", convert, part) for place, part in parts]

    return Form(
        lambda value: converted(kind, form.pack, value),
        lambda data: kind(converted(list, form.unpack, data)),
    )


def _fixed(forms: list[Form]) -> Form:
    def converted(source: type[Any], converts: list[Callable[[Any], Any]], value: Any) -> list[Any]:  # noqa: ANN401 - either way
        if len(require(source, value)) != len(forms):
            raise Unfit(f"expected {len(forms)} parts, got {len(value)}")
        pairs = zip(converts, value, strict=True)
        return [_at(f"[{place}]", convert, part) for place, (convert, part) in enumerate(pairs)]

    return Form(
        lambda value: converted(tuple, [form.pack for form in forms], value),
        lambda data: tuple(converted(list, [form.unpack for form in forms], data)),
    )


def _by_name(form: Form) -> Form:
    def converted(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:  # noqa: ANN401 - either way
        parts = require(dict, value).items()
        return {text_of(key): _at(f"[{key!r}]", convert, part) for key, part in parts}

    return Form(
        lambda value: converted(form.pack, value), lambda data: converted(form.unpack, data)
    )


# ---------------------------------------------------------------------------- single values


def _float(value: float) -> float:
    if type(value) not in (float, int):
        raise Unfit(f"expected float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise Unfit("the number is too large for a float") from None
    if not math.isfinite(number):
        raise Unfit(f"{number} is not a number in JSON")
    return number


def text_of(value: object) -> str:
    """The text itself, if it can be stored."""
    text = require(str, value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unfit(f"the text cannot be encoded as UTF-8: {error.reason}") from None
    return text


def _time_text(moment: datetime) -> str:
    if moment.utcoffset() is None:
        raise Unfit("the datetime has no time zone, so it is not one moment")
    try:
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise Unfit("the datetime is beyond the years 1 to 9999 in UTC") from None


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.utcoffset() is None:
        raise ValueError
    return moment


def _exact_text(number: Decimal) -> str:
    if not number.is_finite():
        raise Unfit(f"{number} is not an exact number")
    return str(number)


def _exact(text: str) -> Decimal:
    number = Decimal(text)
    if not number.is_finite():
        raise ValueError
    return number


def _as_text(kind: type[V], pack: Callable[[V], str], parse: Callable[[str], V]) -> Form:
    def unpack(text: object) -> V:
        try:
            return parse(require(str, text))
        except (ValueError, InvalidOperation):
            raise Unfit(f"{text!r:.80} is no {kind.__name__}") from None

    return Form(lambda value: pack(require(kind, value)), unpack)


def member_form(kind: type[Enum]) -> Form:
    """The form of an enum, whose members are written as their values."""

    def unpack(data: object) -> Enum:
        if type(data) not in (str, int):
            raise Unfit(f"expected {kind.__name__}, got {type(data).__name__}")
        try:
            return kind(data)
        except ValueError:
            raise Unfit(f"{data!r:.80} is no {kind.__name__}") from None

    return Form(lambda value: require(kind, value).value, unpack)


_PLAIN: dict[Any, Form] = {
    str: Form(text_of, text_of),
    int: Form(partial(require, int), partial(require, int)),
    float: Form(_float, _float),
    bool: Form(partial(require, bool), partial(require, bool)),
    datetime: _as_text(datetime, _time_text, _time),
    date: _as_text(date, date.isoformat, date.fromisoformat),
    UUID: _as_text(UUID, str, UUID),
    Decimal: _as_text(Decimal, _exact_text, _exact),
}
