"""Arithmetic over quantities, as data: ``kernel_height * kernel_width``, ``product(kernel_size)``.

An expression is written as in Python, of quantities (``groups``, ``input.height``), numbers, ``+ - * /``,
items (``dims[-1]``, ``dims[1:]``) and a few functions. Nothing is evaluated here: see ``values``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from backquant.errors import SpecError, did_you_mean

#: Functions of one argument: those that make one number of several, and those of each number.
FUNCTIONS = ("product", "sum", "max", "min", "count", "abs", "ceil", "floor")
_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F_]+|(?:\d[\d_]*)?\.?\d[\d_]*\.?(?:[eE][+-]?\d+)?|[A-Za-z_][A-Za-z_0-9]*"
    r"|\*\*|[-+*/()\[\].,:='\"]|$)",
    re.ASCII,
)
_INTEGER = re.compile(r"[\d_]+|0[xX].*")
_LARGEST_POWER = 1000
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
    reader = _Reader(text)
    try:
        expression = reader.sum()
    except RecursionError as error:
        raise reader.wrong() from error
    if reader.next:
        raise reader.wrong()
    return expression


class _Reader:
    """Reads one expression, token by token. ``next`` is the token that comes, empty at the end."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.next = ""
        self.take()

    def take(self) -> str:
        """The token that came; the one after it comes."""
        taken = self.next
        found = _TOKEN.match(self.text, self.place)
        if found is None:
            raise self.wrong()
        self.next, self.place = found[1], found.end()
        return taken

    def has(self, token: str) -> bool:
        """Whether ``token`` comes, which is then taken."""
        if self.next != token:
            return False
        self.take()
        return True

    def needs(self, token: str) -> None:
        if not self.has(token):
            raise self.wrong()

    def wrong(self) -> SpecError:
        return SpecError(f"{self.text!r} is no expression", where=self.text, fix=_EXAMPLE)

    def sum(self, strength: int = 1) -> Expression:
        """What signs of at least this strength join."""
        left = self.signed()
        while (own := _STRENGTH.get(self.next, 0)) >= strength:
            left = Apply(self.take(), (left, self.sum(own + 1)))
        return left

    def signed(self) -> Expression:
        if not self.has("-"):
            return self.power()
        number = self.signed()
        if not isinstance(number, Number):
            raise self.no_quantity()
        return Number(-number.value)

    def power(self) -> Expression:
        base = self.item()
        if not self.has("**"):
            return base
        exponent = self.signed()
        power = exponent.value if isinstance(exponent, Number) else None
        if base != Number(2) or type(power) is not int or abs(power) > _LARGEST_POWER:
            raise self.no_quantity()
        return Number(2**power if power >= 0 else 2.0**power)

    def no_quantity(self) -> SpecError:
        what = f"{self.text!r} is no expression of quantities"
        return SpecError(what, where=self.text, fix=_EXAMPLE)

    def item(self) -> Expression:
        of = self.value()
        while self.has("["):
            start = None if self.next == ":" else self.whole()
            whole = self.has(":")
            stop = self.whole() if whole and self.next not in ("]", ":") else None
            if self.next == ":":
                what = "a step between items is not supported"
                raise SpecError(what, where=self.text, fix="dims[1:]")
            self.needs("]")
            of = Item(of, start, stop, whole=whole)
        return of

    def whole(self) -> int:
        found = self.sum()
        if not isinstance(found, Number) or not isinstance(found.value, int):
            raise SpecError("an item is named by a whole number", where=self.text, fix="dims[-1]")
        return found.value

    def value(self) -> Expression:
        if self.has("("):
            inside = self.sum()
            self.needs(")")
            return inside
        token = self.take()
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return self.number(token)
        if not token.isidentifier():
            raise self.wrong()
        if self.has("("):
            return self.call(token)
        if not self.has("."):
            return Quantity(token)
        name = self.take()
        if not name.isidentifier() or self.next in (".", "("):
            raise self.no_quantity() if name.isidentifier() else self.wrong()
        return Quantity(name, token)

    def number(self, token: str) -> Number:
        try:
            return Number(int(token, 0) if _INTEGER.fullmatch(token) else float(token))
        except ValueError:
            raise self.wrong() from None

    def call(self, name: str) -> Expression:
        if name not in FUNCTIONS:
            fix = did_you_mean(name, FUNCTIONS, f"functions: {', '.join(FUNCTIONS)}")
            raise SpecError(f"there is no function {name!r}", where=self.text, fix=fix)
        argument = None if self.next == ")" else self.sum()
        if argument is None or self.next in (",", "="):
            raise SpecError(
                f"{name} takes one argument", where=self.text, fix=f"{name}(kernel_size)"
            )
        self.needs(")")
        return Apply(name, (argument,))


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


# The quantities that a condition may name. ``backquant.operators.facts`` reads them off a graph.
#
# A quantity is about the operator, or about one of its tensors: ``input.height``. Most have several values
# (one for each axis, or for each tensor); a comparison then holds if it holds for each of them.
#
# What is no name of this list is a parameter of the operator itself: ``mode``, ``align_corners``, ``eps``.


#: ``number``; ``word``: one of a few words; ``flag``; ``value``: whatever the parameter takes.
Kind = Literal["number", "word", "flag", "value"]


@dataclass(frozen=True)
class Known:
    """One name: the kind of its values, what it means, and the least number that it can be."""

    kind: Kind
    about: str
    lowest: float | None = None


def _axes(name: str, about: str, lowest: int) -> dict[str, Known]:
    of_each = {name: Known("number", f"{about}, for each axis of space", lowest)}
    for axis in ("depth", "height", "width"):
        of_each[f"{name.removesuffix('_size')}_{axis}"] = Known(
            "number", f"{about}: {axis}", lowest
        )
    return of_each


#: Of the operator.
OPERATOR: dict[str, Known] = {
    **_axes("kernel_size", "size of the kernel of a convolution or of the window of a pooling", 1),
    **_axes("stride", "step of the kernel", 1),
    **_axes("dilation", "distance between the elements of the kernel", 1),
    **_axes("padding", "what is added at each end (of 'same': at the beginning)", 0),
    **_axes("output_padding", "what a transposed convolution adds at the far end", 0),
    "groups": Known("number", "groups of a convolution; 1 of a linear layer", 1),
    "in_channels": Known("number", "channels or features that a weighted operator reads", 1),
    "out_channels": Known("number", "channels or features that a weighted operator gives", 1),
    "weight_sums": Known(
        "number",
        "for each output channel the sum of absolute quantized weights, less their zero point",
        0,
    ),
    "group_size": Known("number", "the size of the groups that the weight is asked for in", 1),
    "dim": Known(
        "value",
        "the axes that the operator works along, counted from the end where the rank is known",
    ),
    "reads": Known("word", "operators that compute what is read; input: of the model"),
    "read_by": Known("word", "operators that read the result; output: of the model"),
}

#: Quantities that name operators, with the words for the ends of the model.
NEIGHBOURS = {"reads": ("input", "constant"), "read_by": ("output",)}

#: Of a tensor; without a subject, of those that ``subject_of`` says.
TENSOR: dict[str, Known] = {
    "rank": Known("number", "number of axes", 0),
    "dims": Known("number", "size of each axis", 0),
    "elements": Known("number", "number of elements", 0),
    "batch": Known("number", "size of the first axis, of tensors with two or more", 0),
    "channels": Known("number", "size of the second axis", 0),
    "depth": Known("number", "size of the third axis from the end", 0),
    "height": Known("number", "size of the last axis but one", 0),
    "width": Known("number", "size of the last axis", 0),
    "shape": Known("word", "static, or dynamic where a size was declared free"),
    "dtype": Known("word", "dtype in the float model: float32, int64, …"),
    "constant": Known("flag", "whether it belongs to the model, or is a plain number"),
}
SUBJECTS: dict[str, str] = {
    "input": "the first activation that is read",
    "other": "the second one",
    "inputs": "all activations that are read",
    "output": "the result",
    "weight": "the weight",
    "bias": "the bias",
    "tensors": "all activations that are read, and the result",
}
_OF_ALL = ("rank", "dims", "elements", "shape")
_OF_INPUTS = ("batch", "dtype")


def subject_of(name: str) -> str:
    """Whose a tensor's quantity is when nobody says it.

    >>> subject_of("rank"), subject_of("batch"), subject_of("height")
    ('tensors', 'inputs', 'input')
    """
    if name in _OF_ALL:
        return "tensors"
    return "inputs" if name in _OF_INPUTS else "input"


def kind_of_quantity(name: str) -> Kind:
    """The kind of a quantity's values; ``value`` for parameters of operators.

    >>> kind_of_quantity("groups"), kind_of_quantity("shape"), kind_of_quantity("mode")
    ('number', 'word', 'value')
    """
    known = OPERATOR.get(name) or TENSOR.get(name)
    return "value" if known is None else known.kind
