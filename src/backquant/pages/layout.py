"""A layered drawing of the operator graph: layers by longest path, order by barycentres, then x by pull.

After Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System Structures",
1981. Edges that skip layers are led around the boxes by bend points; those longer than ``MAX_BENDS``
layers get one at each end only, so that the work stays linear in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

BOX_WIDTH, BOX_HEIGHT = 168.0, 40.0
GAP_X, GAP_Y = 22.0, 30.0
BEND_WIDTH = 14.0
MAX_BENDS = 24
SWEEPS = 6


@dataclass(frozen=True)
class Edge:
    """From ``source`` to ``target`` through ``points`` (x, y pairs, from box to box)."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Drawing:
    """Box centres by node, edges, and the size of the canvas."""

    centres: dict[str, tuple[float, float]]
    edges: tuple[Edge, ...]
    width: float
    height: float


class _Layers:
    """Vertices (boxes and bends) by layer, with their neighbours above and below."""

    def __init__(self, nodes: Sequence[str], inputs: Mapping[str, Sequence[str]]) -> None:
        self.level: dict[str, int] = {}
        for name in nodes:
            above = [self.level[source] for source in inputs.get(name, ()) if source in self.level]
            self.level[name] = max(above, default=-1) + 1
        depth = max(self.level.values(), default=-1) + 1
        self.rows: list[list[str]] = [[] for _ in range(depth)]
        self.up: dict[str, list[str]] = {}
        self.down: dict[str, list[str]] = {}
        self.is_bend: set[str] = set()
        self.paths: list[tuple[str, ...]] = []
        for name in nodes:
            self._add(name, self.level[name])
        for name in nodes:
            for source in dict.fromkeys(inputs.get(name, ())):
                if source in self.level:
                    self._connect(source, name)

    def _add(self, vertex: str, level: int) -> None:
        self.rows[level].append(vertex)
        self.up[vertex], self.down[vertex] = [], []

    def _connect(self, source: str, target: str) -> None:
        first, last = self.level[source] + 1, self.level[target]
        levels = list(range(first, last))
        if len(levels) > MAX_BENDS:
            levels = [first, last - 1]
        path = [source]
        for level in levels:
            bend = f"{source}→{target}@{level}"
            self.is_bend.add(bend)
            self._add(bend, level)
            path.append(bend)
        path.append(target)
        for a, b in pairwise(path):
            self.down[a].append(b)
            self.up[b].append(a)
        self.paths.append(tuple(path))

    def width(self, vertex: str) -> float:
        return BEND_WIDTH if vertex in self.is_bend else BOX_WIDTH


def _order(layers: _Layers) -> None:
    """Sort each row by the mean place of its neighbours, sweeping down and up."""
    place = {v: float(i) for row in layers.rows for i, v in enumerate(row)}
    for sweep in range(SWEEPS):
        downward = sweep % 2 == 0
        neighbours = layers.up if downward else layers.down
        for row in layers.rows if downward else reversed(layers.rows):
            key = {}
            for vertex in row:
                near = neighbours[vertex]
                key[vertex] = sum(place[n] for n in near) / len(near) if near else place[vertex]
            row.sort(key=lambda vertex: key[vertex])
            for index, vertex in enumerate(row):
                place[vertex] = float(index)


def _spread(layers: _Layers) -> dict[str, float]:
    """x of every vertex: pulled to its neighbours' mean, kept apart from the row's other vertices."""
    x: dict[str, float] = {}
    for row in layers.rows:
        cursor = -sum(layers.width(v) + GAP_X for v in row) / 2
        for vertex in row:
            x[vertex] = cursor + layers.width(vertex) / 2
            cursor += layers.width(vertex) + GAP_X
    for sweep in range(SWEEPS):
        for row in layers.rows if sweep % 2 == 0 else reversed(layers.rows):
            wanted = {}
            for vertex in row:
                near = layers.up[vertex] + layers.down[vertex]
                wanted[vertex] = sum(x[n] for n in near) / len(near) if near else x[vertex]
            _place_row(row, wanted, layers, x)
    return x


def _place_row(
    row: list[str], wanted: dict[str, float], layers: _Layers, x: dict[str, float]
) -> None:
    edge = float("-inf")
    shift = 0.0
    for vertex in row:
        half = layers.width(vertex) / 2
        x[vertex] = max(wanted[vertex], edge + half)
        shift += wanted[vertex] - x[vertex]
        edge = x[vertex] + half + GAP_X
    for vertex in row:
        x[vertex] += shift / len(row)


def lay_out(nodes: Sequence[str], inputs: Mapping[str, Sequence[str]]) -> Drawing:
    """Place ``nodes`` (in topological order) top to bottom; ``inputs`` names what each one reads.

    >>> drawing = lay_out(["a", "b", "c"], {"b": ["a"], "c": ["b", "a"]})
    >>> [drawing.centres[n][1] for n in "abc"]
    [20.0, 90.0, 160.0]
    >>> len(drawing.edges)
    3
    """
    layers = _Layers(nodes, inputs)
    _order(layers)
    x = _spread(layers)
    left = min((x[v] - layers.width(v) / 2 for v in x), default=0.0)
    y = {
        v: i * (BOX_HEIGHT + GAP_Y) + BOX_HEIGHT / 2
        for i, row in enumerate(layers.rows)
        for v in row
    }
    edges = []
    for path in layers.paths:
        points = [(x[path[0]] - left, y[path[0]] + BOX_HEIGHT / 2)]
        points += [(x[bend] - left, y[bend]) for bend in path[1:-1]]
        points.append((x[path[-1]] - left, y[path[-1]] - BOX_HEIGHT / 2))
        edges.append(Edge(path[0], path[-1], tuple((round(a, 1), round(b, 1)) for a, b in points)))
    return Drawing(
        centres={name: (round(x[name] - left, 1), y[name]) for name in nodes},
        edges=tuple(edges),
        width=max((x[v] + layers.width(v) / 2 for v in x), default=0.0) - left,
        height=len(layers.rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y,
    )
