"""The audit file: who has called what, from where, and with which outcome, as lines of JSON.

Every call of an administrator that needs that role gets a line before it is answered, and so does
every refusal of a caller. Equal refusals of a second share one line that counts them: otherwise a
caller without a token could fill the disk, and push out the lines of all others.

No line holds a row, a value or a token. While the file cannot be written, calls go on: a full disk
would otherwise keep operators from making room.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from percolator.errors import InvalidArgument
from percolator.process import private_opener
from percolator.services.chassis.coordinator import Trouble
from percolator.timestamps import utc_text
from percolator.wire.roles import Role
from percolator.world import Clock

REFUSALS_EACH_SECONDS = 1.0
DIFFERENT_REFUSALS_MAX = 1_000
"""How many different ones a second may have. Any further ones are counted together."""
_CHARACTERS_MAX = 200
_ITEMS_MAX = 20
_DEPTH_MAX = 3
_SUBJECT_CHARACTERS_MAX = 4_000

_log = structlog.get_logger("percolator.audit")

_Refusal = tuple[str, str, str, str, str]
"""Who, from, rpc, outcome, reason."""


class Caller(Protocol):
    """Who has called."""

    @property
    def role(self) -> Role: ...

    @property
    def name(self) -> str: ...

    @property
    def machine(self) -> str: ...


class Audit:
    """The audit file of one process. Belongs to the event loop.

    The file is renamed to `FILE.1` before it grows above its limit, that one to `FILE.2`, and so
    on; the oldest is deleted. If somebody else moves or deletes it, a new one is begun.
    """

    def __init__(self, path: Path, clock: Clock, bytes_max: int, files_max: int) -> None:
        """Raises `InvalidArgument` if the file cannot be written."""
        self._path = path
        self._clock = clock
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._refusals: Counter[_Refusal] = Counter()
        self._trouble = Trouble(
            _log, "the audit file cannot be written", "it can again", level=logging.ERROR
        )
        try:
            self._file, self._size = _opened(path)
        except OSError as error:
            raise InvalidArgument("audit", f"{path}: {error.strerror}") from None

    def called(
        self,
        caller: Caller,
        path: str,
        parse: Callable[[bytes], Message],
        request: bytes | None,
        outcome: str,
    ) -> None:
        """An administrative call is about to be answered. Servers also make such calls, by
        themselves, which are left out."""
        if caller.role == Role.SERVER:
            return
        about: dict[str, Any] = {}
        if request is not None:
            with suppress(DecodeError):
                about = _about(parse(request))
        line = {"who": caller.name, "from": caller.machine, "rpc": path}
        self._write({**line, "request": about, "outcome": outcome})

    def refused(self, who: str, machine: str, path: str, outcome: str, reason: str) -> None:
        """A caller is about to be refused."""
        refusal = (who, machine, path, outcome, reason)
        if refusal not in self._refusals and len(self._refusals) >= DIFFERENT_REFUSALS_MAX:
            refusal = ("", "others", "", outcome, "")
        self._refusals[refusal] += 1

    async def keep(self) -> None:
        """Writes refusals, until cancelled."""
        while True:
            await self._clock.sleep(REFUSALS_EACH_SECONDS)
            self.flush()

    def flush(self) -> None:
        """Writes the refusals since the last time."""
        refusals, self._refusals = self._refusals, Counter()
        for (who, machine, path, outcome, reason), times in refusals.items():
            self._write(
                {"who": who, "from": machine, "rpc": path, "outcome": outcome, "reason": reason}
                | {"times": times}
            )

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    def _write(self, line: dict[str, Any]) -> None:
        time = datetime.fromtimestamp(self._clock.wall_milliseconds() / 1000, UTC)
        encoded = json.dumps({"time": utc_text(time)} | line).encode() + b"\n"
        try:
            self._require_in_place()
            if self._size and self._size + len(encoded) > self._bytes_max:
                self._rotate()
            # An earlier line of which only a part was written must not spoil this one.
            self._append(b"" if _ends_with_line(self._file, self._size) else b"\n")
            self._append(encoded)
        except OSError as error:
            self._trouble.lasts(error.strerror)
        else:
            self._trouble.is_over()

    def _require_in_place(self) -> None:
        """Begins a new file if the present one was moved or deleted: its lines would be lost."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return
        file, size = _opened(self._path)
        os.close(self._file)
        self._file, self._size = file, size

    def _append(self, data: bytes) -> None:
        while data:
            written = os.write(self._file, data)
            self._size += written
            data = data[written:]

    def _rotate(self) -> None:
        def numbered(number: int) -> Path:
            return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

        # The new file comes first: if there is no space for it, no older one moves up and out.
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        file, size = _opened(new)
        for number in range(self._files_max - 1, 0, -1):
            if numbered(number - 1).exists():
                numbered(number - 1).replace(numbered(number))
        new.replace(self._path)
        os.close(self._file)
        self._file, self._size = file, size


def _opened(path: Path) -> tuple[int, int]:
    """The file, for appending, and its size."""
    file = private_opener(os.fspath(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        _lock(file)
        return file, os.fstat(file).st_size
    except OSError:
        os.close(file)
        raise


def _lock(file: int) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        # A rotation would put a file in place of a device: of /dev/null, for everybody.
        raise OSError(errno.EINVAL, "not a regular file")
    try:
        # Two processes would rename each other's files.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another process writes to it") from None


def _ends_with_line(file: int, size: int) -> bool:
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _about(subject: Message) -> dict[str, Any]:
    """Names in a request: of tables, tablets, servers, observers. Bytes hold rows and values, and
    are left out."""
    named = _fields(subject, _DEPTH_MAX)
    if len(json.dumps(named)) <= _SUBJECT_CHARACTERS_MAX:
        return named
    return _fields(subject, 1)


def _fields(message: Message, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_BYTES:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth == 1:
            continue
        if isinstance(value, str | int | float | Message):
            found[field.name] = _item(value, depth)
        else:
            found[field.name] = [_item(one, depth) for one in value[:_ITEMS_MAX]]
    return found


def _item(value: Any, depth: int) -> Any:  # noqa: ANN401 (any type of a field)
    if isinstance(value, Message):
        return _fields(value, depth - 1)
    return value[:_CHARACTERS_MAX] if isinstance(value, str) else value
