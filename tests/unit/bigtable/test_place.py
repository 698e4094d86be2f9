"""The address of an instance of Bigtable, and errors of malformed ones."""

from __future__ import annotations

import pytest

from percolator.bigtable.connection import Connection
from percolator.bigtable.place import ADMIN_ADDRESS, DATA_ADDRESS, Place, parse_place
from percolator.errors import InvalidArgument

GIVEN = "bigtable://my-project/my-instance?profile=one_cluster"


def test_the_address_of_an_instance_names_project_instance_and_profile() -> None:
    place = parse_place(GIVEN, environment={})
    assert (place.project, place.instance, place.app_profile) == (
        "my-project",
        "my-instance",
        "one_cluster",
    )
    assert (place.address, place.tables_address) == (DATA_ADDRESS, ADMIN_ADDRESS)
    assert not place.is_emulated
    assert place.scans_backwards
    assert place.table(7) == "projects/my-project/instances/my-instance/tables/percolator-7"


@pytest.mark.parametrize("text", [GIVEN, "bigtable://my-project/my-instance"])
def test_a_place_is_written_as_its_address(text: str) -> None:
    assert str(parse_place(text, environment={})) == text


@pytest.mark.parametrize("project", ["123456789012", "example.com:my-project", "abcdef"])
def test_projects_may_have_a_number_or_a_domain(project: str) -> None:
    assert parse_place(f"bigtable://{project}/my-instance", environment={}).project == project


def test_an_emulator_replaces_the_service_for_data_and_tables() -> None:
    place = parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": "localhost:8086"})
    assert (place.address, place.tables_address) == ("localhost:8086", "localhost:8086")
    assert place.is_emulated
    assert not place.scans_backwards


MALFORMED = {
    "": "expected bigtable://PROJECT/INSTANCE",
    "bigtable:/my-project/my-instance": "expected bigtable://PROJECT/INSTANCE",
    "/var/data": "expected bigtable://PROJECT/INSTANCE",
    "bigtable://": "the instance is missing",
    "bigtable://my-project": "the instance is missing",
    "bigtable://my-project/": "the instance is missing",
    "bigtable:///my-instance": "project: expected 6 to 30",
    "bigtable://My-Project/my-instance": "project: expected 6 to 30",
    "bigtable://short/my-instance": "project: expected 6 to 30",
    "bigtable://user@my-project/my-instance": "project: expected 6 to 30",
    "bigtable://my-project-/my-instance": "project: expected 6 to 30",
    "bigtable://my-project/inst": "instance: expected 6 to 33",
    "bigtable://my-project/1instance": "instance: expected 6 to 33",
    "bigtable://my-project/my-instance\n": "instance: expected 6 to 33",
    "bigtable://my-project/my-instance/table": "nothing after the instance",
    "bigtable://my-project/my-instance#part": "without a fragment",
    "bigtable://my-project/my-instance?": "nothing follows",
    "bigtable://my-project/my-instance?profile": "found",
    "bigtable://my-project/my-instance?profile=": "profile is empty",
    "bigtable://my-project/my-instance?profile=a&profile=b": "profile is given twice",
    "bigtable://my-project/my-instance?profile=-a": "profile: expected 1 to 50",
    "bigtable://my-project/my-instance?profile=a/b": "profile: expected 1 to 50",
    "bigtable://my-project/my-instance?app_profile=a": "'app_profile' is not known",
    "bigtable://my-project/my-instance?profile=a&zone=b": "the only setting is profile",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_address_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_place(text, field="--store", environment={})
    assert caught.value.field == "--store"
    assert MALFORMED[text] in caught.value.reason
    assert repr(text) in caught.value.reason


@pytest.mark.parametrize("emulator", ["localhost", "localhost:0", "http://localhost:8086", ":8086"])
def test_a_malformed_emulator_is_refused_by_the_name_of_its_variable(emulator: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": emulator})
    assert caught.value.field == "BIGTABLE_EMULATOR_HOST"


@pytest.mark.parametrize(
    ("project", "instance", "profile", "field"),
    [
        ("Project", "my-instance", "", "project"),
        ("my-project", "i", "", "instance"),
        ("my-project", "my-instance", "a b", "profile"),
    ],
)
def test_a_place_with_a_malformed_part_is_refused(
    project: str, instance: str, profile: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Place("bigtable:1", project, instance, profile)
    assert caught.value.field == field


@pytest.mark.real_time
async def test_a_connection_to_an_emulator_has_its_network_and_store() -> None:
    place = parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": "localhost:1"})
    connection = Connection(place)
    assert connection.place is place
    assert connection.store.scans_backwards is place.scans_backwards
    await connection.close()
