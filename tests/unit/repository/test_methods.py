"""Every remote procedure of the protos is named, with its types, and says who may call it."""

from __future__ import annotations

import importlib
from pathlib import Path

import percolator.v1
from percolator.wire import methods
from percolator.wire.roles import REQUIRED
from percolator.world import StreamMethod, UnaryMethod

Signature = tuple[str, str, str, bool]


def _declared() -> set[Signature]:
    found: set[Signature] = set()
    for path in Path(percolator.v1.__path__[0]).glob("*_pb2.py"):
        module = importlib.import_module(f"percolator.v1.{path.stem}")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found.add(
                    (
                        f"/{service.full_name}/{method.name}",
                        method.input_type.full_name,
                        method.output_type.full_name,
                        method.server_streaming,
                    )
                )
    return found


def _named() -> set[Signature]:
    return {
        (
            value.path,
            value.request.DESCRIPTOR.full_name,
            value.response.DESCRIPTOR.full_name,
            isinstance(value, StreamMethod),
        )
        for value in vars(methods).values()
        if isinstance(value, UnaryMethod | StreamMethod)
    }


def test_every_remote_procedure_is_named_with_the_types_of_the_proto() -> None:
    assert _declared() == _named()


def test_every_remote_procedure_has_a_role_and_no_other_has() -> None:
    assert set(REQUIRED) == {path for path, *_ in _named()}
