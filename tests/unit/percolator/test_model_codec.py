"""Dataclasses and pydantic models come back as they were, and all else is refused by field."""

from __future__ import annotations

import subprocess
import sys
import typing
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import SchemaError, codecs

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds have no zone
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)


class Colour(Enum):
    RED = "red"
    BLUE = 2


@dataclass
class Line:
    product: str
    price: Decimal
    colour: Colour | None = None


@dataclass
class Order:
    number: int
    weight: float
    paid: bool
    placed: datetime
    due: date
    customer: UUID
    lines: list[Line]
    totals: dict[str, int]
    path: tuple[str, ...]
    place: tuple[int, str]
    previous: Order | None = None


class Parcel(pydantic.BaseModel):
    number: int
    sent: datetime
    weight: Decimal
    tags: list[str] = []
    holder: str = pydantic.Field(default="", alias="heldBy")


LINES = st.builds(Line, TEXTS, DECIMALS, st.none() | st.sampled_from(Colour))
ORDERS: st.SearchStrategy[Order] = st.deferred(
    lambda: st.builds(
        Order,
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        MOMENTS,
        st.dates(),
        st.uuids(),
        st.lists(LINES, max_size=3),
        st.dictionaries(TEXTS, st.integers(), max_size=3),
        st.lists(TEXTS, max_size=3).map(tuple),
        st.tuples(st.integers(), TEXTS),
        st.none() | ORDERS,
    )
)
orders = codecs.model(Order)
lines = codecs.model(Line)
parcels = codecs.model(Parcel)


@given(ORDERS)
def test_dataclasses_are_decoded_unchanged(order: Order) -> None:
    assert orders.decode(orders.encode(order)) == order


@given(st.builds(Parcel, number=st.integers(), sent=MOMENTS, weight=DECIMALS, heldBy=TEXTS))
def test_pydantic_models_are_decoded_unchanged(parcel: Parcel) -> None:
    assert parcels.decode(parcels.encode(parcel)) == parcel


def test_a_dataclass_is_encoded_as_the_format_says() -> None:
    line = Line("Å", Decimal("2.50"), Colour.BLUE)
    assert lines.encode(line) == '{"product":"Å","price":"2.50","colour":2}'.encode()


def test_a_field_that_was_added_later_has_its_default() -> None:
    assert lines.decode(b'{"product":"tea","price":"1"}') == Line("tea", Decimal(1))


def _line(**changed: object) -> Any:
    return Line(**({"product": "tea", "price": Decimal(1)} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (_line(price=1.5), "model Line, field 'price': expected Decimal, got float"),
        (_line(price=Decimal("NaN")), "model Line, field 'price': NaN is not an exact number"),
        (_line(product="\ud800"), "model Line, field 'product': the text cannot be encoded"),
        (_line(colour="red"), "model Line, field 'colour': expected Colour, got str"),
        ({"product": "tea"}, "model Line: expected Line, got dict"),
        (None, "model Line: expected Line, got NoneType"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(wrong: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        lines.encode(wrong)


def _order(**changed: object) -> Any:
    plain: dict[str, Any] = {
        "number": 1,
        "weight": 1.5,
        "paid": True,
        "placed": datetime(2026, 1, 1, tzinfo=UTC),
        "due": date(2026, 1, 1),
        "customer": UUID(int=1),
        "lines": [],
        "totals": {},
        "path": (),
        "place": (1, "x"),
    }
    return Order(**(plain | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"number": True}, "field 'number': expected int, got bool"),
        ({"number": 10**5000}, "model Order: .*digits"),
        ({"weight": float("nan")}, "field 'weight': nan is not a number in JSON"),
        ({"placed": datetime(2026, 1, 1)}, "field 'placed': the datetime has no time zone"),  # noqa: DTZ001 - the mistake
        ({"due": datetime(2026, 1, 1, tzinfo=UTC)}, "field 'due': expected date, got datetime"),
        ({"lines": [_line(), _line(price=2)]}, r"field 'lines\[1\].price': expected Decimal"),
        ({"totals": {"a": "1"}}, r"""field "totals\['a'\]": expected int, got str"""),
        ({"place": (1,)}, "field 'place': expected 2 parts, got 1"),
        ({"path": ["a"]}, "field 'path': expected tuple, got list"),
        ({"previous": _order(paid=1)}, "field 'previous.paid': expected bool, got int"),
    ],
)
def test_the_name_leads_to_the_value_wherever_it_is(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        orders.encode(_order(**changed))


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (b"{", "1 stored bytes are not JSON"),
        (b"\xff", "1 stored bytes are not JSON"),
        (b"[]", "model Line: expected dict, got list"),
        (b'{"product":"tea"}', "model Line: Line needs a field 'price', which is not stored"),
        (b'{"product":"tea","price":1}', "model Line, field 'price': expected str, got int"),
        (b'{"product":"tea","price":"x"}', "model Line, field 'price': 'x' is no Decimal"),
        (b'{"product":"tea","price":"1","colour":"green"}', "'green' is no Colour"),
        (b'{"product":"tea","price":"1","size":3}', "a field 'size' is stored, which Line does"),
    ],
)
def test_stored_bytes_of_another_model_are_refused(stored: bytes, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        lines.decode(stored)


def _declared(hint: Any) -> type[Any]:
    return dataclass(type("Declared", (), {"__annotations__": {"part": hint}}))


@pytest.mark.parametrize(
    "hint",
    [
        bytes,
        Any,
        list,
        typing.List,  # noqa: UP006 - without its items
        typing.Dict | None,  # noqa: UP006
        typing.Tuple,  # noqa: UP006
        dict[int, str],
        int | str,
        set[int],
        complex,
        "NotDefined",
        "sys.NotDefined",
        "1 +",
    ],
)
def test_a_field_that_could_not_be_read_back_is_refused_at_declaration(hint: Any) -> None:
    with pytest.raises(SchemaError, match="model Declared"):
        codecs.model(_declared(hint))


def test_a_field_that_is_no_argument_is_refused_at_declaration() -> None:
    @dataclass
    class Summed:
        total: int = field(init=False)

    with pytest.raises(SchemaError, match="model Summed, field 'total': it has init=False"):
        codecs.model(Summed)


def test_a_class_that_its_fields_do_not_make_is_refused_at_declaration() -> None:
    @dataclass
    class Priced:
        price: int
        rate: InitVar[int]

    @dataclass(init=False)
    class Counted:
        count: int

        def __init__(self, start: int) -> None:
            self.count = start

    with pytest.raises(SchemaError, match=r"model Priced: .* missing a required argument: 'rate'"):
        codecs.model(Priced)
    with pytest.raises(SchemaError, match="model Counted: it cannot be made from its fields"):
        codecs.model(Counted)


@pytest.mark.parametrize("kind", [dict, int, "Order", None, _line()])
def test_only_classes_with_fields_are_models(kind: Any) -> None:
    with pytest.raises(SchemaError, match="expected a dataclass or a pydantic model"):
        codecs.model(kind)


def test_what_a_model_checks_itself_is_checked_when_it_is_read() -> None:
    @dataclass
    class Positive:
        number: int

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("below zero")

    with pytest.raises(SchemaError, match="Positive refuses what is stored: below zero"):
        codecs.model(Positive).decode(b'{"number":-1}')


def test_a_pydantic_model_names_the_field_that_is_wrong() -> None:
    with pytest.raises(SchemaError, match="model Parcel: field 'weight': Field required"):
        parcels.decode(b'{"number":1,"sent":"2026-01-01T00:00:00Z"}')
    with pytest.raises(SchemaError, match="expected Parcel, got dict"):
        parcels.encode({"number": 1})  # type: ignore[arg-type]  # the mistake


def test_a_pydantic_model_that_would_come_back_different_is_refused() -> None:
    class Account(pydantic.BaseModel):
        name: str
        password: pydantic.SecretStr

    codec = codecs.model(Account)
    with pytest.raises(SchemaError, match="read back from JSON, it would differ"):
        codec.encode(Account(name="ann", password=pydantic.SecretStr("s")))


def test_a_moment_without_a_zone_does_not_pass_for_one_with_a_zone() -> None:
    class Alarm(pydantic.BaseModel):
        at: datetime

        @pydantic.field_validator("at", mode="after")
        @classmethod
        def local(cls, moment: datetime) -> datetime:
            return moment.replace(tzinfo=None) if moment.tzinfo else moment.replace(tzinfo=UTC)

    with pytest.raises(SchemaError, match="read back from JSON, it would differ"):
        codecs.model(Alarm).encode(Alarm(at=datetime(2026, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize("day", [datetime(2026, 10, 25), datetime(2026, 3, 29)])  # noqa: DTZ001 - as clocks show it
@pytest.mark.parametrize("fold", [0, 1])
def test_a_pydantic_model_is_written_in_hours_that_clocks_show_twice_or_never(
    day: datetime, fold: int
) -> None:
    @dataclass
    class Stop:
        at: datetime

    class Trip(pydantic.BaseModel):
        begins: datetime
        before: Trip | None = None
        stops: dict[str, list[Stop]] = {}
        seats: int = 1

    local = day.replace(hour=2, minute=30, fold=fold, tzinfo=ZoneInfo("Europe/Berlin"))
    Trip.model_rebuild(_types_namespace={"Trip": Trip, "Stop": Stop})
    codec = codecs.model(Trip)
    trip = Trip(begins=local, before=Trip(begins=local), stops={"Lund": [Stop(local)]}, seats=3)
    found = codec.decode(codec.encode(trip))
    assert found.before is not None
    moments = [found.begins, found.before.begins, found.stops["Lund"][0].at]
    assert [moment.astimezone(UTC) for moment in moments] == [local.astimezone(UTC)] * 3
    assert found.seats == 3


def test_models_need_no_pydantic() -> None:
    program = (
        "import sys, dataclasses; from percolator import codecs\n"
        "Point = dataclasses.make_dataclass('Point', [('x', int)])\n"
        "codecs.model(Point).encode(Point(1)); assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
