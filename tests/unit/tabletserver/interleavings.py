"""Every interleaving of one owner and several claimants of a tablet, step by step.

The processes are the real coroutines over a directory that exists in this model only. A step is
one system call. A coroutine cannot be copied, so that a process is known by the results that its
calls had so far, and is run again from its start to learn the next call; with that, states that
were reached in different ways are recognised as the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

from percolator.errors import PercolatorError
from services.chassis.epoch_directory import (
    EpochDirectory,
    remove_superseded,
    take_over,
)
from services.chassis.files import Files, FileStatus

TABLET = Path("/tablet")
DAMAGED = -1
"""Stands for a removed file among what a directory holds."""

Call = tuple[str, ...]
Result = tuple[str, Any]
History = tuple[Result, ...]
Names = tuple[tuple[str, int], ...]


class _Step:
    """Awaiting it makes one system call of the model."""

    def __init__(self, *call: str) -> None:
        self._call = call

    def __await__(self) -> Generator[Call, Result, Any]:
        kind, value = yield self._call
        if kind == "error":
            raise cast("type[OSError]", value)()
        return value


class StepFiles:
    """The part of `Files` that a takeover uses; a directory holds one file, called data."""

    def __init__(self) -> None:
        self.own_inode: int | None = None

    def stat_now(self, path: Path) -> FileStatus:
        if self.own_inode is None:
            raise FileNotFoundError
        return _status(self.own_inode)

    async def list(self, path: Path) -> list[str]:
        return list(await _Step("list", str(path)))

    async def make_directory(self, path: Path) -> None:
        await _Step("mkdir", path.name)

    async def rename(self, source: Path, target: Path) -> None:
        await _Step("rename", source.name, target.name)

    async def stat(self, path: Path) -> FileStatus:
        return _status(await _Step("stat", path.name))

    async def unlink(self, path: Path) -> None:
        await _Step("unlink", path.parent.name)

    async def remove_directory(self, path: Path) -> None:
        await _Step("rmdir", path.name)

    async def fsync_directory(self, path: Path) -> None:
        """Changes nothing that another process sees: no step."""


async def clone_in_model(files: Files, source: Path, target: Path) -> None:
    """All of a clone in one step: what it does to single files is tested elsewhere."""
    await _Step("clone", source.name, target.name)


async def serve(directory: EpochDirectory) -> None:
    """One write, acknowledged only if the directory still stands afterwards."""
    await _Step("open and append", str(directory.identity.inode))
    files = cast("StepFiles", directory.files)
    try:
        files.own_inode = (await files.stat(directory.path)).inode
    except FileNotFoundError:
        files.own_inode = None
    if directory.stands():
        await _Step("acknowledge")


async def first_owner(files: Files) -> None:
    """Serves at epoch 1 from the start."""
    await serve(EpochDirectory(files, TABLET / "e1", _status(0)))


def claimant(epoch: int) -> Callable[[Files], Awaitable[None]]:
    """Takes the tablet over at `epoch`, clears up behind its predecessors, and serves."""

    async def run(files: Files) -> None:
        directory = await take_over(files, TABLET, epoch, clone_in_model)
        await remove_superseded(files, TABLET, epoch)
        await serve(directory)

    return run


@dataclass(frozen=True)
class State:
    """The directory, what each directory in it holds, and how far every process came."""

    names: Names
    contents: tuple[frozenset[int], ...]
    histories: tuple[History, ...]
    acknowledged: frozenset[int] = frozenset()
    served: frozenset[tuple[int, frozenset[int]]] = frozenset()


@dataclass
class Explorer:
    """Visits every reachable state, and returns what was acknowledged and is missing."""

    epochs: tuple[int, ...]
    """Of the claimants; two may have the same, as with standbys that choose it themselves."""
    states: int = 0
    outcomes: set[frozenset[int]] = field(default_factory=set)
    """Which processes acknowledged, in each way that everything can end."""
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
        """One order among all, by chance: where all of them are too many."""
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
            # Deleting it under a paused former owner is fine: nothing that it says of it leaves.
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
        return [_execute(state, i, call) for i, call in calls if call is not None]

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
        except (StopIteration, PercolatorError):
            return None
        steps.close()
        return call


def _execute(state: State, process: int, call: Call) -> State:
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
        case ("open and append", inode_text):
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
