"""The oracle's flags and environment variables, checked."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from percolator.services.chassis.coordinator.times import GRACE_SECONDS_MIN
from percolator.services.chassis.settings.loading import FramedSettings, ListenAddress
from percolator.services.oracle.oracle import OracleLimits
from percolator.services.oracle.physical_time import LEADING_SPEED
from percolator.wire.timestamp_source import ATTEMPT_SECONDS_MAX

_DEFAULTS = OracleLimits()


class OracleSettings(FramedSettings):
    """The settings of the oracle."""

    service: ClassVar[str] = "oracle"

    listen: ListenAddress = "127.0.0.1:7101"
    """host:port to serve on; port 0 is any free one."""

    request_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 20)] = 1 << 20
    """The size of the largest request that is accepted."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 64 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    store: Annotated[str, Field(min_length=1)]
    """The store root, or bigtable://PROJECT/INSTANCE?profile=NAME: the mark is kept there, and one
    oracle at a time leads."""

    window_seconds: Annotated[float, Field(ge=0.5, lt=3.0)] = _DEFAULTS.window_seconds
    """How far ahead the mark is set. After a crash time jumps by at most this, so it has to be
    below the time to live of locks, 3 s. A shorter one costs more fsyncs: two per 0.7 windows."""

    count_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.count_max
    """Timestamps in one request."""

    wait_seconds_max: Annotated[float, Field(gt=0, lt=ATTEMPT_SECONDS_MAX)] = (
        _DEFAULTS.wait_seconds_max
    )
    """How long a request waits for a disk that is slow to extend the mark. The caller waits 2 s, so
    a shorter wait lets it learn the reason."""

    clock_jump_seconds_max: Annotated[float, Field(ge=1, le=86_400)] = _DEFAULTS.jump_seconds_max
    """A wall clock that jumps further forward than this is not followed: time advances steadily."""

    follow_clock_jumps: bool = _DEFAULTS.follow_jumps
    """Follow the wall clock however far it jumps forward. This cannot be undone."""

    leading_speed: Annotated[float, Field(ge=0.1, le=LEADING_SPEED)] = _DEFAULTS.leading_speed
    """How fast timestamps advance while the wall clock is behind them, relative to real time. With
    0.5 a lead of two hours is gone in four; meanwhile locks live twice as long as they say."""

    standby: bool = False
    """Wait while another oracle leads on this store, instead of refusing to start, and replace it
    when it is gone or silent."""

    leader_silence_seconds: Annotated[float, Field(ge=GRACE_SECONDS_MIN, le=3_600)] = 3.0
    """A leading oracle that is silent for this long is replaced by a standby."""

    def limits(self) -> OracleLimits:
        """The bounds as the core takes them."""
        return OracleLimits(
            window_seconds=self.window_seconds,
            count_max=self.count_max,
            wait_seconds_max=self.wait_seconds_max,
            jump_seconds_max=self.clock_jump_seconds_max,
            leading_speed=self.leading_speed,
            follow_jumps=self.follow_clock_jumps,
        )
