"""`percolator token`: what servers accept afterwards, and that a failed command changes nothing."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from percolator.cli import tokens as commands
from percolator.cli.app import app
from percolator.errors import InvalidArgument
from percolator.services.chassis.access import Grant, Tokens
from percolator.wire.roles import Role
from percolator.wire.tokens import Right, Rights, parse, token_entry, token_hash
from tests.command_line import CliRunner


class Commands:
    """Runs `percolator token` on one file of tokens."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "tokens.toml"

    def run(self, *arguments: str) -> Any:
        done = CliRunner().invoke(app, ["--json", "token", *arguments, f"--tokens={self.file}"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def refused(self, *arguments: str) -> str:
        """The error of a command, which has changed no file."""
        before = self.everything()
        done = CliRunner().invoke(app, ["token", *arguments, f"--tokens={self.file}"])
        assert done.exit_code == 2, done.output
        assert self.everything() == before
        return done.stderr

    def everything(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.directory.iterdir() if path.exists()}

    def grant(self, secret: str) -> Grant | None:
        """Grant of servers for the token in a file."""
        token = (self.directory / secret).read_text().strip()
        return Tokens(self.file).grant_of(token_hash(token))

    def granted(self, secret: str) -> Grant:
        found = self.grant(secret)
        assert found is not None
        return found

    def secret(self, name: str) -> str:
        return f"--file={self.directory / name}"

    def about_shop(self, command: str) -> list[str]:
        """The command with what it needs to be about the token `shop`."""
        name = [] if command == "list" else ["shop"]
        secret = [self.secret("new")] if command in ("create", "rotate") else []
        return [command, *name, *secret]


@pytest.fixture(name="token")
def _token(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def seconds_until(time: datetime | None) -> float:
    assert time is not None
    return (time - datetime.now(UTC)).total_seconds()


def test_servers_accept_a_created_token_until_it_is_revoked(token: Commands) -> None:
    token.run("create", "shop", token.secret("shop"))
    token.run("create", "boss", token.secret("boss"), "--role=admin")
    assert token.grant("shop") == Grant("shop", Role.CLIENT)
    assert token.grant("boss") == Grant("boss", Role.ADMIN)
    token.run("revoke", "shop")
    assert token.grant("shop") is None
    assert token.grant("boss") == Grant("boss", Role.ADMIN)


def test_the_token_is_only_in_its_own_file_for_its_owner(token: Commands) -> None:
    shown = token.run("create", "shop", token.secret("shop"))
    secret = (token.directory / "shop").read_text().strip()
    assert secret not in json.dumps(shown)
    assert secret not in token.file.read_text()
    for name in ("shop", "tokens.toml"):
        assert stat.S_IMODE((token.directory / name).stat().st_mode) == 0o600


def test_a_change_keeps_the_mode_of_the_file_and_a_link_to_it(token: Commands) -> None:
    """Otherwise servers of another user could no longer read it."""
    real = token.directory / "real.toml"
    real.write_text("")
    real.chmod(0o640)
    token.file.symlink_to(real)
    token.run("create", "shop", token.secret("shop"))
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert token.file.is_symlink()
    assert token.granted("shop")


def test_a_rotated_name_keeps_its_role_and_both_tokens_for_the_overlap(token: Commands) -> None:
    token.run("create", "shop", token.secret("old"), "--role=admin", "--expires-in=10d")
    (before,) = parse(token.file.read_text(), "file").values()
    token.run("rotate", "shop", token.secret("new"), "--overlap=2h")
    old = token.granted("old")
    assert token.grant("new") == Grant("shop", Role.ADMIN, before.expires)
    assert (old.name, old.role) == ("shop", Role.ADMIN)
    assert 7_100 < seconds_until(old.expires) <= 7_200


def test_a_token_for_some_tables_keeps_its_rights_when_it_is_rotated(token: Commands) -> None:
    tables = ("--read=orders", "--read=stock:eu/", "--write=orders", "--administer=orders")
    token.run("create", "shop", token.secret("old"), *tables)
    token.run("rotate", "shop", token.secret("new"))
    orders = (Right("orders"),)
    rights = Rights((*orders, Right("stock", b"eu/")), orders, orders)
    assert token.granted("old").rights == token.granted("new").rights == rights
    (listed,) = token.run("list")
    assert (listed["read"], listed["write"]) == (["orders", "stock:eu/"], ["orders"])


def test_a_second_rotation_ends_the_first_token(token: Commands) -> None:
    token.run("create", "shop", token.secret("first"))
    token.run("rotate", "shop", token.secret("second"))
    token.run("rotate", "shop", token.secret("third"), "--expires-in=1d")
    assert token.grant("first") is None
    assert token.granted("second")
    assert 86_300 < seconds_until(token.granted("third").expires) <= 86_400
    token.run("revoke", "shop")
    assert token.grant("second") is token.grant("third") is None


def test_a_former_token_is_never_said_to_outlive_its_name(token: Commands) -> None:
    token.run("create", "shop", token.secret("old"))
    until = ("--overlap=7d", "--expires-in=1h")
    said = token.run("rotate", "shop", token.secret("new"), *until)["former_expires"]
    assert token.granted("old").expires == datetime.fromisoformat(said)


def test_an_expired_token_is_not_rotated_to_another_one_that_has_expired(token: Commands) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    token.file.write_text(token_entry("gone", Role.CLIENT, "s3cret", past))
    assert "the present token has expired" in token.refused("rotate", "gone", token.secret("new"))
    token.run("rotate", "gone", token.secret("new"), "--expires-in=1d")
    assert seconds_until(token.granted("new").expires) > 86_300


def test_the_first_token_does_not_replace_its_own_file(token: Commands) -> None:
    assert "for the servers' tokens" in token.refused("create", "a", token.secret("tokens.toml"))


@pytest.mark.parametrize("command", ["create", "rotate", "revoke", "list"])
def test_a_place_where_no_file_can_be_is_named(token: Commands, command: str) -> None:
    arguments = token.about_shop(command)
    token.file.symlink_to(token.file)
    refused = CliRunner().invoke(app, ["token", *arguments, f"--tokens={token.file}"])
    assert (refused.exit_code, "symbolic links" in refused.stderr) == (2, True)
    token.file = token.directory / ("x" * 300)
    assert "File name too long" in token.refused(*arguments)


def test_a_circle_of_links_takes_no_secret(token: Commands) -> None:
    loop = token.directory / "loop"
    loop.symlink_to(loop)
    done = CliRunner().invoke(
        app, ["token", "create", "shop", f"--file={loop}", f"--tokens={token.file}"]
    )
    assert (done.exit_code, "File exists" in done.stderr) == (2, True)


def test_no_device_is_replaced_by_a_file_of_tokens(token: Commands) -> None:
    os.mkfifo(token.file)
    done = CliRunner().invoke(
        app, ["token", "create", "shop", token.secret("new"), f"--tokens={token.file}"]
    )
    assert (done.exit_code, "not a regular file" in done.stderr) == (2, True)
    assert [path.name for path in token.directory.iterdir()] == ["tokens.toml"]
    assert token.file.is_fifo()


def test_the_list_says_who_has_a_token_and_until_when(token: Commands) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    token.file.write_text(token_entry("gone", Role.CLIENT, "s3cret", past))
    token.run("create", "shop", token.secret("shop"))
    listed = {one["name"]: (one["role"], one["expired"]) for one in token.run("list")}
    assert listed == {"gone": ("client", True), "shop": ("client", False)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "shop", "--file=NEW"), "'shop' exists in"),
        (("create", "a b", "--file=NEW"), "1 to 64 letters, digits, - and _"),
        (("create", "other", "--file=OLD"), "File exists"),
        (("create", "other", "--file=NEW", "--expires-in=soon"), "expected a time such as"),
        (
            ("create", "other", "--file=NEW", "--expires-in=1e9d"),
            "--expires-in: '1e9d' is too long",
        ),
        (("create", "other", "--file=NEW", "--role=server"), "'server' is not one of"),
        (("create", "other", "--file=NEW", "--read=orders:"), "expected TABLE or TABLE:PREFIX"),
        (("create", "other", "--file=NEW", "--administer=a:b"), "expected whole tables"),
        (("create", "other", "--file=NEW", "--write=a:hex:0"), "pairs of hexadecimal digits"),
        (("create", "other", "--file=NEW", "--read=a", "--role=admin"), "may do everything"),
        (("rotate", "other", "--file=NEW"), "has no token of that name"),
        (("rotate", "shop", "--file=OLD"), "File exists"),
        (("create", "other", "--file=NEW", "--expires-in="), "--expires-in: is empty"),
        (("create", "other", "--file=NEW", "--write=a:hex:"), "--write: expected TABLE or TABLE:"),
        (("create", "other", "--file=tokens.toml"), "for the servers' tokens, not for this one"),
        (("create", "other", "--file=tokens.toml.new"), "for the servers' tokens, not for this"),
        (("rotate", "shop", "--file=NEW", "--overlap=0"), "--overlap: expected a time such as"),
        (("rotate", "shop", "--file=NEW", "--overlap="), "--overlap: is empty"),
        (("revoke", "other"), "has no token of that name"),
    ],
)
def test_a_refused_command_changes_nothing(
    token: Commands, arguments: tuple[str, ...], words: str
) -> None:
    token.run("create", "shop", token.secret("OLD"))
    places = [one.replace("--file=", f"--file={token.directory}/") for one in arguments]
    assert words in token.refused(*places)


@pytest.mark.parametrize("command", ["create", "rotate", "revoke", "list"])
def test_a_malformed_file_of_tokens_is_left_as_it_is(token: Commands, command: str) -> None:
    token.file.write_text('[shop]\nrole = "root"\n')
    assert "expected role and sha256" in token.refused(*token.about_shop(command))


@pytest.mark.parametrize("command", ["rotate", "revoke", "list"])
def test_a_file_of_tokens_that_is_not_there_is_named(token: Commands, command: str) -> None:
    assert "tokens.toml: No such file" in token.refused(*token.about_shop(command))


def test_a_full_disk_leaves_neither_an_entry_nor_a_secret(
    token: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.run("create", "shop", token.secret("shop"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "No space left" in token.refused("create", "other", token.secret("other"))


def test_of_commands_at_the_same_time_none_is_lost(token: Commands) -> None:
    """A command that wrote what it had read before would bring a revoked token back."""
    names = [f"shop-{number}" for number in range(8)]

    def add(name: str) -> None:
        with commands._edited(token.file, may_be_new=True) as edit:
            edit.text += token_entry(name, Role.CLIENT, name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, names))
    assert sorted(parse(token.file.read_text(), "file")) == names


def test_a_change_that_would_spoil_the_file_is_refused(token: Commands) -> None:
    token.run("create", "shop", token.secret("shop"))
    before = token.everything()
    with pytest.raises(InvalidArgument), commands._edited(token.file) as edit:
        edit.text += "["
    assert token.everything() == before
