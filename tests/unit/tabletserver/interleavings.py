"""Every interleaving of one owner and several claimants of a tablet, step by step.

The processes are the real coroutines over a directory that exists only in this model. A step is one
system call. A coroutine cannot be copied, so a process is represented by the results of its calls
so far, and run again from the start to learn its next call. In this way, states that were reached
in different ways are recognised as the same.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

from percolator.errors import PercolatorError
from percolator.services.chassis.epoch_directory import (
    EpochDirectory,
    Inheritance,
    remove_superseded,
    take_over,
)
from percolator.services.chassis.files import Files, FileStatus

TABLET = Path("/tablet")
DAMAGED = -1
"""Marks a directory in which something is missing, because it was removed or never copied."""

Call = tuple[str, ...]
Result = tuple[str, Any]
History = tuple[Result, ...]
Names = tuple[tuple[str, int], ...]


class _Step:
    """One system call of the model, made by awaiting it."""

    def __init__(self, *call: str) -> None:
        self._call = call

    def __await__(self) -> Generator[Call, Result, Any]:
        kind, value = yield self._call
        if kind == "error":
            raise cast("Callable[[], OSError]", value)()
        return value


class StepFiles:
    """The part of `Files` that a takeover uses; a directory holds one file, called data."""

    async def list(self, path: Path) -> list[str]:
        return list(await _Step("list", str(path)))

    async def make_directory(self, path: Path) -> None:
        await _Step("mkdir", path.name)

    async def rename(self, source: Path, target: Path) -> None:
        await _Step("rename", source.name, target.name)

    async def stat(self, path: Path) -> FileStatus:
        return _status(await _Step("stat", path.name))

    async def stat_waits(self, device: int) -> bool:
        return True

    async def unlink(self, path: Path) -> None:
        await _Step("unlink", path.parent.name)

    async def remove_directory(self, path: Path) -> None:
        await _Step("rmdir", path.name)

    async def fsync_directory(self, path: Path) -> None:
        """Not a step: it changes nothing that another process sees."""


async def clone_in_model(files: Files, source: Path, target: Path) -> None:
    """A whole clone in one step: what it does to single files is tested elsewhere."""
    await _Step("clone", source.name, target.name)


async def serve(directory: EpochDirectory) -> None:
    """One write, acknowledged only if the directory is still held afterwards."""
    await _Step("append", str(await _Step("open database", directory.path.name)))
    # In a step of its own, and not in a task, which no model could run again.
    if await directory._look():
        await _Step("acknowledge")


async def first_owner(files: Files) -> None:
    """Serves at epoch 1 from the start."""
    await serve(EpochDirectory(files, TABLET / "e1", _status(0)))


def claimant(epoch: int) -> Callable[[Files], Awaitable[None]]:
    """Takes the tablet over at `epoch`, cleans up after its predecessors, and serves."""

    async def run(files: Files) -> None:
        inheritance = Inheritance(must_exist=True, served_epoch=1)
        directory = await take_over(files, TABLET, epoch, clone_in_model, inheritance)
        await remove_superseded(files, TABLET, epoch)
        await serve(directory)

    return run


@dataclass(frozen=True)
class State:
    """The directory, the content of each subdirectory, and how far each process has got."""

    names: Names
    contents: tuple[frozenset[int], ...]
    histories: tuple[History, ...]
    acknowledged: frozenset[int] = frozenset()
    served: frozenset[tuple[int, frozenset[int]]] = frozenset()


@dataclass
class Explorer:
    """Visits every reachable state, and returns acknowledged writes that are missing."""

    epochs: tuple[int, ...]
    """The epochs of the claimants; two may be equal, as for standbys that choose their own."""
    recreating: bool = False
    """True if opening a database under a name that is gone creates that directory again, as LevelDB
    does with a plain path."""
    states: int = 0
    outcomes: set[frozenset[int]] = field(default_factory=set)
    """Which processes acknowledged, for each possible ending."""
    _next: dict[tuple[int, History], Call | None] = field(default_factory=dict)

    def violations(self) -> list[str]:
        seen, waiting = {self._start()}, [self._start()]
        while waiting:
            state = waiting.pop()
            if missing := self._missing(state):
                return missing
            successors = self._successors(state)
            if not successors:
                self.outcomes.add(state.acknowledged)
            for successor in successors:
                if successor not in seen:
                    seen.add(successor)
                    waiting.append(successor)
        self.states = len(seen)
        return []

    def walk(self, random: Random) -> list[str]:
        """Follows one random order, for cases where trying all would take too long."""
        state = self._start()
        while successors := self._successors(state):
            state = random.choice(successors)
            if missing := self._missing(state):
                return missing
        self.outcomes.add(state.acknowledged)
        return []

    def _start(self) -> State:
        return State((("e1", 0),), (frozenset(),), ((),) * (len(self.epochs) + 1))

    def _missing(self, state: State) -> list[str]:
        epochs = (1, *self.epochs)
        found: list[str] = []
        for reader, contents in state.served:
            # Deleting it under a paused former owner is fine: none of its responses leave.
            if DAMAGED in contents and reader in state.acknowledged:
                found.append(f"epoch {epochs[reader]} serves a half deleted directory")
            found.extend(
                f"the write of epoch {epochs[writer]} is not at {epochs[reader]}"
                for writer in state.acknowledged - contents - {reader}
                if epochs[writer] <= epochs[reader] and DAMAGED not in contents
            )
        return found

    def _successors(self, state: State) -> list[State]:
        calls = ((i, self._next_call(i, h)) for i, h in enumerate(state.histories))
        return [
            _execute(state, i, call, recreating=self.recreating)
            for i, call in calls
            if call is not None
        ]

    def _next_call(self, process: int, history: History) -> Call | None:
        key = (process, history)
        if key not in self._next:
            self._next[key] = self._replay(process, history)
        return self._next[key]

    def _replay(self, process: int, history: History) -> Call | None:
        program = first_owner if process == 0 else claimant(self.epochs[process - 1])
        steps = program(cast("Files", StepFiles())).__await__()
        try:
            call = cast("Call", next(steps))
            for result in history:
                call = cast("Call", steps.send(result))
        except (StopIteration, PercolatorError, OSError):
            return None
        steps.close()
        return call


def _execute(state: State, process: int, call: Call, *, recreating: bool) -> State:
    names, contents = dict(state.names), list(state.contents)
    acknowledged, served = state.acknowledged, state.served
    result: Result = ("ok", None)
    match call:
        case ("list", path) if path == str(TABLET):
            result = ("ok", tuple(sorted(names)))
        case ("list", path):
            inode = names.get(Path(path).name)
            result = ("ok", ("data",)) if inode is not None else _absent()
        case ("mkdir", name) if name in names:
            result = ("error", FileExistsError)
        case ("mkdir", name):
            names[name] = len(contents)
            contents.append(frozenset())
        case ("rename", source, target) if source in names and target in names:
            result = ("error", _not_empty)
        case ("rename", source, target) if source in names:
            names[target] = names.pop(source)
        case ("stat", name) if name in names:
            result = ("ok", names[name])
        case ("unlink", name) if name in names:
            contents[names[name]] = frozenset({DAMAGED})
        case ("rmdir", name) if name in names:
            del names[name]
        case ("clone", source, target) if source in names and target in names:
            contents[names[target]] = contents[names[source]]
        case ("open database", name) if name in names or recreating:
            if name not in names:
                names[name] = len(contents)
                contents.append(frozenset({DAMAGED}))
            result = ("ok", names[name])
        case ("append", inode_text):
            inode = int(inode_text)
            served |= {(process, contents[inode])}
            contents[inode] |= {process}
        case ("acknowledge",):
            acknowledged |= {process}
        case _:
            result = _absent()
    histories = list(state.histories)
    histories[process] = (*histories[process], result)
    ordered = tuple(sorted(names.items()))
    return State(ordered, tuple(contents), tuple(histories), acknowledged, served)


def _status(inode: int) -> FileStatus:
    return FileStatus(inode=inode, device=1, is_directory=True, size_bytes=0)


def _absent() -> Result:
    return ("error", FileNotFoundError)


def _not_empty() -> OSError:
    """A directory can only replace an empty one, and every directory here has content."""
    return OSError(errno.ENOTEMPTY, "not empty")
