"""What the demonstration shows of a cluster at one moment, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass(frozen=True)
class Runs:
    """Of one observer, in all workers: counted by the workers themselves, in their metrics."""

    committed: int = 0
    repeated: int = 0
    """Lost against another transaction, or not answered in time: they run again."""
    failed: int = 0
    """Raised an error; repeated too, or put aside in the end."""


@dataclass(frozen=True)
class Latency:
    """From before a document was written to the commit that served what it changed.

    The serving table says both: `cause` is the one timestamp, that of the cell's version the other.
    """

    versions: int
    """Of rows of the serving table: those that a look at it has found."""
    median: float
    slow: float
    """95 of 100 took no longer."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        if len(seconds) < 2:
            return None
        return cls(len(seconds), median(seconds), quantiles(seconds, n=20)[-1])


@dataclass(frozen=True)
class Server:
    """A tablet server, as the launcher knows its process."""

    name: str
    pid: int
    address: str
    alive: bool = True


@dataclass(frozen=True)
class Tablet:
    """As the master knows it."""

    tablet_id: int
    table: str
    address: str
    """Of its server."""
    serving: bool
    """Its server has told the master that it serves it."""


@dataclass
class State:
    """Each figure is that of the last answer; nothing is guessed in between."""

    chapter: str = ""
    to_write: int = 0
    written: int = 0
    """Changes whose commits were acknowledged to the loader."""
    observers: Mapping[str, Runs] = field(default_factory=dict)
    notifications: int = 0
    """Live ones, as tablet servers that answer count them in memory."""
    pages: int = 0
    """Rows of the serving table, in a snapshot."""
    documents_served: int = 0
    """What these rows say of how many documents they stand for."""
    latency: Latency | None = None
    servers: Sequence[Server] = ()
    tablets: Sequence[Tablet] = ()
    lost: frozenset[int] = frozenset()
    """The tablets of the server that was killed."""
    silent: set[str] = field(default_factory=set)
    """What could not be asked at the last attempt; its figures are older ones."""

    def names(self) -> dict[int, str]:
        """Of tablets: their table's, with a number where it has several."""
        of_table: dict[str, list[int]] = {}
        for tablet in self.tablets:
            of_table.setdefault(tablet.table, []).append(tablet.tablet_id)
        return {
            tablet: table if len(tablets) == 1 else f"{table}-{number}"
            for table, tablets in of_table.items()
            for number, tablet in enumerate(tablets, 1)
        }

    @property
    def served_tablets(self) -> int:
        return sum(tablet.serving for tablet in self.tablets)

    def server_of(self, address: str) -> str:
        """Its name; the address of one that is not known."""
        return next((one.name for one in self.servers if one.address == address), address)
