"""Dataclasses and pydantic models as JSON: an object with a member for each field."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import datetime, timedelta
from typing import Any, TypeVar

from percolator.column_codec import Codec, MadeCodec, damaged, wrong
from percolator.errors import SchemaError
from percolator.model_fields import model_form
from percolator.model_values import Unfit

M = TypeVar("M")


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
    """Whether what was read back is what was given, with moments in any time zones.

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
    """What pydantic says about the first field, without the input, which may be long."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"field {place!r}: {first['msg']}" if place else str(first["msg"])
