"""A connection to an instance of Bigtable: its network, and the row store over it."""

from __future__ import annotations

from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.google_account import GoogleAccount
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tokens import Tokens


class Connection:
    """One process's connection, which belongs to one event loop.

    Nothing is called, and no credentials are looked for, before the first call of the store or of
    the network.
    """

    def __init__(self, place: Place) -> None:
        """Raises `UsageError` if credentials are needed, and `google-auth` is missing."""
        self.place = place
        tokens = None if place.is_emulated else Tokens(GoogleAccount().token)
        self.network = BigtableNetwork(tokens)
        self.store = BigtableStore(self.network, place)

    async def close(self) -> None:
        await self.network.close()
