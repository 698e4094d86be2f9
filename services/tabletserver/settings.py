"""Settings of the tablet server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from percolator.bigtable.place import SCHEME
from percolator.schema import ROW_BYTES_MAX
from percolator.services.chassis.settings import FramedSettings, ListenAddress, Seconds
from percolator.tablet.state import TabletLimits


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request, and of all of them together."""

    rows_max: int = 10_000
    queue_bytes_max: int = 64 << 20
    answer_bytes_max: int = 8 << 20
    """The size of one response to a scan of notifications; the caller asks again for the rest."""
    request_seconds_max: float = 60.0
    slow_request_seconds: float = 1.0


_DEFAULTS = TabletLimits()
_GIBIBYTE = 1 << 30
_MEBIBYTE = 1 << 20


class TabletServerSettings(FramedSettings):
    """The settings of the tablet server."""

    service: ClassVar[str] = "tabletserver"

    listen: ListenAddress = "127.0.0.1:7103"
    """host:port to serve on; port 0 is any free one."""

    store: Annotated[str, Field(min_length=1)]
    """The store root: a directory that all tablet servers of the cluster share. Or a bucket."""

    cache: str = ""
    """With a bucket: a directory of this server alone, for copies of its tablets, of which nothing
    is needed. Empty: a temporary one, which is deleted at the end."""

    @field_validator("store")
    @classmethod
    def _is_a_directory(cls, store: str) -> str:
        if store.startswith(SCHEME):
            raise ValueError("a cluster in a row store has no tablet servers; expected a directory")
        return store

    lease_seconds: Annotated[float, Field(ge=0, le=60)] = 0.0
    """With a bucket: how long a tablet is read without asking the bucket whether it has a later
    owner; 0: never. If this server dies, its tablets are not served for so much longer."""

    queue_bytes_max: Annotated[int, Field(ge=_MEBIBYTE, le=16 * _GIBIBYTE)] = 64 * _MEBIBYTE
    """Mutations in progress in the whole process; above it, Overloaded."""

    tablet_queue_bytes_max: Annotated[int, Field(ge=64 << 10, le=_GIBIBYTE)] = (
        _DEFAULTS.queue_bytes_max
    )
    """Mutations of one tablet waiting for their group commit; above it, Overloaded."""

    # Neither may be below what clients allow by default: commits would fail.
    row_bytes_max: Annotated[int, Field(ge=_DEFAULTS.row_bytes_max, le=ROW_BYTES_MAX)] = (
        _DEFAULTS.row_bytes_max
    )
    """The longest row key for new values. Locks in longer rows can still be resolved."""

    column_bytes_max: Annotated[int, Field(ge=_DEFAULTS.column_bytes_max, le=64 << 10)] = (
        _DEFAULTS.column_bytes_max
    )
    """The longest column name."""

    value_bytes_max: Annotated[int, Field(ge=1, le=_GIBIBYTE)] = _DEFAULTS.value_bytes_max
    """The longest stored cell: a value of 4 MiB, and the rest of its record."""

    rows_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Mutations or reads in one request."""

    page_rows_max: Annotated[int, Field(ge=1, le=1_000_000)] = _DEFAULTS.page_rows_max
    """Rows in one page of a scan."""

    page_bytes_max: Annotated[int, Field(ge=1024, le=64 * _MEBIBYTE)] = _DEFAULTS.page_bytes_max
    """Bytes in one page of a scan."""

    request_seconds_max: Seconds = 60.0
    """How long a mutation may wait when its caller set no deadline."""

    watches_max: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """Streams that watch notifications: one for each worker, and up to 2 MiB each if it is slow."""

    slow_request_seconds: Seconds = 1.0
    """Requests that take longer are written to the log."""

    disk_reserve_bytes: Annotated[int, Field(ge=0, le=1 << 60)] = 128 * _MEBIBYTE
    """Below this much free space, writes are refused; reads continue."""

    write_buffers_bytes: Annotated[int, Field(ge=64 << 10, le=64 * _GIBIBYTE)] = 256 * _MEBIBYTE
    """Memory for recent writes, shared by all tablets: between 1 and 8 MiB for each, but not more
    than this. The log that the successor of a killed server replays is at most this long."""

    block_caches_bytes: Annotated[int, Field(ge=_MEBIBYTE, le=1024 * _GIBIBYTE)] = 128 * _MEBIBYTE
    """Memory for blocks read from disk, shared by all tablets: between 1 and 48 MiB for each."""

    write_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Synced writes of different tablets at once."""

    tablets_warn: Annotated[int, Field(ge=1, le=100_000)] = 32
    """More tablets than this are served, with a warning: each costs an fsync per batch."""

    def limits(self) -> TabletLimits:
        """The bounds of one tablet."""
        return TabletLimits(
            row_bytes_max=self.row_bytes_max,
            column_bytes_max=self.column_bytes_max,
            value_bytes_max=self.value_bytes_max,
            queue_bytes_max=self.tablet_queue_bytes_max,
            page_rows_max=self.page_rows_max,
            page_bytes_max=self.page_bytes_max,
        )

    def request_limits(self) -> RequestLimits:
        """The bounds of one request, and of all together."""
        return RequestLimits(
            rows_max=self.rows_max,
            queue_bytes_max=self.queue_bytes_max,
            request_seconds_max=self.request_seconds_max,
            slow_request_seconds=self.slow_request_seconds,
        )
