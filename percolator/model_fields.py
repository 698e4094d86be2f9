"""How the fields of a dataclass are written in JSON: one form for each type."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

from percolator.errors import SchemaError
from percolator.model_values import PLAIN, Form, Unfit, member_form, require, text_of

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
    _require_arguments(kind, forms)
    return form


def _require_arguments(kind: type[Any], forms: dict[str, Form]) -> None:
    """Refuses a class that cannot be made from its fields: it could be written, and never read."""
    try:
        inspect.signature(kind).bind(**dict.fromkeys(forms))
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"model {kind.__name__}: it cannot be made from its fields, so it could not be read "
            f"back: {error}"
        ) from None


def _packed(kind: type[Any], forms: dict[str, Form], value: object) -> dict[str, Any]:
    require(kind, value)
    return {name: _at(f".{name}", form.pack, getattr(value, name)) for name, form in forms.items()}


def _model(kind: type[Any], forms: dict[str, Form], optional: set[str], data: object) -> object:
    require(dict, data)
    values = typing.cast("dict[str, Any]", data)
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
    if hint in PLAIN:
        return PLAIN[hint]
    parts = typing.get_args(hint)
    # `typing.List` alone has an origin, too, but does not say what its items are.
    origin = typing.get_origin(hint) if hasattr(hint, "__args__") else None
    if origin in (types.UnionType, typing.Union):
        others = [part for part in parts if part is not types.NoneType]
        if len(others) == 1:
            return _or_none(_form(others[0], where, known))
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
    elif _is_plain_enum(hint):
        return member_form(hint)
    shown = hint.__name__ if isinstance(hint, type) else hint
    raise SchemaError(f"{where}: {shown} is none of {_SUPPORTED}")


def _is_plain_enum(hint: object) -> bool:
    return (
        isinstance(hint, type)
        and issubclass(hint, Enum)
        and all(type(member.value) in (str, int) for member in hint)
    )


def _or_none(form: Form) -> Form:
    return Form(
        lambda value: None if value is None else form.pack(value),
        lambda data: None if data is None else form.unpack(data),
    )


def _sequence(kind: type[Any], form: Form) -> Form:
    def converted(source: type[Any], convert: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - either way
        require(source, value)
        return [_at(f"[{place}]", convert, part) for place, part in enumerate(value)]

    return Form(
        lambda value: converted(kind, form.pack, value),
        lambda data: kind(converted(list, form.unpack, data)),
    )


def _fixed(forms: list[Form]) -> Form:
    def parts(source: type[Any], value: Any) -> Any:  # noqa: ANN401 - either way
        require(source, value)
        if len(value) != len(forms):
            raise Unfit(f"expected {len(forms)} parts, got {len(value)}")
        return enumerate(zip(forms, value, strict=True))

    return Form(
        lambda value: [_at(f"[{n}]", form.pack, part) for n, (form, part) in parts(tuple, value)],
        lambda data: tuple(
            _at(f"[{n}]", form.unpack, part) for n, (form, part) in parts(list, data)
        ),
    )


def _by_name(form: Form) -> Form:
    def converted(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:  # noqa: ANN401 - either way
        require(dict, value)
        return {text_of(key): _at(f"[{key!r}]", convert, part) for key, part in value.items()}

    return Form(
        lambda value: converted(form.pack, value), lambda data: converted(form.unpack, data)
    )
