"""Settings that a tablet server refuses to be started with."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from percolator import Limits
from percolator.services.tabletserver.settings import TabletServerSettings


@pytest.mark.parametrize("setting", ["row_bytes_max", "column_bytes_max"])
def test_a_server_takes_all_rows_and_columns_that_clients_send(setting: str) -> None:
    """Otherwise a transaction could lock cells, and have a primary that nobody can ask about."""
    below = getattr(Limits(), setting) - 1
    with pytest.raises(ValidationError, match=f"{setting}\n.*greater than or equal to"):
        TabletServerSettings(store="/store", **{setting: below})
