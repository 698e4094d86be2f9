"""`percolator token`: makes, lists and revokes the secrets with which clients prove their role."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from percolator.cli.connection import connection, fail, plain
from percolator.cli.options import duration_seconds, not_empty
from percolator.errors import InvalidArgument
from percolator.process import private_opener
from percolator.wire.roles import Role
from percolator.wire.tokens import (
    ROLES,
    Entry,
    Right,
    Rights,
    new_token,
    parse,
    require_name,
    time_text,
    token_hash,
    with_entry,
    without_entry,
)


class TokenRole(StrEnum):
    """A role, as written on the command line."""

    CLIENT = "client"
    ADMIN = "admin"


app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke tokens for clients. Servers see a change within seconds.",
)

Name = Annotated[str, typer.Argument(help="Who it belongs to.", show_default=False)]
SecretFile = Annotated[
    Path, typer.Option(help="Where to write the token; must not exist yet.", show_default=False)
]
TokensFile = Annotated[
    Path,
    typer.Option(
        help="The servers' file of tokens, which the setting `tokens` names.", show_default=False
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this table, or TABLE:PREFIX; through gateways. Repeat it for more.",
        metavar="TABLE[:PREFIX]",
        show_default=False,
    ),
]
ExpiresIn = Annotated[
    str,
    typer.Option(help="How long it is accepted: 90d, 12h [default: no end].", callback=not_empty),
]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    file: SecretFile,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="The servers' file of tokens, to which the entry is added; it may be new "
            "[default: print the entry].",
            show_default=False,
        ),
    ] = None,
    role: Annotated[TokenRole, typer.Option(help="What it allows.")] = TokenRole.CLIENT,
    expires_in: ExpiresIn = "",
    read: Rows = None,
    write: Rows = None,
    administer: Annotated[
        list[str] | None,
        typer.Option(
            help="Also create, change and delete this table. Repeat it for more.",
            metavar="TABLE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a new token to a file, and its entry to the servers' file of tokens.

    The token itself is never printed. With --read, --write or --administer, it may do nothing else,
    and reads and writes through gateways only.
    """
    token = new_token()
    try:
        require_name(name)
        expires, rights = (
            _time_in("--expires-in", expires_in),
            _rights(role, read, write, administer),
        )
        entry = Entry(name, ROLES[role.value], token_hash(token), expires, rights=rights)
        if tokens is None:
            _write_secret(file, token)
        else:
            with _edited(tokens, may_be_new=True) as edit:
                if name in edit.entries:
                    fail(InvalidArgument("name", f"{name!r} exists in {tokens}; rotate or revoke"))
                edit.text = with_entry(edit.text, entry)
                edit.secret(file, token)
    except InvalidArgument as error:
        fail(error)
    shown = Text(entry.text().rstrip() if tokens is None else f"created {name} in {tokens}")
    data = {"name": name, "role": role.value, "expires": _shown(entry.expires)}
    connection(context).show(data | {"entry": entry.text()}, shown)


@app.command()
def rotate(
    context: typer.Context,
    name: Name,
    file: SecretFile,
    tokens: TokensFile,
    overlap: Annotated[
        str,
        typer.Option(
            help="How long the present token is still accepted: 1h, 7d.", callback=not_empty
        ),
    ] = "1h",
    expires_in: Annotated[
        str,
        typer.Option(
            help="How long the new one is accepted [default: until the present one ends].",
            callback=not_empty,
        ),
    ] = "",
) -> None:
    """Write a new token for a name that has one; both are accepted for a while."""
    token = new_token()
    try:
        overlap_ends = _time_in("--overlap", overlap)
        with _edited(tokens) as edit:
            former = edit.entry(name)
            expires = _time_in("--expires-in", expires_in) or former.expires
            if expires is not None and expires <= datetime.now(UTC):
                reason = "the present token has expired: say when the new one does"
                fail(InvalidArgument("--expires-in", reason))
            entry = replace(
                former,
                digest=token_hash(token),
                expires=expires,
                former_digest=former.digest,
                former_expires=min(filter(None, (overlap_ends, former.expires, expires))),
            )
            edit.text = with_entry(without_entry(edit.text, name, str(tokens), "--tokens"), entry)
            edit.secret(file, token)
    except InvalidArgument as error:
        fail(error)
    until = _shown(entry.former_expires)
    shown = Text(f"rotated {name}; the former token is accepted until {until}")
    connection(context).show({"name": name, "former_expires": until}, shown)


@app.command()
def revoke(context: typer.Context, name: Name, tokens: TokensFile) -> None:
    """Remove a name: servers refuse its tokens within seconds, and end its streams."""
    try:
        with _edited(tokens) as edit:
            edit.entry(name)
            edit.text = without_entry(edit.text, name, str(tokens), "--tokens")
    except InvalidArgument as error:
        fail(error)
    connection(context).show({"name": name}, Text(f"revoked {name}"))


@app.command("list")
def list_(context: typer.Context, tokens: TokensFile) -> None:
    """List who has a token, and what it allows."""
    try:
        entries = parse(_read(tokens), str(tokens), "--tokens").values()
    except InvalidArgument as error:
        fail(error)
    now = datetime.now(UTC)
    shown = Table("name", "role", "expires", "former token until", *Rights._fields, box=None)
    data = []
    for entry in entries:
        is_over = entry.expires is not None and entry.expires <= now
        shown.add_row(
            entry.name,
            entry.role.name.lower(),
            (_shown(entry.expires) or "never") + (" (expired)" if is_over else ""),
            _shown(entry.former_expires) or "",
            *(plain(", ".join(one)) for one in _tables(entry).values()),
        )
        data.append(
            {
                "name": entry.name,
                "role": entry.role.name.lower(),
                "expires": _shown(entry.expires),
                "expired": is_over,
                "former_expires": _shown(entry.former_expires),
                **({} if entry.rights is None else _tables(entry)),
            }
        )
    connection(context).show(data, shown)


def _tables(entry: Entry) -> dict[str, list[str]]:
    """Tables and prefixes that a token may read, write and administer."""
    if entry.rights is not None:
        return entry.rights.texts()
    is_admin = entry.role is Role.ADMIN
    return {"read": ["all"], "write": ["all"], "administer": ["all"] if is_admin else []}


def _shown(time: datetime | None) -> str | None:
    return None if time is None else time_text(time)


def _rights(role: TokenRole, *tables: list[str] | None) -> Rights | None:
    if not any(tables):
        return None
    if role is not TokenRole.CLIENT:
        raise InvalidArgument("--role", "an administrator may do everything; leave out the tables")
    rights = Rights(
        *(
            tuple(Right.parse(one, f"--{key}") for one in given or ())
            for key, given in zip(Rights._fields, tables, strict=True)
        )
    )
    if any(right.prefix for right in rights.administer):
        raise InvalidArgument("--administer", "expected whole tables, without a prefix")
    return rights


def _time_in(option: str, duration: str) -> datetime | None:
    if not duration:
        return None
    try:
        return datetime.now(UTC) + timedelta(seconds=duration_seconds(option, duration))
    except OverflowError:
        raise InvalidArgument(option, f"{duration!r} is too long") from None


class _Edit:
    """One change of the servers' file of tokens."""

    def __init__(self, text: str, where: Path) -> None:
        self.entries = parse(text, str(where), "--tokens")
        self.text = text
        self._where = where
        self._secret: Path | None = None

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise InvalidArgument("name", f"{self._where} has no token of that name")
        return self.entries[name]

    def secret(self, path: Path, token: str) -> None:
        """Writes the token of a new entry."""
        if _resolved(path) in (self._where, _replacement(self._where)):
            raise InvalidArgument("--file", f"{path} is for the servers' tokens, not for this one")
        _write_secret(path, token)
        self._secret = path

    def undo(self) -> None:
        """Removes the token, which no server will ever accept."""
        if self._secret is not None:
            with suppress(OSError):
                self._secret.unlink()


@contextmanager
def _edited(path: Path, *, may_be_new: bool = False) -> Iterator[_Edit]:
    """Changes the file as a whole, or not at all, and keeps its owner and its mode. Commands wait
    for each other: otherwise one could write back an entry that another has just revoked."""
    path = _resolved(path)  # a link stays one
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidArgument("--tokens", f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        is_new = not _is_there(path) and may_be_new
        edit = _Edit("" if is_new else _read(path), path)
        try:
            yield edit
            # Otherwise a mistake here would shut everybody out at the next restart.
            parse(edit.text, str(path), "--tokens")
            _replace(path, edit.text, is_new=is_new)
        except BaseException:
            edit.undo()
            raise
        with suppress(OSError):  # the file has been replaced, and may no longer be undone
            os.fsync(directory)
    finally:
        os.close(directory)


def _is_there(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InvalidArgument("--tokens", f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        # A change would put a file in place of a device: of /dev/null, for everybody.
        raise InvalidArgument("--tokens", f"{path}: not a regular file")
    return True


def _resolved(path: Path) -> Path:
    """The file that is meant, behind links. `Path.resolve` raises if these form a circle."""
    return Path(os.path.realpath(path))


def _replacement(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _replace(path: Path, text: str, *, is_new: bool) -> None:
    new = _replacement(path)
    try:
        new.unlink(missing_ok=True)
        with open(new, "x", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
            if not is_new:
                # Servers of another user must still be able to read it.
                status = path.stat()
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise InvalidArgument("--tokens", f"{path}: {error.strerror}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("--tokens", f"{path}: {error.strerror}") from None
    except ValueError:
        raise InvalidArgument("--tokens", f"{path}: not TOML") from None


def _write_secret(path: Path, token: str) -> None:
    try:
        with open(path, "x", encoding="ascii", opener=private_opener) as file:
            try:
                file.write(token + "\n")
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise InvalidArgument("--file", f"{path}: {error.strerror}") from None
