"""Mistyped environment variables are reported, and those that others set are not."""

from __future__ import annotations

import pytest

from percolator.services.chassis.lifecycle import SERVICES, unknown_variables
from percolator.services.gateway.service import GatewaySettings
from percolator.services.lockservice.service import LockServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.worker.service import WorkerSettings


def oracle(*names: str) -> list[tuple[str, str]]:
    return list(unknown_variables(OracleSettings, dict.fromkeys(names, "1")))


@pytest.mark.parametrize(
    ("mistyped", "nearest"),
    [
        ("PERCOLATOR_ORACLE_LISTN", "PERCOLATOR_ORACLE_LISTEN"),
        ("PERCOLATOR_ORACLE_LOGLEVEL", "PERCOLATOR_ORACLE_LOG_LEVEL"),
        ("PERCOLATOR_ORACLE_CONFIGS", "PERCOLATOR_ORACLE_CONFIG"),
        ("PERCOLATOR_ORACEL_LISTEN", "PERCOLATOR_ORACLE_LISTEN"),
        ("PERCOLATOR_LOG_LEVEL", "PERCOLATOR_ORACLE_LOG_LEVEL"),
    ],
)
def test_a_mistyped_variable_is_named_with_the_nearest_that_exists(
    mistyped: str, nearest: str
) -> None:
    assert oracle(mistyped) == [(mistyped, nearest)]


def test_a_variable_of_the_service_is_named_even_if_nothing_is_near() -> None:
    assert oracle("PERCOLATOR_ORACLE_QQ") == [("PERCOLATOR_ORACLE_QQ", "")]


def test_the_name_of_a_service_may_be_divided_by_mistake() -> None:
    found = list(unknown_variables(TabletServerSettings, {"PERCOLATOR_TABLET_SERVER_STORE": "x"}))
    assert found == [("PERCOLATOR_TABLET_SERVER_STORE", "PERCOLATOR_TABLETSERVER_STORE")]


@pytest.mark.parametrize(
    "service", ["PERCOLATOR_ORACLE", "PERCOLATOR_ORACLE_0", "PERCOLATOR_ORACLE_METRICS"]
)
def test_what_kubernetes_sets_for_a_service_is_not_reported(service: str) -> None:
    set_by_itself = [
        "_SERVICE_HOST",
        "_SERVICE_PORT",
        "_SERVICE_PORT_GRPC_FRAMES",
        "_PORT",
        "_PORT_7101_TCP",
        "_PORT_7101_TCP_PROTO",
        "_PORT_7101_TCP_PORT",
        "_PORT_7101_TCP_ADDR",
    ]
    assert oracle(*(service + name for name in set_by_itself)) == []


def test_what_belongs_to_clients_to_other_services_or_to_other_programs_is_not_reported() -> None:
    assert (
        oracle(
            "PERCOLATOR_ADDRESS",
            "PERCOLATOR_TLS_CA",
            "PERCOLATOR_TOKEN_FILE",
            "PERCOLATOR_MASTER_LISTEN",
            "PERCOLATOR_MASTER_RETENTION_SECONDS",
            "PERCOLATOR_TAG",
            "PERCOLATOR_SERVICE_HOST",
            "PERCOLATOR_DASHBOARD_COLOUR",
            "ORACLE_HOME",
        )
        == []
    )


@pytest.mark.parametrize(
    "kind",
    [
        GatewaySettings,
        LockServiceSettings,
        MasterSettings,
        OracleSettings,
        TabletServerSettings,
        WorkerSettings,
    ],
)
def test_no_setting_of_any_service_is_reported_by_another(kind: type[GatewaySettings]) -> None:
    assert kind.service.upper() in SERVICES
    names = [f"PERCOLATOR_{kind.service}_{field}".upper() for field in kind.model_fields]
    assert oracle(*names) == []
