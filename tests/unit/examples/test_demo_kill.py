"""The demo kills a leader, and has to know which process that is."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from examples.demo.screen import Screen
from examples.demo.state import LEADS, Server, State
from examples.demo.story import _Story
from examples.demo.strikes import OracleAndWorkerKilled
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess


class Looks:
    """Gauges whose looks find what the test says, one after another."""

    def __init__(self, state: State, found: list[list[Server]]) -> None:
        self.killed: set[str] = set()
        self._state = state
        self._found = found

    async def next_look(self) -> None:
        self._state.servers = self._found.pop(0)


def server(name: str, role: str) -> Server:
    return Server(name, 1, f"{name}:1", True, role)


async def test_the_kill_waits_until_it_is_known_who_leads() -> None:
    state = State()
    processes = {}
    for name in ("oracle", "oracle-2", "worker"):
        processes[name] = Mock(spec=ServiceProcess, pid=1, exit_code=None)
        processes[name].name = name
    cluster = Mock(spec=LocalCluster, processes=processes)
    unanswered = [server("oracle", "stands by"), server("oracle-2", "stands by")]
    led = [server("oracle", LEADS), server("oracle-2", "stands by")]
    taken_over = [server("oracle", "stands by"), server("oracle-2", LEADS)]
    story: Any = object.__new__(_Story)
    story._cluster, story._state, story._screen = cluster, state, Mock(spec=Screen)
    story._strike = OracleAndWorkerKilled(cluster, Mock(), state)
    story.gauges = Looks(state, [unanswered, led, taken_over])
    assert await story._kill() == ["oracle", "worker"]
    for name, process in processes.items():
        assert process.kill.called is (name != "oracle-2")
