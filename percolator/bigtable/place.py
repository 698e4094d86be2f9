"""Where in Bigtable a cluster's tables are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """An instance, and how it is reached."""

    address: str
    """`host:port`."""
    project: str
    instance: str
    app_profile: str = ""
    """Must route to a single cluster; empty for the instance's default."""
    scans_backwards: bool = True
    """False for emulators of older releases, which ignore the direction of a scan."""

    @property
    def parent(self) -> str:
        """The full name of the instance."""
        return f"projects/{self.project}/instances/{self.instance}"

    def table_name(self, table_id: int) -> str:
        """The name, within the instance, of a table of the cluster."""
        return f"percolator-{table_id}"

    def table(self, table_id: int) -> str:
        """The same with the instance."""
        return f"{self.parent}/tables/{self.table_name(table_id)}"
