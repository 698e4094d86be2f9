"""Settings: four layers, one frozen object, and errors in one line.

Mistyped environment variables are reported, and those that others set are not.
"""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import structlog
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from pydantic import Field, ValidationError

from percolator.errors import (
    InvalidArgument,
    NotReady,
    Overloaded,
    StoreFault,
    StoreUnusable,
    Unavailable,
    UsageError,
    WrongCluster,
)
from percolator.services import serve
from percolator.services.chassis import lifecycle
from percolator.services.chassis.lifecycle import SERVICES, may_pass, one_line, unknown_variables
from percolator.services.chassis.server import CannotListen
from percolator.services.chassis.settings import (
    ListenAddress,
    ServiceSettings,
    load,
    to_toml,
)
from percolator.services.gateway.service import GatewaySettings
from percolator.services.lockservice.service import LockServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.services.serve import NEEDED, main
from percolator.services.serve import SERVICES as SERVED
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.worker.service import WorkerSettings
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.addresses import HostPort


class ShopSettings(ServiceSettings):
    service: ClassVar[str] = "shop"

    listen: ListenAddress = "127.0.0.1:7201"

    store: str = "data"
    """Where the goods are."""

    shelf_rows_max: Annotated[int, Field(ge=1, le=1000)] = 10
    """The longest shelf."""

    patience_seconds: Annotated[float, Field(gt=0)] = 1.5
    """How long a customer waits."""

    mood: Literal["good", "bad"] = "good"
    """The mood of the shopkeeper."""

    doors: tuple[str, ...] = ("front",)
    """Ways in."""


class NeedySettings(ServiceSettings):
    service: ClassVar[str] = "needy"

    listen: ListenAddress = "127.0.0.1:7202"

    store: str
    """Needed."""


def shop(*argv: str, **environment: str) -> ShopSettings:
    return load(ShopSettings, argv, environment)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as caught:
        shop(*argv, **environment)
    assert caught.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    return written.err


# --------------------------------------------------------------------------------- layers


@given(
    layers=st.fixed_dictionaries(
        {}, optional={layer: st.integers(1, 1000) for layer in ("toml", "environment", "flag")}
    )
)
@hypothesis_settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_flags_win_over_the_environment_that_over_the_file_that_over_defaults(
    tmp_path: Path, layers: dict[str, int]
) -> None:
    argv: list[str] = []
    environment: dict[str, str] = {}
    if "toml" in layers:
        (tmp_path / "shop.toml").write_text(f"shelf_rows_max = {layers['toml']}")
        argv += ["--config", str(tmp_path / "shop.toml")]
    if "environment" in layers:
        environment["PERCOLATOR_SHOP_SHELF_ROWS_MAX"] = str(layers["environment"])
    if "flag" in layers:
        argv += ["--shelf-rows-max", str(layers["flag"])]
    strongest = [layers[name] for name in ("flag", "environment", "toml") if name in layers]
    found = load(ShopSettings, argv, environment)
    assert found.shelf_rows_max == (strongest or [10])[0]
    assert found.store == "data"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text('store = "elsewhere"')
    assert shop(PERCOLATOR_SHOP_CONFIG=str(tmp_path / "shop.toml")).store == "elsewhere"


def test_lists_are_separated_by_commas_in_flags_and_environment() -> None:
    assert shop("--doors", "a, b").doors == ("a", "b")
    assert shop(PERCOLATOR_SHOP_DOORS="a,b").doors == ("a", "b")
    assert shop(PERCOLATOR_SHOP_DOORS="").doors == ()
    assert shop("--masters", "a:1,[::1]:2").masters == ("a:1", "[::1]:2")


def test_switches_can_be_set_in_every_layer_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text("insecure = true")
    config = ("--config", str(tmp_path / "shop.toml"))
    assert shop(*config).insecure is True
    assert shop(*config, PERCOLATOR_SHOP_INSECURE="false").insecure is False
    assert shop(*config, "--no-insecure").insecure is False
    assert shop("--insecure", PERCOLATOR_SHOP_INSECURE="0").insecure is True


def test_environment_variables_of_container_platforms_are_ignored() -> None:
    invented = {"PERCOLATOR_SHOP_PORT": "tcp://10.0.0.1:7201", "PERCOLATOR_SHOP_SERVICE_HOST": "x"}
    assert shop(**invented) == shop()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        shop().store = "other"


# --------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "environment", "expected"),
    [
        (["--shelf-rows-max", "0"], {}, ["shelf_rows_max", "--shelf-rows-max", "'0'"]),
        (["--shelf-rows-max", "1.5"], {}, ["shelf_rows_max", "integer", "'1.5'"]),
        (["--shelf-rows-max", ""], {}, ["shelf_rows_max"]),
        (["--patience-seconds", "nan"], {}, ["patience_seconds"]),
        (["--patience-seconds", "inf"], {}, ["patience_seconds"]),
        (["--patience-seconds", "-1"], {}, ["patience_seconds", "greater than 0"]),
        (["--mood", "foul"], {}, ["mood", "'good' or 'bad'", "'foul'"]),
        (["--mood"], {}, ["--mood", "expected one argument"]),
        (["--listen", ""], {}, ["listen", "is empty"]),
        (["--listen", "7100"], {}, ["listen", "host:port", "'7100'"]),
        (["--masters", "a:1,b"], {}, ["masters", "'b'"]),
        (["--masters", "a:0"], {}, ["masters", "port 0"]),
        (["--masters", ",a:1"], {}, ["masters", "is empty"]),
        (["--advertise", ""], {}, ["advertise", "is empty"]),
        (["--metrics-listen", "x"], {}, ["metrics_listen", "host:port"]),
        (["--log-level", "loud"], {}, ["log_level", "'loud'"]),
        (["--drain-seconds", "0"], {}, ["drain_seconds"]),
        (["--concurrency-max", "0"], {}, ["concurrency_max"]),
        (["--streams-max", "0"], {}, ["streams_max"]),
        (["--client-quota-percent", "0"], {}, ["client_quota_percent"]),
        (["--clients-quota-percent", "101"], {}, ["clients_quota_percent"]),
        (["--client-quota-percent", "91"], {}, ["client_quota_percent: 91 is above", "90"]),
        (["--request-bytes-total-max", "1"], {}, ["request_bytes_total_max"]),
        (
            ["--request-bytes-max", "67108865"],
            {},
            ["request_bytes_total_max", "below four times request_bytes_max, 67108865"],
        ),
        (["--request-seconds-max", "0"], {}, ["request_seconds_max"]),
        (["--connection-streams-max", "0"], {}, ["connection_streams_max"]),
        (["--connections-max", "many"], {}, ["connections_max", "'many'"]),
        (["--open-streams-max", "0"], {}, ["open_streams_max"]),
        ([], {"PERCOLATOR_SHOP_MOOD": "foul"}, ["mood", "PERCOLATOR_SHOP_MOOD", "'foul'"]),
        ([], {"PERCOLATOR_SHOP_INSECURE": "perhaps"}, ["insecure", "'perhaps'"]),
        (["--stor", "x"], {}, ["--stor", "did you mean --store?"]),
        (["--listne=x"], {}, ["--listne", "did you mean --listen?"]),
        (["--zzzz"], {}, ["--zzzz", "--help"]),
        (["-x"], {}, ["-x"]),
        (["stray"], {}, ["stray", "flags"]),
        (["--config", ""], {}, ["--config", "is empty"]),
        (["--config", "/nowhere/shop.toml"], {}, ["/nowhere/shop.toml", "No such file"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    environment: dict[str, str],
    expected: list[str],
) -> None:
    line = refusal(capsys, *argv, **environment)
    assert line.startswith("shop: ")
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("stor = 1", ["stor", "did you mean store?"]),
        ("[shop]\nstore = 'x'", ["shop", "no such setting"]),
        ("shelf_rows_max = true", ["shelf_rows_max", "boolean"]),
        ("shelf_rows_max = [1]", ["shelf_rows_max"]),
        ("doors = 'front'", ["doors", "expected a list", "'front'"]),
        ("store = 'a\\u0000b'".replace("'", '"'), ["store", "NUL"]),
        ("shelf_rows_max = " + "1" * 5000, ["not TOML"]),
        ("doors = " + "[" * 5000 + "]" * 5000, ["not TOML"]),
        ("store = ", ["not TOML"]),
        ("\x00", ["not TOML"]),
    ],
)
def test_a_mistake_in_the_file_is_told_with_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, toml: str, expected: list[str]
) -> None:
    path = tmp_path / "shop.toml"
    path.write_text(toml)
    line = refusal(capsys, "--config", str(path))
    for part in [str(path), *expected]:
        assert part in line


def test_a_file_that_is_no_text_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "shop.toml").write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in refusal(capsys, "--config", str(tmp_path / "shop.toml"))


def test_a_value_that_is_needed_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(NeedySettings, [], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err == "needy: store: is required; give --store\n"


TLS_FLAGS = ("--tls-ca=ca.pem", "--tls-certificate=certificate.pem", "--tls-key=key.pem")


@pytest.mark.parametrize("listen", ["0.0.0.0:7201", "[::]:7201", "10.1.2.3:7201", "shop:7201"])
def test_an_address_that_others_can_reach_needs_explicit_consent(
    capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    assert "--insecure" in refusal(capsys, "--listen", listen)
    assert shop("--listen", listen, "--insecure").listen == listen
    assert shop("--listen", listen, *TLS_FLAGS).listen == listen


def test_so_does_an_address_of_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--metrics-listen", "0.0.0.0:8201")
    assert said.startswith("shop: metrics_listen: 0.0.0.0:8201 can be reached")
    assert shop("--metrics-listen", "0.0.0.0:8201", "--insecure").metrics_address is not None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tls-ca=ca.pem"], "tls_certificate: is empty, although tls_ca is given"),
        (["--tls-ca=a", "--tls-certificate=b"], "tls_key: is empty, although tls_ca is given"),
        (["--tls-key=key.pem"], "tls_ca: is empty, although tls_key is given"),
        (["--tokens=tokens.toml"], "tokens: needs TLS"),
        (["--any-certificate-is-admin"], "any_certificate_is_admin: needs TLS"),
        (
            [*TLS_FLAGS, "--tokens=tokens.toml", "--any-certificate-is-admin"],
            "any_certificate_is_admin: tokens are given",
        ),
    ],
)
def test_tls_is_given_as_a_whole_and_before_tokens(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in refusal(capsys, *argv)


# --------------------------------------------------------------------------- derived addresses


@pytest.mark.parametrize(
    ("listen", "metrics", "expected"),
    [
        ("127.0.0.1:7201", "auto", "127.0.0.1:8201"),
        ("127.0.0.1:0", "auto", "127.0.0.1:0"),
        ("[::1]:65000", "auto", "[::1]:0"),
        ("127.0.0.1:7201", "127.0.0.1:99", "127.0.0.1:99"),
        ("127.0.0.1:7201", "", "None"),
    ],
)
def test_metrics_are_a_thousand_ports_above(listen: str, metrics: str, expected: str) -> None:
    assert str(shop("--listen", listen, "--metrics-listen", metrics).metrics_address) == expected


def test_what_is_advertised_follows_what_is_bound() -> None:
    bound = HostPort("127.0.0.1", 4711)
    assert str(shop().advertised(bound)) == "127.0.0.1:4711"
    assert str(shop("--advertise", "shop-1:0").advertised(bound)) == "shop-1:4711"
    assert str(shop("--advertise", "proxy:80").advertised(bound)) == "proxy:80"


# ---------------------------------------------------------------------------- help and print


def exits_with_text(capsys: pytest.CaptureFixture[str], *argv: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as caught:
        shop(*argv, **environment)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_setting_with_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = exits_with_text(capsys, "--help")
    for field in ShopSettings.model_fields:
        assert f"\n  --{field.replace('_', '-')}" in text
    assert (
        "--patience-seconds SECONDS\n      How long a customer waits.\n      Default: 1.5" in text
    )
    assert "--shelf-rows-max ROWS\n" in text
    assert "--mood good|bad\n" in text
    # A field that only gets a new default keeps its description.
    assert "--listen VALUE\n      host:port to serve on" in text
    assert "Default: 127.0.0.1:7201" in text


def test_help_wins_over_mistakes_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage" in exits_with_text(capsys, "--help", PERCOLATOR_SHOP_MOOD="foul")


values: dict[str, st.SearchStrategy[Any]] = {
    "store": st.text(st.characters(exclude_categories=["Cs"])),
    "shelf_rows_max": st.integers(1, 1000),
    "patience_seconds": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    "mood": st.sampled_from(["good", "bad"]),
    "doors": st.lists(st.text(st.characters(exclude_categories=["Cs"]))).map(tuple),
    "insecure": st.booleans(),
    "masters": st.lists(st.sampled_from(["a:1", "[::1]:2"])).map(tuple),
}


@given(chosen=st.fixed_dictionaries({}, optional=values))
@example(chosen={"store": "what JSON lets stand and TOML does not: \x7f"})
@hypothesis_settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_what_print_config_prints_can_be_fed_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: dict[str, Any]
) -> None:
    given_settings = ShopSettings(**chosen)
    path = tmp_path / "shop.toml"
    path.write_text(to_toml(given_settings), encoding="utf-8", newline="")
    assert shop("--config", str(path)) == given_settings
    printed = exits_with_text(capsys, "--config", str(path), "--print-config")
    assert tomllib.loads(printed) == tomllib.loads(to_toml(given_settings))


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


# Logs: one line per event, JSON unless a human reads them on a terminal.
#
# Why a service did not start, and whether another attempt may succeed.


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_every_event_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "auto", "info")
    structlog.get_logger("percolator.oracle").info("mark extended", mark=7, text="two\nlines")
    logging.getLogger("another.package").warning("of %s", "another package")
    try:
        dict[str, str]()["why"]
    except KeyError:
        structlog.get_logger("percolator.oracle").exception("failed")
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry["event"] for entry in entries] == [
        "mark extended",
        "of another package",
        "failed",
    ]
    assert {entry["service"] for entry in entries} == {"oracle"}
    assert entries[0]["mark"] == 7
    assert entries[0]["level"] == "info"
    assert entries[1]["logger"] == "another.package"
    assert "KeyError: 'why'" in entries[2]["exception"]
    assert all(entry["timestamp"].endswith("Z") for entry in entries)


def test_values_that_are_no_json_are_logged_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lifecycle.configure_logs("oracle", "json", "info")
    structlog.get_logger("percolator.oracle").info("odd", key=b"\xff", thing=object())
    assert "xff" in json.loads(capsys.readouterr().err)["key"]


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_a_traceback_with_a_huge_message_is_shortened(
    log_format: Literal["json", "human"], capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle.configure_logs("worker", log_format, "info")
    try:
        dict[str, str]()["x" * 1_000_000]
    except KeyError:
        logging.getLogger("percolator.observers").warning("failed", exc_info=True)
    written = capsys.readouterr().err
    assert len(written) < 40_000
    assert "test_a_traceback_with_a_huge_message_is_shortened" in written
    assert "KeyError: 'xxx" in written
    assert "characters left out" in written


def test_a_caller_that_left_before_its_answer_was_sent_is_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC logs it with a traceback: any caller could fill the disk."""
    lifecycle.configure_logs("oracle", "json", "info")
    grpc = logging.getLogger("grpc._cython.cygrpc")
    grpc.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")
    assert capsys.readouterr().err == ""
    grpc.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/a/B")
    assert "KeyError" in capsys.readouterr().err


def test_less_important_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "json", "warning")
    structlog.get_logger("percolator.oracle").info("chatter")
    logging.getLogger("another.package").info("chatter")
    structlog.get_logger("percolator.oracle").warning("news")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["news"]


def test_humans_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.configure_logs("oracle", "human", "info")
    structlog.get_logger("percolator.oracle").info("mark extended", mark=7)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "mark extended" in line
    assert "mark=7" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_traceback_shows_no_values(
    log_format: Literal["human", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    """Local variables hold tokens, keys and what users have stored."""
    lifecycle.configure_logs("oracle", log_format, "info")
    token = "".join(["s3", "cret"])
    try:
        dict[str, str]()["why"]
    except KeyError:
        structlog.get_logger("percolator.oracle").exception("failed")
    said = capsys.readouterr().err
    assert "KeyError" in said
    assert token not in said


@pytest.mark.parametrize(
    "error",
    [
        NotReady("no master leads"),
        Overloaded("full", retry_after_seconds=1.0),
        Unavailable("refused"),
        StoreUnusable("no room", fault=StoreFault.DISK_FULL),
        StoreUnusable("a bad block", fault=StoreFault.INPUT_OUTPUT),
        OSError(errno.EIO, "a bad block"),
        OSError(errno.ENOSPC, "no room"),
        OSError(errno.EMFILE, "too many open files"),
    ],
    ids=repr,
)
def test_what_may_pass_by_itself_is_worth_another_start(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("listen", "is no address"),
        UsageError("in use by another oracle"),
        WrongCluster("another", expected="a", found="b"),
        StoreUnusable("a wrong checksum", fault=StoreFault.DAMAGED),
        StoreUnusable("mounted read-only", fault=StoreFault.READ_ONLY),
        FileNotFoundError(errno.ENOENT, "no such directory"),
        PermissionError(errno.EACCES, "permission denied"),
        CannotListen("address already in use"),
    ],
    ids=repr,
)
def test_what_an_operator_has_to_change_is_not(error: Exception) -> None:
    assert not may_pass(error)


WORKER = WorkerSettings(masters=("localhost:7100",), observers=("shop:all",), trace_file=Path("t"))


@pytest.mark.parametrize(
    ("settings", "setting", "path"),
    [
        (MasterSettings(store="data"), "store", Path("data") / "1"),
        (MasterSettings(store="/data"), "store", Path("/data/1")),
        (MasterSettings(store="/data", ready_file="here"), "ready_file", Path("here.new")),
        (WORKER, "trace_file", Path("t")),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_setting_that_has_to_be_changed_is_named(
    settings: ServiceSettings, setting: str, path: Path, is_absolute: bool
) -> None:
    """Some parts of a service make a relative path absolute, others do not."""
    path = path.absolute() if is_absolute else path
    error = PermissionError(errno.EACCES, "Permission denied", str(path))
    assert one_line(error, settings) == f"{setting}: {path}: Permission denied"


# `percolator serve`: each service starts quickly, and wrong commands are refused in one line.

ROOT = Path(__file__).parents[3]

DISPENSABLE = {"uvloop", "cryptography"}
"""Without uvloop, services are slower; only `percolator certs` needs cryptography."""


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_every_kind_of_service_can_be_served() -> None:
    kinds = {name.removeprefix("SERVICE_KIND_").replace("_", "") for name in ServiceKind.keys()}  # noqa: SIM118 (it is no dict)
    assert {name.upper() for name in SERVED} == kinds - {"UNSPECIFIED"}


def test_help_lists_every_service(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        told = capsys.readouterr().out
        assert told.startswith("usage: percolator serve SERVICE [OPTION ...]")
        assert all(f"\n  {name} " in told for name in SERVED)


@pytest.mark.parametrize("name", SERVED)
def test_each_service_has_help_of_its_own(name: str) -> None:
    command = [sys.executable, "-m", "percolator.cli", "serve", name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: percolator serve {name} [--SETTING VALUE ...]")
    assert "\n  --listen VALUE" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a service: oracle, lockservice, "),
        ([""], "there is no service ''; there are oracle, "),
        (["orcale"], "there is no service 'orcale'; did you mean oracle?"),
        (["Oracle"], "there is no service 'Oracle'; did you mean oracle?"),
        (["chassis"], "there is no service 'chassis'"),
        (["--listen=:1", "oracle"], "--listen=:1: options come after the service, one of oracle, "),
    ],
)
def test_a_service_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: percolator serve: {said}")
    assert printed.out == ""


def test_services_without_the_extra_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leveldb = "plyvel_next" if sys.version_info >= (3, 13) else "plyvel"
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == leveldb else name)
    assert main(["oracle", "--help"]) == 2
    assert capsys.readouterr().err == (
        f"error: the services need {leveldb}: pip install 'percolator-store[server]'\n"
    )


def test_services_look_for_all_that_the_extra_installs() -> None:
    wanted = map(Requirement, requires("percolator-store") or ())
    installed = {
        one.name
        for one in wanted
        if one.marker and one.marker.evaluate({"extra": "server"}) and not one.marker.evaluate()
    }
    providers = packages_distributions()
    looked_for = {name for module in NEEDED for name in providers[module]}
    assert {name.replace("_", "-") for name in looked_for} == installed - DISPENSABLE


def test_no_service_imports_what_only_terminals_need() -> None:
    """An observer may still import it afterwards."""
    imports = "; ".join(f"import percolator.services.{name}.service" for name in SERVED)
    unwanted = "('rich', 'typer', 'percolator.cli.app')"
    program = (
        f"import sys, percolator.cli; {imports};"
        f"print([name for name in {unwanted} if name in sys.modules]); import rich"
    )
    assert python(program) == "[]\n"


@pytest.mark.parametrize("name", SERVED)
def test_no_garbage_is_sought_in_what_a_service_imports(name: str) -> None:
    """Looking through all of it, while it was imported and at the end, took a tenth of a start."""
    program = (
        "import atexit, gc, sys; runs = [];"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000));"  # called last
        f"sys.argv = ['percolator', 'serve', '{name}', '--help'];"
        "import percolator.cli, percolator.services.serve;"
        "atexit.register(lambda: print(runs));"
        "gc.callbacks.append(lambda phase, info: runs.append(phase));"
        "percolator.cli.main()"
    )
    assert python(program).splitlines()[-2:] == ["[]", "True"]


def test_nothing_is_imported_before_the_service_that_is_asked_for() -> None:
    program = (
        "import sys; sys.argv = ['percolator', 'serve', 'nothing'];"
        "from percolator.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, *sorted(\n"
        "    name for name in sys.modules if name.startswith(('percolator', 'typer', 'grpc'))))"
    )
    assert python(program) == (
        "2 percolator percolator.cli percolator.services percolator.services.serve\n"
    )
