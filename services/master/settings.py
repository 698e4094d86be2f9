"""The master's flags and environment variables, checked."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from percolator.services.chassis.coordinator.times import GRACE_SECONDS_MIN
from percolator.services.chassis.settings.loading import (
    DialAddress,
    ListenAddress,
    StoreSettings,
)
from percolator.services.master.history.collection import CollectionTimes
from percolator.services.master.leader import MasterTimes
from percolator.services.master.tablets.balance import BalanceLimits
from percolator.services.master.tablets.server_watch import WatchTimes


class MasterSettings(StoreSettings):
    """The settings of the master."""

    service: ClassVar[str] = "master"

    listen: ListenAddress = "127.0.0.1:7100"
    """host:port to serve on; port 0 is any free one."""

    store: Annotated[str, Field(min_length=1)]
    """The store root, a directory that all servers of the cluster share. Or a row store, which
    then keeps everything, including all cells: bigtable://PROJECT/INSTANCE?profile=NAME."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 64 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    server_silence_seconds: Annotated[float, Field(ge=2.0, le=3_600)] = 5.0
    """A server that has not reported for this long is no longer listed."""

    servers_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Servers registered at once."""

    tablets_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """Tablets in all tables together."""

    lease_seconds: Annotated[float, Field(ge=0.5, le=3_600)] = 3.0
    """A tablet server that is silent for this long loses its tablets. A killed one loses them at
    once. Nothing that a server does after it has lost a tablet is acknowledged."""

    gather_seconds: Annotated[float, Field(ge=0, le=60)] = 1.0
    """How long tablets wait for more servers after the first one has registered."""

    balance_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 5.0
    """The pause between rounds of measuring, splitting and moving tablets."""

    quiet_seconds: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """After a server came or went, no tablet is moved for balance for this long."""

    split_bytes: Annotated[int, Field(ge=64 << 10, le=1 << 50)] = 1 << 30
    """A larger tablet is split, unless its table has its own value."""

    collection_seconds: Annotated[float, Field(ge=0.1, le=86_400)] = 60.0
    """The pause between rounds of collecting old versions."""

    retention_seconds: Annotated[float, Field(ge=1, le=100 * 365 * 86_400)] = 3600.0
    """How long old versions are kept in tables without a value of their own."""

    retention_min_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """No table may keep old versions for less. Set it longer than any transaction takes."""

    client_held_seconds_max: Annotated[float, Field(ge=1, le=100 * 365 * 86_400)] = 3 * 86_400.0
    """How much older than the longest retention of a table the history is that a session or pin of
    a client, or a session of a server, may hold back. An older pin ends, and an older transaction
    or snapshot fails."""

    admin_held_seconds_max: Annotated[float, Field(ge=0, le=100 * 365 * 86_400)] = 0.0
    """The same for sessions and pins of administrators; 0 means without limit. Without tokens, all
    programs are administrators."""

    leader_silence_seconds: Annotated[float, Field(ge=GRACE_SECONDS_MIN, le=3_600)] = 3.0
    """A leading master that is silent for this long is replaced by a standby."""

    def times(self) -> MasterTimes:
        """The times as the leader takes them."""
        return MasterTimes(
            WatchTimes(lease_seconds=self.lease_seconds),
            BalanceLimits(
                round_seconds=self.balance_seconds,
                quiet_seconds=self.quiet_seconds,
                split_bytes=self.split_bytes,
            ),
            CollectionTimes(
                self.collection_seconds,
                self.retention_seconds,
                self.retention_min_seconds,
                self.client_held_seconds_max,
                self.admin_held_seconds_max,
            ),
            self.gather_seconds,
        )

    @model_validator(mode="after")
    def _keeps_long_enough(self) -> Self:
        if self.retention_seconds < self.retention_min_seconds:
            raise ValueError(
                f"retention_seconds: {self.retention_seconds:g} is below retention_min_seconds, "
                f"{self.retention_min_seconds:g}"
            )
        return self

    @field_validator("masters")
    @classmethod
    def _stands_alone(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        # It would ask another master for the cluster's id, while that one asks this one.
        if masters:
            raise ValueError("must be empty for a master; masters find each other in the store")
        return masters
