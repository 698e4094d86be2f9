"""The file of tokens: what it grants, and that no part of it is ever shown."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
import structlog

from percolator.errors import InvalidArgument
from percolator.services.chassis.gate import Tokens
from percolator.wire.roles import Role
from percolator.wire.tokens import new_token, token_entry, token_hash
from tests.simulation.virtual_time import VirtualClock
from tests.unit.wire.permissions import change_mode


def tokens_file(directory: Path, *entries: str) -> Path:
    path = directory / "tokens.toml"
    path.write_text("\n".join(entries))
    return path


def test_a_token_has_the_role_that_the_file_gives_it(tmp_path: Path) -> None:
    shop, boss = new_token(), new_token()
    path = tokens_file(
        tmp_path, token_entry("shop", Role.CLIENT, shop), token_entry("boss", Role.ADMIN, boss)
    )
    tokens = Tokens(path)
    assert tokens.role_of(token_hash(shop)) is Role.CLIENT
    assert tokens.role_of(token_hash(boss)) is Role.ADMIN
    assert tokens.role_of(token_hash(shop + "x")) is None
    assert tokens.role_of(token_hash("")) is None


def test_the_file_does_not_hold_the_token(tmp_path: Path) -> None:
    token = new_token()
    assert token not in token_entry("shop", Role.CLIENT, token)


ENTRY = token_entry("shop", Role.CLIENT, "s3cret")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shop = ", "not TOML"),
        ("shop = 1", "[shop]: expected role and sha256"),
        (ENTRY + "name = 1", "and nothing else"),
        ('["a b"]\nrole = "client"', "letters, digits"),
        (ENTRY.replace("client", "server"), "expected client or admin"),
        ('[shop]\nrole = "client"\nsha256 = "s3cret"', "64 hexadecimal digits"),
        ('[shop]\nrole = "client"\nsha256 = 7', "64 hexadecimal digits"),
        (ENTRY + ENTRY.replace("shop", "twin"), "another token has the same"),
    ],
)
def test_a_wrong_file_is_refused_by_name_without_a_word_of_its_secrets(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tokens_file(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        Tokens(path)
    assert caught.value.field == "tokens"
    assert str(path) in caught.value.reason
    assert words in caught.value.reason
    assert "s3cret" not in caught.value.reason


@pytest.mark.parametrize("text", ['{} = "admin"', "[{}]", '["{}"]\nrole = "root"\nsha256 = ""'])
def test_a_token_in_the_place_of_a_name_is_not_shown(text: str, tmp_path: Path) -> None:
    token = new_token()
    with pytest.raises(InvalidArgument, match=token[:6]) as refused:
        Tokens(tokens_file(tmp_path, text.format(token)))
    assert token[:7] not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tokens: .*none: No such file"):
        Tokens(tmp_path / "none")


async def test_a_change_of_the_file_is_in_force_within_seconds(tmp_path: Path) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    path = tokens_file(tmp_path, ENTRY)
    tokens = Tokens(path)
    following = asyncio.create_task(tokens.follow(clock))
    with structlog.testing.capture_logs() as log:
        path.write_text(token_entry("other", Role.ADMIN, "another") + "\n")
        await clock.sleep(5)
        assert tokens.role_of(token_hash("s3cret")) is None
        assert tokens.role_of(token_hash("another")) is Role.ADMIN
        path.write_text("broken")
        await clock.sleep(5)
        away = path.rename(tmp_path / "away")
        await clock.sleep(60)
        assert tokens.role_of(token_hash("another")) is Role.ADMIN
        assert [entry["log_level"] for entry in log].count("error") == 2
        away.rename(path)
        await clock.sleep(5)
    assert [entry["log_level"] for entry in log].count("error") == 3
    following.cancel()


async def test_a_file_that_could_not_be_read_is_in_force_once_its_permissions_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    path = tokens_file(tmp_path, ENTRY)
    tokens = Tokens(path)
    following = asyncio.create_task(tokens.follow(clock))
    path.write_text(token_entry("other", Role.ADMIN, "another") + "\n")
    with monkeypatch.context() as forbidden:
        forbidden.setattr(Path, "read_text", _refused)  # a mode would not keep root from it
        await clock.sleep(5)
    assert tokens.role_of(token_hash("s3cret")) is Role.CLIENT
    change_mode(path)
    await clock.sleep(5)
    assert tokens.role_of(token_hash("s3cret")) is None
    assert tokens.role_of(token_hash("another")) is Role.ADMIN
    following.cancel()


def _refused(*_: object, **__: object) -> str:
    raise PermissionError(errno.EACCES, "Permission denied")
