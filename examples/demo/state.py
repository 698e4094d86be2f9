"""The cluster as the demo shows it, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

LEADS = "leads"
"""The role of the oracle that gives out timestamps."""


@dataclass(frozen=True)
class Runs:
    """The runs of one observer in all workers, from the workers' own metrics."""

    committed: int = 0
    repeated: int = 0
    """Lost against another transaction, or not answered in time; they are retried."""
    failed: int = 0
    """Raised an error; also retried, and eventually dead letters."""


@dataclass(frozen=True)
class Latency:
    """The time from before a document was written to the commit that served its changes.

    Both are in the serving table: `cause` is the first timestamp, and the version of the cell has
    the second.
    """

    versions: int
    """How many versions of rows of the serving table were seen."""
    median: float
    slow: float
    """The 95th percentile."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        if len(seconds) < 2:
            return None
        return cls(len(seconds), median(seconds), quantiles(seconds, n=20)[-1])


@dataclass(frozen=True)
class Server:
    """A process that may be killed, as the launcher knows it."""

    name: str
    pid: int
    address: str
    alive: bool = True
    role: str = ""
    """Its work, if it is no tablet server."""


@dataclass(frozen=True)
class Tablet:
    """A tablet as the master knows it."""

    tablet_id: int
    table: str
    address: str
    """The address of its server."""
    serving: bool
    """Its server has reported to the master that it serves the tablet."""


@dataclass
class State:
    """Each figure is that of the last answer; nothing is guessed in between."""

    chapter: str = ""
    to_write: int = 0
    written: int = 0
    """Changes whose commits the loader saw acknowledged."""
    observers: Mapping[str, Runs] = field(default_factory=dict)
    notifications: int = 0
    """Live notifications, counted in memory by the tablet servers that answer. Nobody counts those
    in a row store."""
    pages: int = 0
    """Rows of the serving table, in a snapshot."""
    documents_served: int = 0
    """The sum of the documents that these rows stand for."""
    latency: Latency | None = None
    servers: Sequence[Server] = ()
    tablets: Sequence[Tablet] = ()
    lost: frozenset[int] = frozenset()
    """The tablets of the killed server."""
    silent: set[str] = field(default_factory=set)
    """Sources that did not answer at the last attempt, whose figures are older."""

    def names(self) -> dict[int, str]:
        """Names of tablets: that of their table, with a number if it has several."""
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
        """The name of the server at this address, or the address if it is unknown."""
        return next((one.name for one in self.servers if one.address == address), address)
