"""Requests of `make fuzz`: to every method of every service, and none to another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import copy

import pytest
from google.protobuf.message import Message

from percolator.bigtable.place import Place
from percolator.services.gateway import row_store_handler
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import cluster_pb2, master_pb2, tabletserver_pb2
from percolator.wire import methods
from percolator.wire.methods import method_name
from percolator.world import Random, StreamMethod, UnaryMethod
from tests.fuzz import judging
from tests.fuzz.__main__ import UNREACHED
from tests.fuzz.findings import Input, Record
from tests.fuzz.judging import PLACE, Broken, Serving, seeds_of_on_rows
from tests.fuzz.messages import (
    MAY_WAIT,
    METHODS,
    Vocabulary,
    damaged,
    dials_only,
    generated,
    grow,
    mentions,
    mutate,
    places,
)
from tests.fuzz.valid_requests import VALID

LOOPBACK = ["127.0.0.1:7100", ""]


def words() -> Vocabulary:
    found = Vocabulary()
    for name in ("address", "metrics_address"):
        found.put(name, LOOPBACK)
    found.put("tablet_id", [7, 8])
    return found


def test_every_remote_procedure_is_fuzzed_and_has_a_valid_request_to_begin_with() -> None:
    known = {
        one.path for one in vars(methods).values() if isinstance(one, UnaryMethod | StreamMethod)
    }
    assert known <= METHODS.keys()
    assert VALID.keys() == METHODS.keys()
    assert MAY_WAIT.keys() <= METHODS.keys()


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_made_of_a_register_names_no_other_machine(seed: int) -> None:
    """Servers dial the addresses that register."""
    chance, vocabulary = Random(seed), words()
    request = generated(cluster_pb2.RegisterRequest.DESCRIPTOR, chance, vocabulary)
    for _ in range(8):
        mutate(request, chance, vocabulary)
    grow(request, chance)
    servers = [one for one in places(request) if isinstance(one, cluster_pb2.Server)]
    assert {one.address for one in servers} | {one.metrics_address for one in servers} <= {
        *LOOPBACK
    }


def test_a_damaged_address_is_recognised() -> None:
    """One flipped bit makes 167.0.0.1 of 127.0.0.1."""
    request = cluster_pb2.RegisterRequest()
    request.server.address = LOOPBACK[0]
    assert dials_only(request, words())
    request.server.address = "167.0.0.1:7100"
    assert not dials_only(request, words())


def test_a_request_is_recognised_that_names_what_must_not_be_harmed() -> None:
    batch = tabletserver_pb2.MutationBatch()
    batch.target.tablet_id = 7
    request = tabletserver_pb2.MutateRequest(batches=[batch])
    assert mentions(request, {"tablet_id": frozenset({7})})
    assert not mentions(request, {"tablet_id": frozenset({8}), "epoch": frozenset({7})})
    load = master_pb2.BeginLoadRequest(load="canary")
    load.table.name = "canary"
    assert mentions(load, {"name": frozenset({"canary"})})
    assert not mentions(load, {"table": frozenset({"canary"})}), "its table is a message"


def test_the_same_seed_makes_the_same_request() -> None:
    kind = tabletserver_pb2.MutateRequest.DESCRIPTOR
    assert generated(kind, Random(5), words()) == generated(kind, Random(5), words())


def test_a_kept_input_is_read_back_as_it_was() -> None:
    metadata = (("authorization", "Bearer x"), ("x-bin", b"\xff"))
    kept = Input("calls", "metadata", b"\0\xff", "/a/B", metadata)
    assert Input.from_json(kept.as_json()) == kept


def test_one_thing_that_is_wrong_is_kept_once() -> None:
    record = Record()
    for _ in range(3):
        record.wrong("it hangs", Input("calls", "valid", b""))
    assert list(record.found) == ["it hangs"]


# What `make fuzz` gives to a cluster on a row store.


async def test_what_is_not_reached_elsewhere_is_accepted_here() -> None:
    accepted = await judging.accepted()
    assert {method_name(METHODS[path].name) for path in UNREACHED} <= accepted


@pytest.fixture
def serving() -> Iterator[Serving]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield Serving()
    loop.close()
    asyncio.set_event_loop(None)


def test_damaged_requests_are_answered_or_refused(serving: Serving) -> None:
    chance, known = Random("on rows"), seeds_of_on_rows()
    for _ in range(300):
        serving(damaged(chance.choice(known), chance))


def test_a_call_that_reaches_what_is_not_for_clients_is_noticed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store_handler, "for_store", _passed_on)
    place, request = next(
        (number, copy(one))
        for number, one in enumerate(judging.SEEDS)
        if isinstance(one, bigtable.BigtableCheckAndMutateRowRequest)
    )
    request.table_name = PLACE.table(0)
    with pytest.raises(Broken, match="percolator-0 was changed"):
        serving(bytes([place]) + request.SerializeToString())


def _passed_on(place: Place, request: Message, **_: bool) -> Message:
    return request
