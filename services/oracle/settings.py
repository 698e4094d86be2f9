"""Settings of the oracle."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from percolator.wire.timestamp_source import ATTEMPT_SECONDS_MAX
from services.chassis.settings import ListenAddress, ServiceSettings
from services.oracle.oracle import OracleLimits

_DEFAULTS = OracleLimits()


class OracleSettings(ServiceSettings):
    """What the oracle can be told."""

    service: ClassVar[str] = "oracle"

    listen: ListenAddress = "127.0.0.1:7101"
    """host:port to serve on; port 0 is any free one."""

    store: Annotated[str, Field(min_length=1)]
    """The store root: the mark is kept in its coordinator, which one oracle leads at a time."""

    window_seconds: Annotated[float, Field(ge=0.5, lt=3.0)] = _DEFAULTS.window_seconds
    """How far ahead the mark is set. After a crash time jumps that far at most, so it has to stay
    below the time to live of locks, 3 s. A shorter one costs more fsyncs: two per 0.7 windows."""

    count_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.count_max
    """Timestamps in one request."""

    wait_seconds_max: Annotated[float, Field(gt=0, lt=ATTEMPT_SECONDS_MAX)] = (
        _DEFAULTS.wait_seconds_max
    )
    """How long a request waits for the disk, when that is slow in extending the mark. The caller
    waits 2 s, and is to be told the reason before."""

    clock_jump_seconds_max: Annotated[float, Field(ge=1, le=86_400)] = _DEFAULTS.jump_seconds_max
    """A wall clock that jumps further forward than this is not followed: time goes on steadily."""

    follow_clock_jumps: bool = _DEFAULTS.follow_jumps
    """Follow the wall clock however far it jumps forward. There is no way back."""

    standby: bool = False
    """Wait while another oracle leads on this store, instead of refusing to start, and take its
    place when it is gone or silent."""

    leader_silence_seconds: Annotated[float, Field(ge=0.5, le=3_600)] = 3.0
    """A leading oracle that is silent for so long is replaced by a standby."""

    def limits(self) -> OracleLimits:
        """The bounds as the core takes them."""
        return OracleLimits(
            window_seconds=self.window_seconds,
            count_max=self.count_max,
            wait_seconds_max=self.wait_seconds_max,
            jump_seconds_max=self.clock_jump_seconds_max,
            follow_jumps=self.follow_clock_jumps,
        )
