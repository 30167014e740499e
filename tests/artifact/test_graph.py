"""A graph in a file becomes source code, so names must not be able to say more than names."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from backquant.artifact.graph import check_targets, decode_graph, encode_graph
from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.errors import ArtifactError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "1": nn.Conv2d(4, 4, 1)})
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor, flip: Any = None, *, gain: float = 2.0) -> dict[str, Any]:
        y = self.layers["1"](self.layers["conv"](x)) * self.scale
        z = y.view(y.shape[0], -1)[:, 1:3] * gain
        return {"y": (y, [z, z.size(1)]), "z": torch.cat([z, z], dim=1)}


def encoded(graph: fx.Graph) -> list[dict[str, Any]]:
    return encode_graph(graph, Encoder(TensorWriter().add), "")


def decoded(rows: list[dict[str, Any]]) -> fx.Graph:
    return decode_graph(rows, Decoder(TensorReader({}, {})))


def test_a_graph_comes_back_with_its_names_and_results() -> None:
    traced = fx.symbolic_trace(Net().eval())
    graph = decoded(encoded(traced.graph))
    assert [(n.op, n.name, str(n.target)) for n in graph.nodes] == [
        (n.op, n.name, str(n.target)) for n in traced.graph.nodes
    ]
    again = fx.GraphModule(traced, graph)
    x = torch.randn(2, 3, 5, 5)
    for arguments in ({}, {"gain": 0.5}):
        one, two = traced(x, **arguments), again(x, **arguments)
        assert torch.equal(one["y"][0], two["y"][0]) and torch.equal(one["z"], two["z"])
        assert one["y"][1][1] == two["y"][1][1]


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    """Graphs on vectors of three: every kind of node and argument, names of all sorts."""
    graph = fx.Graph()
    values = [
        graph.placeholder(f"x{i}", default_value=draw(st.sampled_from([0.5, 1]))) for i in range(2)
    ]
    names = st.one_of(st.none(), st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True))
    for _ in range(draw(st.integers(0, 8))):
        x, y = (draw(st.sampled_from(values)) for _ in "xy")
        number = draw(st.floats(-2, 2) | st.integers(-3, 3))
        calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
            ("call_function", torch.add, (x, y), {"alpha": number}),
            ("call_function", operator.mul, (x, number), {}),
            ("call_function", torch.cat, ([x, y],), {"dim": 0}),
            (
                "call_function",
                operator.getitem,
                (x, (..., slice(None, 3, draw(st.integers(1, 2))))),
                {},
            ),
            (
                "call_function",
                F.gelu,
                (x,),
                {"approximate": draw(st.sampled_from(["none", "tanh"]))},
            ),
            ("call_function", torch.full_like, (x, number), {"dtype": torch.float32}),
            ("call_method", "clamp", (x,), {"min": number, "max": None}),
            ("call_method", "to", (x, torch.device("cpu"), torch.float32), {}),
            ("get_attr", "weight", (), {}),
            ("call_module", "act", (x,), {}),
        ]
        kind, target, args, kwargs = draw(st.sampled_from(calls))
        made = graph.create_node(kind, target, args, kwargs, name=draw(names))
        if target is torch.cat or target is operator.getitem:  # back to three
            made = graph.call_function(torch.ops.aten.constant_pad_nd.default, (made, (0, 9)))
            made = graph.call_method("narrow", (made, 0, 0, 3))
        values.append(made)
    shape = graph.call_function(getattr, (values[-1], "shape"))
    graph.output(
        draw(st.sampled_from([values[-1], (values[-1], [values[0], shape]), {"y": values[-1]}]))
    )
    return graph


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(3)), nn.Tanh()


@given(graphs())
def test_random_graphs_come_back(graph: fx.Graph) -> None:
    rows = json.loads(json.dumps(encoded(graph)))
    again = decoded(rows)
    for one, two in zip(graph.nodes, again.nodes, strict=True):
        assert (one.op, one.name, one.target) == (two.op, two.name, two.target)
        assert repr((one.args, one.kwargs)) == repr((two.args, two.kwargs))
    assert encoded(again) == rows
    module, inputs = Holder(), (torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 0.0, 1.0]))
    assert repr(fx.GraphModule(module, graph)(*inputs)) == repr(
        fx.GraphModule(module, again)(*inputs)
    )


def test_a_getattr_through_a_variable_is_refused() -> None:
    graph = fx.Graph()
    x, name = graph.placeholder("x"), graph.placeholder("name")
    graph.output(graph.call_function(getattr, (x, name)))
    with pytest.raises(ArtifactError):
        encoded(graph)


def rows_of(**changes: Any) -> list[dict[str, Any]]:
    """``x -> relu -> output`` with the middle node changed."""
    middle = {
        "op": "call_function",
        "name": "relu",
        "target": "torch.relu",
        "args": [{"node": "x"}],
        **changes,
    }
    return [
        {"op": "placeholder", "name": "x", "target": "x"},
        middle,
        {"op": "output", "name": "output", "target": "output", "args": [{"node": middle["name"]}]},
    ]


def test_the_rows_that_the_attacks_start_from_are_sound() -> None:
    gm = fx.GraphModule(nn.Module(), decoded(rows_of()))
    assert torch.equal(gm(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


MARK = '__import__("builtins").bq_pwned.append(1)'
ATTACKS: dict[str, dict[str, Any]] = {
    "function": {"target": "os.system", "args": ["true"]},
    "getattr": {"target": "builtins.getattr", "args": [{"node": "x"}, "__class__"]},
    "getattr of one argument": {"target": "builtins.getattr", "args": [{"node": "x"}]},
    "getattr by keyword": {
        "target": "builtins.getattr",
        "args": [{"node": "x"}],
        "kwargs": {"name": "__class__"},
    },
    "getattr of a chain": {
        "target": "builtins.getattr",
        "args": [{"node": "x"}, "shape.__class__"],
    },
    "subclasses": {"op": "call_method", "target": "__subclasses__"},
    "call": {"op": "call_method", "target": "__call__"},
    "method": {"op": "call_method", "target": f"relu() or {MARK}"},
    "attribute": {"op": "get_attr", "target": f'w", {MARK} or "', "args": []},
    "module": {"op": "call_module", "target": f'm", {MARK} or "'},
    "keyword": {"kwargs": {f"input=x, **{{}} if {MARK} else": 1}},
    "argument": {"op": "placeholder", "target": f"y={MARK}", "args": []},
    "annotation": {"op": "placeholder", "target": f"y: {MARK}", "args": []},
    "name": {"name": f"relu = {MARK} #"},
    "kind": {"op": "root"},
    "twice": {"name": "x"},
    "unknown node": {"args": [{"node": "z"}]},
    "itself": {"args": [{"node": "relu"}]},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    marks: list[int] = []
    monkeypatch.setattr(builtins, "bq_pwned", marks, raising=False)
    with pytest.raises((ArtifactError, LookupError)):
        graph = decoded(rows_of(**ATTACKS[attack]))
        fx.GraphModule(nn.Module(), graph)(torch.ones(2))
        pytest.fail("nothing was refused")
    assert marks == []


def test_the_marks_of_the_attacks_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks ``torch.fx`` runs what a name says: this is what they are there for."""
    import builtins

    marks: list[int] = []
    monkeypatch.setattr(builtins, "bq_pwned", marks, raising=False)
    graph = fx.Graph()
    graph.output(graph.create_node("placeholder", f"x={MARK}", name="x"))
    fx.GraphModule(nn.Module(), graph)
    assert marks == [1]


def test_targets_are_modules_and_tensors(snapshot: Callable[..., None]) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.note = "text"

    root = Root()
    for op, target in (("call_module", "fc"), ("get_attr", "fc.weight")):
        check_targets(decoded(rows_of(op=op, target=target, args=[])), root, "")
    bad = (
        ("call_module", "fc.weight"),
        ("call_module", "nothing"),
        ("call_module", "forward"),
        ("get_attr", "fc"),
        ("get_attr", "note"),
        ("get_attr", "fc.weight.data"),
        ("get_attr", "forward"),
        ("get_attr", "fc.in_features"),
    )
    for op, target in bad:
        with pytest.raises(ArtifactError) as caught:
            check_targets(decoded(rows_of(op=op, target=target, args=[])), root, "head")
    snapshot("graph-target", caught.value)


def test_messages(snapshot: Callable[..., None]) -> None:
    cases: dict[str, Callable[[], object]] = {
        "kind": lambda: decoded(rows_of(op="root")),
        "name": lambda: decoded(rows_of(name="a b")),
    }
    for name, case in cases.items():
        with pytest.raises(ArtifactError) as caught:
            case()
        snapshot(f"graph-{name}", caught.value)
    graph = copy.deepcopy(fx.symbolic_trace(nn.ReLU()).graph)
    graph.set_codegen(fx.graph._PyTreeCodeGen(fx.graph._PyTreeInfo(["x"], None, None)))  # type: ignore[arg-type]
    with pytest.raises(ArtifactError) as caught:
        encoded(graph)
    snapshot("graph-codegen", caught.value)


BY_HAND = {
    "trace the model": lambda *_: encoded(fx.symbolic_trace(nn.ReLU()).graph),
}
