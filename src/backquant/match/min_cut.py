"""The cheapest way to cut a network in two.

Source: Dinic 1970, "Algorithm for solution of a problem of maximum flow in networks with power estimation";
the smallest source side of a minimum cut is what the source still reaches once the flow is greatest.
"""

from __future__ import annotations

from collections import deque

_ROUNDING = 1e-9


class Network:
    """Nodes 0 (source), 1 (sink) and those that ``add_node`` gives; edges with capacities.

    >>> network = Network()
    >>> node = network.add_node()
    >>> network.add_edge(0, node, 2.0), network.add_edge(node, 1, 3.0)
    (None, None)
    >>> node in network.source_side(), 1 in network.source_side()
    (False, False)
    """

    def __init__(self) -> None:
        # for each node, the indices of its edges in the two lists below
        self._edges: list[list[int]] = [[], []]
        self._to: list[int] = []
        self._left: list[float] = []  # remaining capacity; each edge is followed by its reverse

    def add_node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, start: int, end: int, capacity: float) -> None:
        """``capacity``: what it costs to cut the edge; ``math.inf``: it is never cut."""
        for here, there, left in ((start, end, capacity), (end, start, 0.0)):
            self._edges[here].append(len(self._to))
            self._to.append(there)
            self._left.append(left)

    def source_side(self) -> frozenset[int]:
        """The nodes on the source's side of the cheapest cut; of several such cuts, the fewest nodes."""
        levels = self._levels()
        while levels[1] >= 0:
            tried = [0] * len(self._edges)
            while self._push(levels, tried):
                pass
            levels = self._levels()
        return frozenset(node for node, level in enumerate(levels) if level >= 0)

    def _levels(self) -> list[int]:
        """How far each node is from the source over edges with capacity left; -1: not to be reached."""
        levels = [-1] * len(self._edges)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                there = self._to[edge]
                if levels[there] < 0 and self._left[edge] > _ROUNDING:
                    levels[there] = levels[node] + 1
                    waiting.append(there)
        return levels

    def _push(self, levels: list[int], tried: list[int]) -> bool:
        """Send flow along one way from source to sink that goes up the levels; False: there is none.

        ``tried``: of each node, how many of its edges lead nowhere any more.
        """
        path: list[int] = []
        node = 0
        while node != 1:
            edge = self._onward(node, levels, tried)
            if edge is not None:
                path.append(edge)
                node = self._to[edge]
            elif path:
                node = self._to[path.pop() ^ 1]
                tried[node] += 1
            else:
                return False
        flow = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= flow
            self._left[edge ^ 1] += flow
        return True

    def _onward(self, node: int, levels: list[int], tried: list[int]) -> int | None:
        edges = self._edges[node]
        while tried[node] < len(edges):
            edge = edges[tried[node]]
            if self._left[edge] > _ROUNDING and levels[self._to[edge]] == levels[node] + 1:
                return edge
            tried[node] += 1
        return None
