"""A disk in memory that forgets, when the power fails, everything that was not made durable.

Content is durable after `fsync` of the file, names after `fsync` of their directory. The names in a
directory become durable in the order of their changes, the contents of several files in any order.
Content that was being written may be torn anywhere, and may end in zeros where data never arrived.
After a failed fsync, the content written before it never becomes durable, although it can still be
read and a later fsync succeeds. Linux file systems behave like this, and other databases have lost
data because of it.
"""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

from percolator.services.chassis.files import FileStatus
from percolator.world import Random

_DEVICE = 1
"""The device of all files."""


class File:
    """An inode with content."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = b""
        self.locked = False
        self._durable = b""
        self._lost = False

    def truncate(self) -> None:
        self.content = b""
        self._lost = False

    @property
    def status(self) -> FileStatus:
        return FileStatus(self.number, _DEVICE, is_directory=False, size_bytes=len(self.content))

    def append(self, data: bytes) -> None:
        self.content += data

    def fsync(self) -> None:
        if not self._lost:
            self._durable = self.content

    def fail_fsync(self) -> None:
        """The pages are dropped as clean: no later fsync writes them."""
        self._lost = self.content != self._durable

    def lose_power(self, chance: Random | None) -> None:
        self.content = self._durable if chance is None else self._torn(chance)
        self._durable = self.content
        self.locked = False
        self._lost = False

    def _torn(self, chance: Random) -> bytes:
        extended = self.content.startswith(self._durable)
        if not extended and chance.random() < 0.5:
            return self._durable
        certain = len(self._durable) if extended else 0
        length = chance.randint(certain, len(self.content))
        arrived = chance.choice((length, chance.randint(certain, length)))
        return self.content[:arrived] + bytes(length - arrived)


class Directory:
    """An inode with names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = FileStatus(number, _DEVICE, is_directory=True, size_bytes=0)
        """Never changes; kept because it is requested after each batch."""
        self.names: dict[str, File | Directory] = {}
        self._durable: dict[str, File | Directory] = {}
        self._pending: list[dict[str, File | Directory | None]] = []

    def change(self, names: dict[str, File | Directory | None]) -> None:
        """Sets and (None) removes names, all in one step."""
        self._apply(self.names, names)
        self._pending.append(names)

    def fsync(self) -> None:
        self._keep(len(self._pending))

    def lose_power(self, chance: Random | None) -> None:
        self._keep(0 if chance is None else chance.randint(0, len(self._pending)))
        self.names = dict(self._durable)

    def everything(self) -> list[File | Directory]:
        """All entries that have a name here, or had one that a power cut may bring back."""
        changed = [node for names in self._pending for node in names.values() if node is not None]
        return [*self.names.values(), *self._durable.values(), *changed]

    def _keep(self, steps: int) -> None:
        for names in self._pending[:steps]:
            self._apply(self._durable, names)
        self._pending.clear()

    @staticmethod
    def _apply(to: dict[str, File | Directory], names: dict[str, File | Directory | None]) -> None:
        for name, node in names.items():
            if node is None:
                to.pop(name, None)
            else:
                to[name] = node


class MemoryDisk:
    """What is stored; the processes that see it are `MemoryFiles`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self.root = Directory(1)
        self.generation = 0
        """How often the power has failed: processes of an earlier generation are dead."""

    def make_durable_directory(self, path: Path) -> None:
        """Makes a directory and its parents, as an operator would before anything starts."""
        directory = self.root
        for name in path.parts[1:]:
            found = directory.names.get(name)
            if found is None:
                found = self.new_directory()
                directory.change({name: found})
                directory.fsync()
            if isinstance(found, File):
                raise fault(errno.ENOTDIR, path)
            directory = found

    def cut_power(self, chance: Random | None = None) -> None:
        """Everything that was not made durable is lost; with `chance`, some of it survives."""
        self.generation += 1
        # In the order of their numbers: the same seed has to lose the same things.
        for _, node in sorted(self._all().items()):
            node.lose_power(chance)

    def new_file(self) -> File:
        return File(next(self._numbers))

    def new_directory(self) -> Directory:
        return Directory(next(self._numbers))

    def find(self, path: Path) -> File | Directory:
        """The file or directory that has this name now."""
        parts = path.parts
        if not parts or parts[0] != "/":
            raise fault(errno.EINVAL, path)
        node: Any = self.root
        try:
            for name in parts[1:]:
                node = node.names[name]
        except KeyError:
            raise fault(errno.ENOENT, path) from None
        except AttributeError:  # a file has no names in it
            raise fault(errno.ENOTDIR, path) from None
        found: File | Directory = node
        return found

    def find_file(self, path: Path) -> File:
        node = self.find(path)
        if isinstance(node, Directory):
            raise fault(errno.EISDIR, path)
        return node

    def find_directory(self, path: Path) -> Directory:
        node = self.find(path)
        if isinstance(node, File):
            raise fault(errno.ENOTDIR, path)
        return node

    def _all(self) -> dict[int, File | Directory]:
        found: dict[int, File | Directory] = {}
        waiting: list[File | Directory] = [self.root]
        while waiting:
            node = waiting.pop()
            if node.number not in found:
                found[node.number] = node
                if isinstance(node, Directory):
                    waiting.extend(node.everything())
        return found


def fault(number: int, path: Path) -> OSError:
    """The `OSError`, in the proper subclass, that the operating system would raise."""
    return OSError(number, os.strerror(number), str(path))
