"""Graph patterns against random graphs: found where they were planted, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import AnyOrder, BackendConfig, BackendPatternConfig, GraphPattern
from backquant.backend_config.graph_pattern import GraphNode
from backquant.graph import GraphIndex
from backquant.match.matcher import Found, Matcher, PatternIndex
from backquant.match.reasons import NearMisses

TWO = (torch.add, torch.mul, torch.sub)
ONE = (torch.relu, torch.sigmoid, torch.tanh)
OTHERS = (torch.exp, torch.sin, torch.cos)  # of the host graph only


def random_pattern(rng: random.Random) -> GraphPattern:
    """Two to seven operators over up to three inputs, with literals, one output, values used twice."""
    inputs = [f"x{i}" for i in range(rng.randint(1, 3))]
    nodes: dict[str, Any] = {}
    unused = list(inputs)
    for number in range(rng.randint(2, 5)):
        values = [*inputs, *nodes]
        first = rng.choice(unused or values)
        nodes[f"n{number}"] = _call(rng, first, rng.choice([*values, rng.choice([2, 0.5])]))
        read = nodes[f"n{number}"][1:]
        unused = [name for name in unused if name not in read] + [f"n{number}"]
    while len(unused) > 1:
        name = f"n{len(nodes)}"
        nodes[name] = (torch.add, unused[0], unused[1])
        unused = [*unused[2:], name]
    return GraphPattern(inputs, _last_last(nodes, unused[0]))


def _call(rng: random.Random, first: Any, second: Any) -> tuple[Any, ...]:
    if rng.random() < 0.4:
        return (rng.choice(ONE), first)
    op = rng.choice(TWO)
    return (AnyOrder(op) if op is not torch.sub and rng.random() < 0.5 else op, first, second)


def _last_last(nodes: dict[str, Any], last: str) -> dict[str, Any]:
    return {**{name: node for name, node in nodes.items() if name != last}, last: nodes[last]}


@dataclass
class Host:
    """A graph that grows; ``planted``: the operators of each copy, by name."""

    rng: random.Random
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: list[fx.Node] = field(default_factory=list)
    planted: list[dict[str, fx.Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [self.graph.placeholder(f"in{i}") for i in range(3)]

    def grow(self, count: int, ops: tuple[Any, ...]) -> None:
        for _ in range(count):
            op = self.rng.choice(ops)
            wanted = 2 if op in TWO else 1
            args = tuple(self.rng.choice(self.values) for _ in range(wanted))
            self.values.append(self.graph.call_function(op, args))

    def plant(self, pattern: GraphPattern) -> dict[str, fx.Node]:
        made = {name: self.rng.choice(self.values) for name in pattern.inputs}
        for node in pattern.nodes:
            arguments = [made[a] if isinstance(a, str) else a for a in node.arguments or ()]
            if node.any_order and self.rng.random() < 0.5:
                arguments.reverse()
            made[node.name] = self.graph.call_function(node.op, tuple(arguments))
        self.values.append(made[pattern.output])
        self.planted.append(made)
        return made

    def module(self) -> fx.GraphModule:
        self.graph.output(tuple(self.values))  # every value of the host is used outside
        return fx.GraphModule(nn.Module(), self.graph)


def search(module: fx.GraphModule, *patterns: GraphPattern) -> tuple[list[Found], Matcher]:
    entries = [BackendPatternConfig(pattern) for pattern in patterns]
    backend = BackendConfig("b").set_backend_pattern_configs(entries)
    matcher = Matcher(GraphIndex(module), PatternIndex(backend))
    return matcher.run(), matcher


def is_match(found: Found) -> bool:
    """By the definition: every call has the pattern's operator and arguments; nothing leaks."""
    pattern = found.candidate.config.pattern
    assert isinstance(pattern, GraphPattern)
    bound = pattern.named(found.bound)
    inside = {bound[name] for name in pattern.operators}
    leaks = any(set(node.users) - inside for node in inside - {found.anchor})
    read = {bound[name] for name in pattern.inputs if isinstance(bound[name], fx.Node)}
    return not leaks and not read & inside and all(_fits(node, bound) for node in pattern.nodes)


def _fits(node: GraphNode, bound: dict[str, Any]) -> bool:
    call = bound[node.name]
    wanted = [bound[a] if isinstance(a, str) else a for a in node.arguments or ()]
    orders = [wanted, wanted[::-1]] if node.any_order else [wanted]
    return call.target is node.op and any(
        all(_same(a, b) for a, b in zip(call.args, order, strict=True)) for order in orders
    )


def _same(one: Any, two: Any) -> bool:
    return one is two if isinstance(one, fx.Node) or isinstance(two, fx.Node) else one == two


@pytest.mark.parametrize("seed", range(120))
def test_found_where_planted_and_only_there(seed: int) -> None:
    rng = random.Random(seed)
    pattern = random_pattern(rng)
    host = Host(rng)
    for _ in range(rng.randint(0, 5)):
        host.grow(3, OTHERS)
        host.plant(pattern)
    found, _ = search(host.module(), pattern)
    anchors = [made[pattern.output] for made in host.planted]
    taken = {node for match in found for node in match.members}
    missed = [node for node in anchors if node not in {match.anchor for match in found}]
    assert all(map(is_match, found))
    # A copy may lie in another match, or end in one, when copies feed each other.
    assert all(_operators(pattern, made) & taken for made in _of(host, pattern, missed))
    if not host.planted:
        assert found == []


def _of(host: Host, pattern: GraphPattern, anchors: list[fx.Node]) -> list[dict[str, fx.Node]]:
    return [made for made in host.planted if made[pattern.output] in anchors]


def _operators(pattern: GraphPattern, made: dict[str, fx.Node]) -> set[fx.Node]:
    return {made[name] for name in pattern.operators}


@pytest.mark.parametrize("seed", range(60))
def test_apart_copies_are_all_found(seed: int) -> None:
    """Copies that read values of the host only: the matches are exactly the copies."""
    rng = random.Random(seed)
    pattern = random_pattern(rng)
    host = Host(rng)
    host.grow(8, OTHERS)
    values = list(host.values)
    for _ in range(4):
        host.plant(pattern)
        host.values = values
    outputs = [made[pattern.output] for made in host.planted]
    host.values = [*values, *outputs]
    found, _ = search(host.module(), pattern)
    assert [match.anchor for match in found] == outputs
    assert [set(match.members) for match in found] == [
        _operators(pattern, made) for made in host.planted
    ]


@pytest.mark.parametrize("seed", range(60))
def test_among_the_same_operators_every_match_is_one(seed: int) -> None:
    rng = random.Random(seed)
    patterns = [random_pattern(rng) for _ in range(4)]
    host = Host(rng)
    host.grow(40, (*ONE, *TWO))
    for pattern in patterns:
        host.plant(pattern)
    distinct = {pattern.normal: pattern for pattern in patterns}
    found, _ = search(host.module(), *distinct.values())
    assert all(map(is_match, found))
    members = [node for match in found for node in match.members]
    assert len(members) == len(set(members))
    assert found or not host.planted


def _leak(host: Host, pattern: GraphPattern, made: dict[str, fx.Node]) -> bool:
    inner = [name for name in pattern.operators if name != pattern.output]
    host.values.append(made[host.rng.choice(inner)])
    return True


def _other_operator(host: Host, pattern: GraphPattern, made: dict[str, fx.Node]) -> bool:
    made[host.rng.choice(pattern.operators)].target = torch.maximum
    return True


def _other_literal(host: Host, pattern: GraphPattern, made: dict[str, fx.Node]) -> bool:
    for name in pattern.operators:
        node = made[name]
        if any(isinstance(a, (int, float)) for a in node.args):
            node.args = tuple(a + 1 if isinstance(a, (int, float)) else a for a in node.args)
            return True
    return False


def _apart(host: Host, pattern: GraphPattern, made: dict[str, fx.Node]) -> bool:
    """An input that stands at several places is another value at one of them."""
    for name in pattern.inputs:
        readers = [node.name for node in pattern.nodes if name in (node.arguments or ())]
        if len(readers) > 1:
            others = [value for value in host.values[:3] if value not in made.values()]
            if others:
                made[readers[-1]].replace_input_with(made[name], others[0])
                return True
    return False


@pytest.mark.parametrize("damage", [_leak, _other_operator, _other_literal, _apart])
@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_copy_is_not_found(seed: int, damage: Any) -> None:
    rng = random.Random(seed)
    pattern = random_pattern(rng)
    host = Host(rng)
    host.grow(4, OTHERS)
    made = host.plant(pattern)
    damaged = damage(host, pattern, made)
    module = host.module()
    found, matcher = search(module, pattern)
    assert all(map(is_match, found))
    anchors = [match.anchor for match in found]
    assert (made[pattern.output] in anchors) is not damaged
    if damaged and made[pattern.output].target is pattern.nodes[-1].op:
        text = NearMisses(matcher._graph, matcher._patterns).text(made[pattern.output])
        assert text.startswith("for ")


def tower(depth: int) -> fx.GraphModule:
    host = Host(random.Random(0))
    for _ in range(depth):
        host.grow(2, OTHERS)
        host.plant(SWISH)
        host.grow(2, TWO)
    return host.module()


SWISH = GraphPattern(
    ["x"], {"gate": (torch.sigmoid, "x"), "out": (AnyOrder(torch.mul), "x", "gate")}
)


def test_attempts_grow_with_nodes() -> None:
    small, large = (search(tower(depth), SWISH)[1].attempts for depth in (10, 100))
    assert 0 < large <= 11 * small


def test_attempts_do_not_grow_with_patterns_that_end_elsewhere() -> None:
    others = [
        GraphPattern(["x"], {"a": (torch.relu, "x"), "out": (torch.div, "a", number)})
        for number in range(200)
    ]
    assert search(tower(20), SWISH, *others)[1].attempts == search(tower(20), SWISH)[1].attempts


def test_a_value_with_many_users_costs_no_more() -> None:
    """Whether an inner value leaks is known from the number of its users."""

    class Users(dict):
        looks = 0

        def __iter__(self):
            Users.looks += len(self)
            return super().__iter__()

    graph = fx.Graph()
    x = graph.placeholder("x")
    gate = graph.call_function(torch.sigmoid, (x,))
    graph.output([graph.call_function(torch.mul, (x, gate)) for _ in range(300)])
    gate.users = Users(gate.users)
    found, matcher = search(fx.GraphModule(nn.Module(), graph), SWISH)
    assert found == []
    assert matcher.attempts == 600
    assert Users.looks <= 300


def test_orders_are_bounded() -> None:
    nodes = {f"n{i}": (AnyOrder(torch.add), f"n{i - 1}" if i else "x", "x") for i in range(6)}
    pattern = GraphPattern(["x"], nodes)
    graph = fx.Graph()
    value = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (value, value)))
    assert search(fx.GraphModule(nn.Module(), graph), pattern)[1].attempts == 2**6


def test_an_input_is_computed_outside() -> None:
    pattern = GraphPattern(["x", "y"], {"a": (torch.relu, "x"), "out": (torch.add, "a", "y")})
    graph = fx.Graph()
    inner = graph.call_function(torch.relu, (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.add, (inner, inner)))
    module = fx.GraphModule(nn.Module(), graph)
    found, matcher = search(module, pattern)
    assert found == []
    text = NearMisses(matcher._graph, matcher._patterns).text(inner)
    assert text.endswith("an input is its own operator 'relu'")


def test_keywords_take_their_places() -> None:
    pattern = GraphPattern(["x"], {"out": (torch.flatten, "x", 1)})
    module = fx.symbolic_trace(lambda x: torch.flatten(x, start_dim=1))
    assert [match.anchor.name for match in search(module, pattern)[0]] == ["flatten"]


def test_other_arguments_are_named() -> None:
    pattern = GraphPattern(["x"], {"a": (torch.relu, "x"), "out": (torch.flatten, "a", 1)})
    module = fx.symbolic_trace(lambda x: torch.flatten(torch.relu(x), 1, 2))
    found, matcher = search(module, pattern)
    assert found == []
    text = NearMisses(matcher._graph, matcher._patterns).text(matcher._graph.nodes["flatten"])
    assert text.endswith("'flatten' is called with other arguments")


def test_a_longer_pattern_comes_first() -> None:
    short = GraphPattern(["x"], {"out": (torch.mul, "x", "x")})
    module = fx.symbolic_trace(lambda x: torch.mul(x, torch.sigmoid(x)))
    found, _ = search(module, short, SWISH)
    assert [match.candidate.config.pattern for match in found] == [SWISH]
