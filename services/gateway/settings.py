"""The gateway's flags and environment variables, checked."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from percolator.services.chassis.settings.loading import (
    DialAddress,
    ListenAddress,
    Seconds,
    ServiceSettings,
)


class GatewaySettings(ServiceSettings):
    """The settings of a gateway."""

    service: ClassVar[str] = "gateway"

    listen: ListenAddress = "127.0.0.1:7110"
    """host:port to serve on; port 0 is any free one."""

    commit_seconds: Seconds = 10.0
    """How long a commit is tried, however long its caller waits for it."""

    commits_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Commits in progress at once, including those whose callers have gone."""

    transactions_remembered_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """How many recent transactions are remembered, about 500 bytes each. The commit of one that was
    forgotten costs one more round trip."""

    answer_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 30)] = 16 << 20
    """The largest answer to one Get."""

    @field_validator("masters")
    @classmethod
    def _has_a_cluster(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        if not masters:
            raise ValueError("is missing: a gateway needs the address of at least one master")
        return masters
