"""The mark of all tests that start processes, and what they use to talk to these."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from percolator.services.local.authority import make_all
from percolator.wire.channels import GrpcNetwork
from tests.integration.networks import grpc_network


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the certificates and tokens of a cluster and its clients."""
    directory = tmp_path_factory.mktemp("certificates")
    make_all(directory)
    return directory


@pytest.fixture
def network() -> AbstractAsyncContextManager[GrpcNetwork]:
    """A network without credentials."""
    return grpc_network()
