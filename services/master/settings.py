"""Settings of the master."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from services.chassis.settings import DialAddress, ListenAddress, ServiceSettings
from services.master.balance import BalanceLimits
from services.master.collection import CollectionTimes
from services.master.leader import MasterTimes
from services.master.server_watch import WatchTimes


class MasterSettings(ServiceSettings):
    """What the master can be told."""

    service: ClassVar[str] = "master"

    listen: ListenAddress = "127.0.0.1:7100"
    """host:port to serve on; port 0 is any free one."""

    store: Annotated[str, Field(min_length=1)]
    """The store root: a directory that all servers of the cluster share."""

    server_silence_seconds: Annotated[float, Field(ge=2.0, le=3_600)] = 5.0
    """A server that has not reported for so long is no longer listed."""

    servers_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Servers registered at once."""

    tablets_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """Tablets of all tables together."""

    lease_seconds: Annotated[float, Field(ge=0.5, le=3_600)] = 3.0
    """A tablet server that is silent for so long loses its tablets. One that was killed loses them
    at once, and whatever a silent one still does is not acknowledged."""

    gather_seconds: Annotated[float, Field(ge=0, le=60)] = 1.0
    """After the first server has registered, tablets wait so long for others to be there too."""

    balance_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 5.0
    """Between two rounds of measuring, splitting and moving tablets."""

    quiet_seconds: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """No tablet is moved for balance sooner after a server came or went."""

    split_bytes: Annotated[int, Field(ge=64 << 10, le=1 << 50)] = 1 << 30
    """A tablet that is larger is split, unless its table says otherwise."""

    collection_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 60.0
    """Between two rounds of collecting old versions."""

    retention_seconds: Annotated[float, Field(ge=1, le=100 * 365 * 86_400)] = 3600.0
    """Old versions of tables that do not say otherwise are kept for so long."""

    retention_min_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """No table may keep its old versions for less: above the longest time of a transaction."""

    leader_silence_seconds: Annotated[float, Field(ge=0.5, le=3_600)] = 3.0
    """A leading master that is silent for so long is replaced by a standby."""

    def times(self) -> MasterTimes:
        """As the core takes them."""
        return MasterTimes(
            WatchTimes(lease_seconds=self.lease_seconds),
            BalanceLimits(
                round_seconds=self.balance_seconds,
                quiet_seconds=self.quiet_seconds,
                split_bytes=self.split_bytes,
            ),
            CollectionTimes(
                self.collection_seconds, self.retention_seconds, self.retention_min_seconds
            ),
            self.gather_seconds,
        )

    @property
    def store_root(self) -> Path:
        return Path(self.store)

    @model_validator(mode="after")
    def _keeps_long_enough(self) -> Self:
        if self.retention_seconds < self.retention_min_seconds:
            raise ValueError("retention_seconds has to be at least retention_min_seconds")
        return self

    @field_validator("masters")
    @classmethod
    def _stands_alone(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        # It would wait for another master to tell it the cluster's id, and that one for it.
        if masters:
            raise ValueError("has to be empty for a master, which is what the others look for")
        return masters
