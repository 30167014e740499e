"""Numbers and sequences of graphs: no call without an end, and Python's own results where there is one."""

from __future__ import annotations

import builtins
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.errors import InputError
from backquant.graph.call_table import CallTableModule
from backquant.graph.total import total, total_method

Function = Callable[..., Any]
WITHOUT_END: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "a range": (range, (10**12,)),
    "a range of more than 64 bits": (range, (0, 2**70, 2**69)),
    "a power": (operator.pow, (3, 10**10)),
    "a power of builtins": (pow, (3, 10**10)),
    "a shift": (operator.lshift, (1, 10**12)),
    "a product": (operator.mul, (2**40, 2**40)),
    "a negation": (operator.neg, (-(2**63),)),
    "a quotient": (operator.floordiv, (-(2**63), -1)),
    "a list": (operator.mul, ([0], 10**12)),
    "a list by a tensor": (operator.mul, ([0], torch.tensor(10**12))),
    "a text": (operator.mul, ("x", 10**12)),
    "lists": (operator.concat, ([0] * 60000, [0] * 60000)),
    "a format": (operator.mod, ("%3000000000d", 1)),
    "digits": (round, (5, -(10**9))),
    "a sum of lists": (sum, ([[1], [2]], [])),
    "a product of many": (math.prod, ([2**40] * 1000,)),
    "a common multiple": (math.lcm, tuple(range(2**40, 2**40 + 50))),
    "an integer of a float": (int, (1e300,)),
    "a floor": (math.floor, (1e300,)),
    "rows of a tensor": (list, (torch.zeros(1).expand(1 << 20),)),
    "parts of parts": (operator.eq, ([[0] * 300] * 300, [[0] * 300] * 300)),
    "a cut that grows": (operator.setitem, ([0] * 60000, slice(0, 0), [0] * 60000)),
}


@pytest.mark.parametrize("name", WITHOUT_END)
def test_calls_without_an_end_are_errors(name: str) -> None:
    function, args = WITHOUT_END[name]
    with pytest.raises(InputError):
        total(function)(*args)


def test_a_sequence_is_not_put_into_itself() -> None:
    values: list[Any] = [1, 2]
    with pytest.raises(InputError):
        total(operator.setitem)(values, 0, (values,))
    assert values == [1, 2]


@pytest.mark.parametrize(
    ("receiver", "name", "args"),
    [
        ("%3000000000d", "__mod__", (1,)),
        (3, "__pow__", (10**10,)),
        (10**10, "__rpow__", (3,)),
        ([0], "__mul__", (10**12,)),
        (10**12, "__rmul__", ([0],)),
        (1, "__lshift__", (10**12,)),
        (10**12, "__rlshift__", (1,)),
    ],
)
def test_methods_of_numbers_are_the_same_operators(
    receiver: Any, name: str, args: tuple[Any, ...]
) -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{place}") for place in range(1 + len(args))]
    graph.output(graph.call_method(name, tuple(nodes)))
    with pytest.raises(InputError):
        CallTableModule(nn.Module(), graph)(receiver, *args)


def test_results_are_those_of_python() -> None:
    dice = random.Random(0)
    values: list[Any] = [0, 1, -1, 7, 2**31, -(2**63), 2.5, True, [1, 2], (3,), "ab", range(4)]
    names = "add sub mul floordiv truediv mod pow lshift rshift and_ or_ xor eq lt contains getitem"
    functions = [getattr(operator, name) for name in names.split()]
    functions += [builtins.divmod, builtins.max, builtins.min, math.gcd, math.atan2, math.lcm]
    same = 0
    for _ in range(4000):
        function, args = dice.choice(functions), (dice.choice(values), dice.choice(values))
        if function is operator.lshift and args[1] == 2**31:
            continue
        if function is operator.pow and 2**31 in args:
            continue
        if function is operator.mul and 2**31 in args:
            continue
        wanted: Any = None
        try:
            wanted = function(*args)
        except Exception as error:
            with pytest.raises((type(error), InputError)):
                total(function)(*args)
            continue
        try:
            assert total(function)(*args) == wanted
            same += 1
        except InputError:
            integers = wanted if isinstance(wanted, tuple) else (wanted,)
            formats = function is operator.mod and isinstance(args[0], str)
            assert formats or any(not -(2**63) <= number < 2**63 for number in integers)
    assert same > 1000


def test_reflected_methods_are_those_of_python() -> None:
    for name in ("sub", "floordiv", "mod", "truediv", "lshift", "pow", "and", "or", "xor"):
        assert total_method(3, f"__r{name}__")(7) == getattr(3, f"__r{name}__")(7)
        assert total_method(3, f"__{name}__")(7) == getattr(3, f"__{name}__")(7)
    assert total_method([1, 2], "index")(2) == 1


def test_traces_see_the_functions_of_the_graph() -> None:
    graph = fx.symbolic_trace(lambda x, n: (x + n) * 2 % 3).graph
    module = CallTableModule(nn.Module(), graph)
    again = fx.symbolic_trace(module).graph
    assert [node.target for node in again.nodes] == [node.target for node in graph.nodes]
