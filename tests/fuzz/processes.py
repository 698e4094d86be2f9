"""The processes of the cluster from outside: alive, small, quiet in their logs, done at the end."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import urllib.request
from collections.abc import Mapping

import psutil

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from tests.fuzz.findings import Record

GROWTH_BYTES_MAX = 384 << 20
"""By how much the memory of a process may grow above what it had at the start."""
_DONE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_IN_FLIGHT = re.compile(r"^percolator_rpc_in_flight\{(.*)\} ([0-9.]+)$", re.MULTILINE)
_SHOWN_MAX = 400

EXPECTED_ERRORS: dict[str, str] = {}
"""Events that a process may log as errors while it is fuzzed, with the reason."""


class Processes:
    """Looks at all processes of a cluster."""

    def __init__(self, cluster: LocalCluster, context: ssl.SSLContext, record: Record) -> None:
        self._cluster = cluster
        self._context = context
        self._record = record
        self._at_first = self._memory()
        self.most = dict(self._at_first)

    @property
    def _all(self) -> Mapping[str, ServiceProcess]:
        return self._cluster.processes

    def _memory(self) -> dict[str, int]:
        return {
            name: psutil.Process(process.pid).memory_info().rss
            for name, process in self._all.items()
            if process.exit_code is None
        }

    async def watch(self) -> None:
        """Looks at memory and life until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        for name, process in self._all.items():
            if process.exit_code is not None:
                self._record.broke(
                    f"{name} exited with {process.exit_code}: {process.last_words()[-_SHOWN_MAX:]}"
                )
        for name, rss in self._memory().items():
            self.most[name] = max(self.most[name], rss)
            if rss > self._at_first[name] + GROWTH_BYTES_MAX:
                self._record.wrong(f"{name} grew above {GROWTH_BYTES_MAX >> 20} MiB more memory")

    def growth(self) -> dict[str, tuple[int, int]]:
        """The memory at the start and the most there was, in MiB."""
        return {name: (self._at_first[name] >> 20, most >> 20) for name, most in self.most.items()}

    # ------------------------------------------------------------------------------- at the end

    async def require_done(self, usual: Mapping[str, int]) -> None:
        """Every call ends after its caller has gone: none is left that was not there before."""
        deadline = asyncio.get_running_loop().time() + _DONE_SECONDS
        while True:
            found = await self.in_flight()
            left = {
                one: calls
                for one, calls in found.items()
                if calls > max(usual.get(one, 0), _of_worker(one))
            }
            if not left:
                return
            if asyncio.get_running_loop().time() > deadline:
                self._record.wrong(f"calls that never end: {left}")
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def in_flight(self) -> dict[str, int]:
        """The calls in progress, by process and method."""
        return await asyncio.to_thread(self._in_flight)

    def _in_flight(self) -> dict[str, int]:
        found = {}
        for name, process in self._all.items():
            if process.ready is None or process.exit_code is not None:
                continue
            url = f"https://{process.ready.metrics_address}/metrics"
            with urllib.request.urlopen(url, timeout=10, context=self._context) as answer:
                text = answer.read().decode()
            for labels, calls in _IN_FLIGHT.findall(text):
                found[f"{name} {labels}"] = int(float(calls))
        return found

    def judge_logs(self) -> None:
        """No line of any log shows an exception, or an error that is not expected."""
        for name, text in self._cluster.logs().items():
            for line in text.splitlines():
                problem = _problem(line)
                if problem:
                    self._record.wrong(f"{name}: {problem}")


def _of_worker(calls: str) -> int:
    """The calls of the worker, which watches a server from the moment it has a tablet on."""
    return int('method="WatchNotifications"' in calls)


def _problem(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line[:_SHOWN_MAX] if "Traceback" in line or "Error" in line else ""
    event = str(entry.get("event", ""))
    if event in EXPECTED_ERRORS:
        return ""
    if entry.get("level") in ("error", "critical") or "exception" in entry:
        trace = str(entry.get("exception", entry.get("error", "")))
        return f"{event}: {entry.get('rpc', '')} {trace[-_SHOWN_MAX:]}"
    return ""
