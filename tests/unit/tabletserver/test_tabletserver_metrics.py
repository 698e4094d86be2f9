"""The metrics of tablets, refusals and the disk."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from percolator.errors import StoreUnusable
from percolator.services.tabletserver.metrics import TabletServerMetrics
from percolator.tablet.cells import NOTIFY, encode
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tabletserver.memory_store import Machine, disk_full, put


def notification(row: bytes, observer: bytes) -> bytes:
    return encode(NOTIFY, row, b"c", 5, observer)[1:]


async def test_the_figures_follow_what_happened() -> None:
    machine = Machine()
    registry = CollectorRegistry()
    registry.register(
        TabletServerMetrics(
            machine.tablets, machine.collecting, machine.disk, machine.handler.counts
        )
    )

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"percolator_tabletserver_{name}", labels)

    assert figure("store_trouble") == 0
    machine.store_trouble = "the store hangs"
    assert figure("store_trouble") == 1
    await machine.open(1)
    request = pb.WatchNotificationsRequest(watched=[{"table_id": 3, "observers": [b"f"]}])
    stream = machine.handler.watch_notifications(request)
    await anext(stream)
    machine.tablets.watch.tell(3, [notification(b"a", b"f"), notification(b"a", b"g")])
    await machine.mutate(put(1, b"a", b"b"), put(9, b"a"))
    machine.store.disks[1].failures = 1
    await machine.mutate(put(1, b"c"))
    await machine.clock.sleep(1)
    await machine.mutate(put(1, b"d"))
    machine.store.open_fails = disk_full()
    with pytest.raises(StoreUnusable):
        await machine.open(2)
    machine.free_bytes = 10
    await machine.disk.check()
    assert figure("tablets") == 2
    assert figure("tablets_failed") == 1
    assert figure("tablets_reopened_total") == 1
    assert figure("tablet_mutations_applied_total", table="3", tablet="1") == 1
    assert figure("batches_refused_total", error="TabletMoved") == 1
    assert figure("notification_streams") == 1
    assert figure("notifications_told_total") == 1
    assert figure("notifications_left_out_total") == 0
    assert figure("disk_full") == 1
    assert figure("disk_free_bytes") == 10
