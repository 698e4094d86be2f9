"""Settings of a gateway."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from services.chassis.settings import DialAddress, ListenAddress, Seconds, ServiceSettings


class GatewaySettings(ServiceSettings):
    """What a gateway can be told."""

    service: ClassVar[str] = "gateway"

    listen: ListenAddress = "127.0.0.1:7110"
    """host:port to serve on; port 0 is any free one."""

    commit_seconds: Seconds = 10.0
    """How long a commit is tried, however long its caller waits."""

    commits_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Commits in progress at once, those included whose callers have gone."""

    transactions_remembered_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Transactions of late that are remembered, about 500 bytes each. One that is forgotten costs
    its commit one round trip more."""

    answer_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 30)] = 16 << 20
    """The largest answer to one Get."""

    @field_validator("masters")
    @classmethod
    def _has_a_cluster(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        if not masters:
            raise ValueError("is missing: a gateway has nothing of its own")
        return masters
