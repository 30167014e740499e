"""``torch.einsum`` of two operands, as the matrix product that it is.

No backend has a kernel for an equation. Each of its letters is one of four kinds: in both operands and in
the result (a batch), in both alone (summed), in one operand and in the result (rows, columns). With one
letter or more of the last three the equation is ``torch.matmul`` of permuted operands; of a constant matrix
and no batch it is a linear layer (``constant_products``). Left as they are: equations with a letter that one
operand alone has, or twice; outer products and products of vectors, which no integer kernel has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backquant.graph.rewrite import GraphRewriter

_EINSUM = (torch.einsum, torch.ops.aten.einsum.default)


def einsum_product(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A ``torch.einsum`` that is a matrix product, as one. With unknown or broadcast sizes it stays.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b))
    >>> a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5)
    >>> wanted = module(a, b)
    >>> GraphRewriter(module, values=GraphValues(module, (a, b))).apply(einsum_product)
    1
    >>> [node.name for node in module.graph.nodes]
    ['a', 'b', 'permute', 'permute_1', 'matmul', 'output']
    >>> torch.allclose(module(a, b), wanted, atol=1e-6)
    True
    """
    product = _product(node, write) if node.target in _EINSUM else None
    return None if product is None else _Writer(node, product, write).write()


@dataclass(frozen=True)
class _Product:
    """``left`` and ``right`` with their letters; ``right`` may be a constant.

    ``batch`` and ``rows``, ``columns`` are in the order of the result, ``summed`` in that of ``left``.
    """

    left: fx.Node
    right: fx.Node
    of_left: str
    of_right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str
    constant: torch.Tensor | None

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer: one constant matrix for all rows."""
        return self.constant is not None and not self.batch


def _product(node: fx.Node, write: GraphRewriter) -> _Product | None:
    read = _operands(node)
    if read is None:
        return None
    equation, left, right = read
    facts, constants = (write.facts(left), write.facts(right)), write.constants
    if facts[0] is None or facts[1] is None:
        return None
    shapes = facts[0].shape, facts[1].shape
    letters = _letters(equation, [len(shape) for shape in shapes])
    if letters is None:
        return None
    of_left, of_right, result = letters
    sizes = [
        dict(zip(of, shape, strict=True))
        for of, shape in ((of_left, shapes[0]), (of_right, shapes[1]))
    ]
    # written as a linear layer, whose weight is the second argument
    if constants.value(left) is not None:
        left, right, of_left, of_right = right, left, of_right, of_left
    product = _Product(
        left=left,
        right=right,
        of_left=of_left,
        of_right=of_right,
        result=result,
        batch="".join(letter for letter in result if letter in of_left and letter in of_right),
        rows="".join(letter for letter in result if letter not in of_right),
        columns="".join(letter for letter in result if letter not in of_left),
        summed="".join(c for c in of_left if c in of_right and c not in result),
        constant=constants.value(right),
    )
    alone = (set(of_left) ^ set(of_right)) - set(result)
    is_product = product.rows and product.columns and product.summed and not alone
    same = all(sizes[0][letter] == sizes[1][letter] for letter in set(of_left) & set(of_right))
    return product if is_product and same and constants.value(left) is None else None


def _operands(node: fx.Node) -> tuple[str, fx.Node, fx.Node] | None:
    """The equation of ``node`` and its operands, if these are two."""
    equation, *rest = node.args
    operands: Any = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    nodes = [value for value in operands if isinstance(value, fx.Node)]
    if not isinstance(equation, str) or node.kwargs or len(operands) != 2 or len(nodes) != 2:
        return None
    return equation, nodes[0], nodes[1]


def _letters(equation: str, ranks: list[int]) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, an ellipsis written out; ``None``: one is twice in an
    operand, or there are not two.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        return None
    named = [len(operand.replace("...", "")) for operand in operands]
    longest = max(rank - count for rank, count in zip(ranks, named, strict=True))
    # Greek letters for the axes of "...": equations use Latin ones
    more = "".join(chr(0x3B1 + i) for i in range(longest))
    written = []
    for operand, rank, count in zip(operands, ranks, named, strict=True):
        hidden = rank - count
        written.append(operand.replace("...", more[len(more) - hidden :] if hidden else ""))
    if not arrow:
        letters = "".join(written)
        once = sorted(letter for letter in letters if letters.count(letter) == 1)
        result = "..." + "".join(letter for letter in once if letter not in more)
    result = result.replace("...", more)
    if any(len(set(letters)) != len(letters) for letters in written):
        return None
    return written[0], written[1], result


class _Writer:
    """Puts the nodes of one product in the place of an equation."""

    def __init__(self, node: fx.Node, product: _Product, write: GraphRewriter) -> None:
        self._node, self._product, self._write = node, product, write

    def write(self) -> fx.Node:
        """The node that computes the result now."""
        p = self._product
        left = self._arranged(p.left, p.of_left, (p.batch, p.rows, p.summed))
        made = self._call(torch.matmul, left, self._right())
        if len(p.columns) > 1 or (len(p.rows) > 1 and not p.is_linear):
            sizes = map(self._size, p.batch + p.rows + p.columns)
            made = self._call("reshape", made, *sizes)
        return self._permuted(made, p.batch + p.rows + p.columns, p.result)

    def _right(self) -> fx.Node:
        """The second operand [batch, summed, columns], computed here where it is constant."""
        p = self._product
        if p.constant is None:
            return self._arranged(p.right, p.of_right, (p.batch, p.summed, p.columns))
        sizes = dict(zip(p.of_right, p.constant.shape, strict=True))
        order = [p.of_right.index(letter) for letter in p.batch + p.summed + p.columns]
        shape = (
            *(sizes[letter] for letter in p.batch),
            *(math.prod(sizes[letter] for letter in group) for group in (p.summed, p.columns)),
        )
        value = p.constant.detach().permute(order).reshape(shape).contiguous()
        return self._write.buffer(self._node, f"{p.right.target}_permuted_", value)

    def _arranged(self, value: fx.Node, letters: str, groups: tuple[str, str, str]) -> fx.Node:
        """``value`` with its axes in this order; each of the last two groups is one axis."""
        batch, first, second = groups
        made = self._permuted(value, letters, "".join(groups))
        if len(second) > 1:
            made = self._call(torch.flatten, made, -len(second), -1)
        # a linear layer takes any number of leading axes
        if len(first) > 1 and not self._product.is_linear:
            last = len(batch) + len(first) - 1
            made = self._call(torch.flatten, made, len(batch), last)
        return made

    def _permuted(self, value: fx.Node, letters: str, wanted: str) -> fx.Node:
        if letters == wanted:
            return value
        order = [letters.index(letter) for letter in wanted]
        return self._call("permute", value, *order)

    def _size(self, letter: str) -> Any:
        p = self._product
        if p.constant is not None and letter in p.of_right:
            return p.constant.shape[p.of_right.index(letter)]
        if letter == (p.batch + p.rows)[0]:
            return -1
        source, letters = (p.left, p.of_left) if letter in p.of_left else (p.right, p.of_right)
        return self._call("size", source, letters.index(letter))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._write.call(self._node, target, *args)
