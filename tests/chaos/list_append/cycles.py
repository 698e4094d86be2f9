"""Finds a cycle among instants, and names it as the literature does."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from tests.chaos.list_append.dependencies import OWN, RW, WR, WW, Edge, Instant
from tests.chaos.list_append.transactions import Anomaly


class Graph:
    """Edges, by the instant at which they begin."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        self.edges: defaultdict[Instant, list[Edge]] = defaultdict(list)
        for edge in edges:
            self.edges[edge.before].append(edge)

    def knots(self) -> list[set[Instant]]:
        """The strongly connected sets of more than one instant (Tarjan, without recursion)."""
        index: dict[Instant, int] = {}
        low: dict[Instant, int] = {}
        stack: list[Instant] = []
        on_stack: set[Instant] = set()
        found: list[set[Instant]] = []
        for root in list(self.edges):
            if root in index:
                continue
            work = [(root, iter(self.edges.get(root, ())))]
            index[root] = low[root] = len(index)
            stack.append(root)
            on_stack.add(root)
            while work:
                node, following = work[-1]
                for edge in following:
                    after = edge.after
                    if after not in index:
                        index[after] = low[after] = len(index)
                        stack.append(after)
                        on_stack.add(after)
                        work.append((after, iter(self.edges.get(after, ()))))
                        break
                    if after in on_stack:
                        low[node] = min(low[node], index[after])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
                    if low[node] == index[node]:
                        knot: set[Instant] = set()
                        while not knot or node not in knot:
                            knot.add(stack[-1])
                            on_stack.discard(stack.pop())
                        if len(knot) > 1:
                            found.append(knot)
        return found

    def path(self, start: Instant, end: Instant, within: set[Instant]) -> list[Edge] | None:
        """The shortest path inside a set; None if there is none."""
        came: dict[Instant, Edge] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for edge in self.edges.get(node, ()):
                if edge.after in came or edge.after not in within:
                    continue
                came[edge.after] = edge
                if edge.after == end:
                    return _backwards(came, start, end)
                queue.append(edge.after)
        return None


def _backwards(came: dict[Instant, Edge], start: Instant, end: Instant) -> list[Edge]:
    path = [came[end]]
    while path[-1].before != start:
        path.append(came[path[-1].before])
    return path[::-1]


def anomalies(edges: Sequence[Edge], *, suffix: str = "", order: frozenset[str]) -> list[Anomaly]:
    """The simplest cycle of each knot, looking at few kinds of edges first.

    `order` has the kinds of edges that may take part beside those of the values.
    """
    allowed = {OWN, *order}
    no_values: set[str] = set()
    for name, kinds in (("order", no_values), ("G0", {WW}), ("G1c", {WW, WR})):
        graph = Graph(one for one in edges if one.kind in allowed | kinds)
        if cycles := [_any_cycle(graph, knot) for knot in graph.knots()]:
            return [_shown(name + suffix, cycle) for cycle in cycles]
    whole = Graph(edges)
    without_rw = Graph(one for one in edges if one.kind != RW)
    found = []
    for knot in whole.knots():
        single = _single(edges, without_rw, knot)
        name = "G-single" if single is not None else "G-nonadjacent"
        found.append(_shown(name + suffix, single or _any_cycle(whole, knot)))
    return found


def _any_cycle(graph: Graph, knot: set[Instant]) -> list[Edge]:
    start = min(knot, key=lambda one: (one.transaction == "", one.transaction, one.what))
    cycle = graph.path(start, start, knot)
    if cycle is None:
        raise AssertionError("a knot without a cycle")
    return cycle


def _single(edges: Sequence[Edge], without_rw: Graph, knot: set[Instant]) -> list[Edge] | None:
    """A cycle with exactly one rw: read skew, or a lost update."""
    for edge in edges:
        if edge.kind == RW and edge.before in knot and edge.after in knot:
            rest = without_rw.path(edge.after, edge.before, knot)
            if rest is not None:
                return [edge, *rest]
    return None


def _shown(kind: str, cycle: list[Edge]) -> Anomaly:
    steps = [
        f"{one.before.what} {one.before.transaction} < {one.after.what} {one.after.transaction} "
        f"({one.kind}{': ' + one.why if one.why else ''})"
        for one in cycle
    ]
    return Anomaly(kind, "; ".join(steps))
