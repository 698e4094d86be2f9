"""Settings of the master."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from services.chassis.settings import DialAddress, ListenAddress, ServiceSettings


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

    @property
    def store_root(self) -> Path:
        return Path(self.store)

    @field_validator("masters")
    @classmethod
    def _stands_alone(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        # It would wait for another master to tell it the cluster's id, and that one for it.
        if masters:
            raise ValueError("has to be empty for a master, which is what the others look for")
        return masters
