"""Groups of sites that share one observer: a union-find table over site names.

The representative is that of the first group of a union, so that the group keeps the observer of the
operator's first input.
"""

from __future__ import annotations


class Groups:
    """Disjoint sets of names; near-constant time per operation.

    >>> groups = Groups()
    >>> groups.unite("a", "b"); groups.unite("c", "d"); groups.unite("b", "c")
    >>> groups.find("d"), groups.find("x")
    ('a', 'x')
    """

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        # root of a set -> the name whose observer all members share
        self._head: dict[str, str] = {}
        self._size: dict[str, int] = {}

    def _root(self, name: str) -> str:
        root = name
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(name, name) != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def find(self, name: str) -> str:
        """The name whose observer ``name`` uses (itself when it shares with none)."""
        root = self._root(name)
        return self._head.get(root, root)

    def unite(self, first: str, second: str) -> None:
        """Join the groups of both; the joint group uses the observer of ``first``'s."""
        one, two = self._root(first), self._root(second)
        if one == two:
            return
        head = self._head.get(one, one)
        if self._size.get(one, 1) < self._size.get(two, 1):
            one, two = two, one
        self._parent[two] = one
        self._size[one] = self._size.get(one, 1) + self._size.get(two, 1)
        self._head[one] = head
