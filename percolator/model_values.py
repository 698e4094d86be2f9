"""How a dataclass's single values are written in JSON, by their type.

Types are exact: a `bool` is not an `int`, and a subclass would come back as its base.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID


class Unfit(Exception):
    """A value that does not fit; `place` says where in the model it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = ""


class Form(NamedTuple):
    """What a type is in JSON, and the way back. Both raise `Unfit`."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def require(kind: type[Any], value: object) -> None:
    """Refuses a value of another type."""
    if type(value) is not kind:
        raise Unfit(f"expected {kind.__name__}, got {type(value).__name__}")


def _same(kind: type[Any]) -> Form:
    def checked(value: object) -> object:
        require(kind, value)
        return value

    return Form(checked, checked)


def _float(value: object) -> float:
    if type(value) not in (float, int):
        raise Unfit(f"expected float, got {type(value).__name__}")
    try:
        number = float(typing.cast("float", value))
    except OverflowError:
        raise Unfit("the number is too large for a float") from None
    if not math.isfinite(number):
        raise Unfit(f"{number} is not a number in JSON")
    return number


def text_of(value: object) -> str:
    """The text itself, if it can be stored."""
    require(str, value)
    text = typing.cast("str", value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unfit(f"the text cannot be encoded as UTF-8: {error.reason}") from None
    return text


def _moment_text(value: object) -> str:
    require(datetime, value)
    moment = typing.cast("datetime", value)
    if moment.utcoffset() is None:
        raise Unfit("the datetime has no time zone, so it is not one moment")
    try:
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise Unfit("the datetime is beyond the years 1 to 9999 in UTC") from None


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.utcoffset() is None:
        raise ValueError
    return moment


def _exact_text(value: object) -> str:
    require(Decimal, value)
    if not typing.cast("Decimal", value).is_finite():
        raise Unfit(f"{value} is not an exact number")
    return str(value)


def _exact(text: str) -> Decimal:
    number = Decimal(text)
    if not number.is_finite():
        raise ValueError
    return number


def _day_text(value: object) -> str:
    require(date, value)
    return typing.cast("date", value).isoformat()


def _uuid_text(value: object) -> str:
    require(UUID, value)
    return str(value)


def _as_text(kind: type[Any], pack: Callable[[Any], str], parse: Callable[[str], Any]) -> Form:
    def unpack(text: object) -> object:
        require(str, text)
        try:
            return parse(typing.cast("str", text))
        except (ValueError, InvalidOperation):
            raise Unfit(f"{text!r:.80} is no {kind.__name__}") from None

    return Form(pack, unpack)


def member_form(kind: type[Enum]) -> Form:
    """The form of an enum, whose members are written as their values."""

    def pack(value: object) -> object:
        require(kind, value)
        return typing.cast("Enum", value).value

    def unpack(data: object) -> Enum:
        if type(data) not in (str, int):
            raise Unfit(f"expected {kind.__name__}, got {type(data).__name__}")
        try:
            return kind(data)
        except ValueError:
            raise Unfit(f"{data!r:.80} is no {kind.__name__}") from None

    return Form(pack, unpack)


PLAIN: dict[Any, Form] = {
    str: Form(text_of, text_of),
    int: _same(int),
    float: Form(_float, _float),
    bool: _same(bool),
    datetime: _as_text(datetime, _moment_text, _moment),
    date: _as_text(date, _day_text, date.fromisoformat),
    UUID: _as_text(UUID, _uuid_text, UUID),
    Decimal: _as_text(Decimal, _exact_text, _exact),
}
