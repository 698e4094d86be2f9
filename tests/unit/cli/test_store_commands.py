"""`percolator store init` and `percolator store check`, on the model of Bigtable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import Result

from percolator.bigtable.admin import require_table
from percolator.bigtable.place import Place, parse_place
from percolator.bigtable.store import BigtableStore
from percolator.cli import store as command
from percolator.cli.app import app
from percolator.rowstore.conformance import Conformance
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1.bigtable_pb2 import BigtableAppProfile
from tests.command_line import CliRunner

ADDRESS = "bigtable://my-project/my-instance?profile=one"
GOOD = BigtableAppProfile(
    single_cluster_routing=BigtableAppProfile.SingleClusterRouting(
        cluster_id="cluster-1", allow_transactional_writes=True
    )
)
run = CliRunner()


@pytest.fixture(name="model")
def connected_model(monkeypatch: pytest.MonkeyPatch) -> BigtableInMemory:
    """What the commands connect to, as if it were the service."""
    model = BigtableInMemory()
    model.app_profiles["one"] = GOOD
    monkeypatch.delenv("BIGTABLE_EMULATOR_HOST", raising=False)

    class ModelConnection:
        def __init__(self, place: Place) -> None:
            self.place = place
            self.network = InProcessNetwork({place.address: model, place.tables_address: model})
            self.store = BigtableStore(self.network, place)

        async def close(self) -> None:
            await self.network.close()

    monkeypatch.setattr(command, "Connection", ModelConnection)
    return model


def checked(*more: str) -> Result:
    return run.invoke(app, ["--json", "store", "check", ADDRESS, *more])


def rows_left(model: BigtableInMemory) -> int:
    return sum(len(table.rows) for table in model.tables.values())


def test_an_instance_that_is_prepared_has_the_records_table_and_may_be_prepared_again(
    model: BigtableInMemory,
) -> None:
    for _ in range(2):
        result = run.invoke(app, ["--json", "store", "init", ADDRESS])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {
            "store": ADDRESS,
            "cluster": "cluster-1",
            "table": "percolator-0",
        }
    assert [name.rpartition("/")[2] for name in model.tables] == ["percolator-0"]


def test_missing_roles_are_named_with_their_permissions_and_nothing_is_created(
    model: BigtableInMemory,
) -> None:
    model.denied = {"bigtable.tables.mutateRows", "bigtable.tables.create"}
    result = run.invoke(app, ["store", "init", ADDRESS])
    assert result.exit_code == 1
    assert (
        "missing: bigtable.tables.mutateRows; grant the account roles/bigtable.user"
        in result.stderr
    )
    assert "bigtable.tables.create; grant the account roles/bigtable.admin" in result.stderr
    assert not model.tables


PROFILES = {
    "routes to several clusters": BigtableAppProfile(
        multi_cluster_routing_use_any=BigtableAppProfile.MultiClusterRoutingUseAny()
    ),
    "does not permit single-row transactions": BigtableAppProfile(
        single_cluster_routing=BigtableAppProfile.SingleClusterRouting(cluster_id="cluster-1")
    ),
    "can only read": BigtableAppProfile(
        single_cluster_routing=GOOD.single_cluster_routing,
        data_boost_isolation_read_only=BigtableAppProfile.DataBoostIsolationReadOnly(),
    ),
}


@pytest.mark.parametrize("verb", ["init", "check"])
@pytest.mark.parametrize("why", PROFILES)
def test_a_profile_without_single_row_transactions_in_one_cluster_is_refused(
    model: BigtableInMemory, verb: str, why: str
) -> None:
    model.app_profiles["one"] = PROFILES[why]
    result = run.invoke(app, ["store", verb, ADDRESS])
    assert result.exit_code != 0
    assert f"the app profile 'one' {why}" in result.stderr
    assert "--transactional-writes" in result.stderr
    assert not model.tables


def test_a_store_that_keeps_all_promises_is_measured_and_left_empty(
    model: BigtableInMemory,
) -> None:
    result = checked("--seconds", "0.2", "--price", "0.65", "--nodes", "3")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["not_kept"] == {}
    assert shown["check_and_mutates_per_second"] > 0
    assert shown["nodes"] >= 1
    assert shown["cost_per_month"] == pytest.approx(shown["nodes"] * 0.65 * 730)
    assert result.stderr.count("\nkept: ") == 9
    assert not rows_left(model)


def _check_passes(model: Any) -> None:
    """A check that is not one with its changes."""
    correct = model.check_and_mutate_row

    async def wrong(request: Any) -> Any:
        if len(request.false_mutations):
            request.true_mutations.extend(request.false_mutations)
        return await correct(request)

    model.check_and_mutate_row = wrong


def _direction_ignored(model: Any) -> None:
    correct = model.read_rows

    async def wrong(request: Any) -> Any:
        request.reversed = False
        async for response in correct(request):
            yield response

    model.read_rows = wrong


def _all_times(model: Any) -> None:
    correct = model.read_rows

    async def wrong(request: Any) -> Any:
        for one in request.filter.chain.filters:
            one.timestamp_range_filter.Clear() if one.HasField("timestamp_range_filter") else None
        async for response in correct(request):
            yield response

    model.read_rows = wrong


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (_check_passes, "of many who check the same, one makes its changes"),
        (_direction_ignored, "scans backwards"),
        (_all_times, "times and values are selected by range, and the newest"),
    ],
)
def test_a_promise_that_is_not_kept_is_named_and_no_cluster_should_start(
    model: BigtableInMemory, broken: Any, promise: str
) -> None:
    broken(model)
    result = checked("--seconds", "0")
    assert result.exit_code == 3, result.output
    assert promise in json.loads(result.stdout)["not_kept"]


@pytest.mark.parametrize("verb", ["init", "check"])
def test_a_malformed_address_is_a_wrong_command(verb: str) -> None:
    result = run.invoke(app, ["store", verb, "bigtable://my-project"])
    assert result.exit_code == 2
    assert "the instance is missing" in result.stderr


async def test_conformance_of_the_model_as_an_emulator() -> None:
    """Times as late as emulators accept."""
    model = BigtableInMemory()
    place = parse_place(ADDRESS, environment={"BIGTABLE_EMULATOR_HOST": "localhost:1"})
    network = InProcessNetwork({place.address: model})
    await require_table(network, place, 9, 10.0)
    trials = Conformance(
        BigtableStore(network, place), 9, b"run-", command._LATEST_TIME_OF_EMULATORS, 10.0
    )
    assert [broken async for _, broken in trials.verdicts()] == [""] * 8
    await trials.clean_up()
    assert not rows_left(model)
