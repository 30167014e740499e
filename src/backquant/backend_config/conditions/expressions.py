"""Arithmetic over quantities, as data: ``kernel_height * kernel_width``, ``product(kernel_size)``.

An expression is written as in Python, of quantities (``groups``, ``input.height``), numbers, ``+ - * /``,
items (``dims[-1]``, ``dims[1:]``) and a few functions. Nothing is evaluated here: see ``values``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from backquant.errors import SpecError, did_you_mean

#: Functions of one argument: those that make one number of several, and those of each number.
FUNCTIONS = ("product", "sum", "max", "min", "count", "abs", "ceil", "floor")
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_LONGEST = 400
_EXAMPLE = "kernel_height * kernel_width, product(kernel_size), output.height / input.height"


@dataclass(frozen=True)
class Quantity:
    """Something that is known of an operator, or of one of its tensors (``subject``)."""

    name: str
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.subject}.{self.name}" if self.subject else self.name


@dataclass(frozen=True)
class Number:
    """A number."""

    value: int | float

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Item:
    """One value of several, or (``whole``) those from ``start`` to ``stop``."""

    of: Expression
    start: int | None
    stop: int | None = None
    whole: bool = False

    def __str__(self) -> str:
        if not self.whole:
            return f"{self.of}[{self.start}]"
        ends = ("" if end is None else str(end) for end in (self.start, self.stop))
        return f"{self.of}[{':'.join(ends)}]"


@dataclass(frozen=True)
class Apply:
    """A sign between two expressions, or a function of one."""

    function: str
    arguments: tuple[Expression, ...]

    def __str__(self) -> str:
        if self.function not in _STRENGTH:
            return f"{self.function}({self.arguments[0]})"
        left, right = self.arguments
        own = _STRENGTH[self.function]
        first = f"({left})" if _strength(left) < own else str(left)
        second = f"({right})" if _strength(right) <= own else str(right)
        return f"{first} {self.function} {second}"


Expression: TypeAlias = Quantity | Number | Item | Apply


def _strength(expression: Expression) -> int:
    return _STRENGTH.get(expression.function, 9) if isinstance(expression, Apply) else 9


def parse_expression(text: str) -> Expression:
    """The expression that ``text`` writes. Raises ``SpecError`` for anything else.

    >>> str(parse_expression("(stride-1)*2 + product( kernel_size )"))
    '(stride - 1) * 2 + product(kernel_size)'
    >>> parse_expression("input.dims[-1]")
    Item(of=Quantity(name='dims', subject='input'), start=-1, stop=None, whole=False)
    """
    if len(text) > _LONGEST:
        raise SpecError(f"an expression of more than {_LONGEST} characters", where=text[:40] + "…")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{text!r} is no expression", where=text, fix=_EXAMPLE) from error
    return _expression(tree, text)


def _expression(node: ast.expr, text: str) -> Expression:
    if isinstance(node, ast.Name):
        return Quantity(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return Quantity(node.attr, node.value.id)
    number = _number(node)
    if number is not None:
        return Number(number)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        sides = (_expression(node.left, text), _expression(node.right, text))
        return Apply(_SIGNS[type(node.op)], sides)
    if isinstance(node, ast.Subscript):
        return _item(node, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, text)
    raise SpecError(f"{text!r} is no expression of quantities", where=text, fix=_EXAMPLE)


def _call(node: ast.Call, name: str, text: str) -> Expression:
    if name not in FUNCTIONS:
        fix = did_you_mean(name, FUNCTIONS, f"functions: {', '.join(FUNCTIONS)}")
        raise SpecError(f"there is no function {name!r}", where=text, fix=fix)
    if len(node.args) != 1 or node.keywords:
        raise SpecError(f"{name} takes one argument", where=text, fix=f"{name}(kernel_size)")
    return Apply(name, (_expression(node.args[0], text),))


def _item(node: ast.Subscript, text: str) -> Item:
    of = _expression(node.value, text)
    place = node.slice
    if not isinstance(place, ast.Slice):
        return Item(of, _whole(place, text))
    if place.step is not None:
        raise SpecError("a step between items is not supported", where=text, fix="dims[1:]")
    ends = [None if end is None else _whole(end, text) for end in (place.lower, place.upper)]
    return Item(of, ends[0], ends[1], whole=True)


def _whole(node: ast.expr, text: str) -> int:
    number = _number(node)
    if not isinstance(number, int):
        raise SpecError("an item is named by a whole number", where=text, fix="dims[-1]")
    return number


def _number(node: ast.expr) -> int | float | None:
    """The number of a constant, of a negative one, or of a power such as ``2**16``."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _number(node.left), _number(node.right)
        if base == 2 and isinstance(power, int) and abs(power) <= 1000:
            return 2**power if power >= 0 else 2.0**power
    return None


def quantities_in(expression: Expression) -> Iterator[Quantity]:
    """Every quantity of an expression, in order.

    >>> [str(found) for found in quantities_in(parse_expression("2 * groups - input.height"))]
    ['groups', 'input.height']
    """
    if isinstance(expression, Quantity):
        yield expression
    elif isinstance(expression, Item):
        yield from quantities_in(expression.of)
    elif isinstance(expression, Apply):
        for argument in expression.arguments:
            yield from quantities_in(argument)
