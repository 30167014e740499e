"""What lies before and behind moves that no entry is for (``chunk``, ``nn.Flatten``).

Such a move is looked through in both directions: it gives integers where all that it moves came as
integers, and its input is read as integers where its result is. Operators turn to float while the plan is
settled, never back; each edge of the graph is then followed once at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx

__all__ = ["MovesBetween"]

_Condition = Callable[[fx.Node], bool]


class MovesBetween:
    """The moves of a graph, with what they give and what reads them.

    Args:
        nodes: of the graph, each after its inputs.
        is_move: whether a node moves values, and no entry is for it.
        is_tensor, gives_integers, reads_integers: of other nodes, as things stand.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        is_move: _Condition,
        is_tensor: _Condition,
        gives_integers: _Condition,
        reads_integers: _Condition,
    ) -> None:
        ordered = list(nodes)
        moves = [node for node in ordered if is_move(node)]
        # for each move, the number of its users that read integers or pass the value on to such a reader
        self._readers = dict.fromkeys(moves, 0)
        self._of_integers = set[fx.Node]()
        of_sizes = set[fx.Node]()
        for move in moves:
            inputs = move.all_input_nodes
            moved = [
                n for n in inputs if (n not in of_sizes if n in self._readers else is_tensor(n))
            ]
            known = (
                n in self._of_integers if n in self._readers else gives_integers(n) for n in moved
            )
            if not moved:
                of_sizes.add(move)
            elif all(known):
                self._of_integers.add(move)
        self._reads = reads_integers
        for move in reversed(moves):
            self._readers[move] = sum(map(self.reads_integers, move.users))

    def gives_integers(self, node: fx.Node) -> bool:
        """Whether ``node`` is a move of values that came as integers."""
        return node in self._of_integers

    def reads_integers(self, node: fx.Node) -> bool:
        """Whether ``node`` reads its input as integers, or is a move that passes it on to what does."""
        readers = self._readers.get(node)
        return self._reads(node) if readers is None else readers > 0

    def give_floats(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """``nodes`` give floats from now on: the moves that give floats because of that."""
        pending = list(nodes)
        while pending:
            moved = [user for user in pending.pop().users if user in self._of_integers]
            self._of_integers.difference_update(moved)
            pending += moved
            yield from moved

    def read_floats(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """``nodes`` read floats from now on: the moves that nothing reads as integers any more."""
        pending = list(nodes)
        while pending:
            for move in pending.pop().all_input_nodes:
                if move in self._readers:
                    self._readers[move] -= 1
                    if not self._readers[move]:
                        pending.append(move)
                        yield move
