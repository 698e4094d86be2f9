"""The settings of the lock service: defaults, and values that are refused."""

from __future__ import annotations

import pytest

from percolator.services.chassis.settings import load
from percolator.services.lockservice.service import LockServiceSettings
from percolator.services.lockservice.sessions import LockServiceLimits


def test_without_flags_it_has_the_default_limits() -> None:
    assert load(LockServiceSettings, [], {}).limits() == LockServiceLimits()


def test_every_setting_reaches_the_cores() -> None:
    flags = {
        "ttl_milliseconds_min": 600,
        "ttl_milliseconds_max": 700,
        "sessions_max": 8,
        "locks_max": 9,
        "lock_name_bytes_total_max": 2_000,
        "request_items_max": 10,
        "page_sessions_max": 11,
    }
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    assert load(LockServiceSettings, argv, {}).limits() == LockServiceLimits(**flags)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--ttl-milliseconds-min=499", "ttl_milliseconds_min"),
        ("--ttl-milliseconds-max=499", "ttl_milliseconds_max"),
        ("--ttl-milliseconds-min=60001", "ttl_milliseconds_min"),
        ("--sessions-max=0", "sessions_max"),
        ("--request-bytes-max=1048577", "request_bytes_max"),
        ("--locks-max=0", "locks_max"),
        ("--locks-max=many", "locks_max"),
        ("--lock-name-bytes-total-max=1023", "lock_name_bytes_total_max"),
        ("--request-items-max=0", "request_items_max"),
        ("--page-sessions-max=0", "page_sessions_max"),
    ],
)
def test_an_invalid_value_stops_the_start_and_names_the_field(
    flag: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(LockServiceSettings, [flag], {})
    assert stopped.value.code == 2
    assert field in capsys.readouterr().err
