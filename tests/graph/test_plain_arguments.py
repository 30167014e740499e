"""Objects among the arguments, such as caches of keys and values, are inputs of a file, tensor by tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import backquant
from backquant.graph.plain_arguments import plain, plain_shapes, with_plain_arguments


class Step(nn.Module):
    """One step of a decoder: reads a cache of two layers, given as an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        keys = torch.cat([cache.layers[0]["keys"], self.first(x)], 1)
        return self.last(keys + cache.layers[1]["keys"].mean(1, keepdim=True))


def inputs() -> dict[str, object]:
    layers = [{"keys": torch.randn(2, 3, 8)} for _ in range(2)]
    return {"x": torch.randn(2, 4, 8), "cache": SimpleNamespace(layers=layers, name="static")}


def test_the_tensors_of_an_object_are_inputs(tmp_path) -> None:
    example = inputs()
    options = {"backend": "onnxruntime", "calibration": [example]}
    quantized = backquant.quantize(Step().eval(), example, **options)
    backquant.save(quantized, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    shapes = {"keys": {1: "cached"}}
    backquant.export(
        loaded,
        tmp_path / "m.onnx",
        dynamic_shapes={"x": {1: "new"}, "cache": {"layers": [shapes, {"keys": {}}]}},
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    names = [item.name for item in session.get_inputs()]
    assert names == ["x", "cache_layers_0_keys", "cache_layers_1_keys"]
    new = {**inputs(), "x": torch.randn(2, 1, 8)}
    tensors = [new["x"], *(layer["keys"] for layer in new["cache"].layers)]
    feed = dict(zip(names, (np.asarray(tensor) for tensor in tensors), strict=True))
    found = torch.from_numpy(session.run(None, feed)[0])
    assert torch.allclose(found, quantized(**new), atol=0.1)


class Pair(NamedTuple):
    first: Any
    second: Any


class Registered:
    def __init__(self, keys: Any, seen: Any) -> None:
        self.keys, self.seen = keys, seen


def _open(value: Registered) -> tuple[list[Any], None]:
    return [value.keys, value.seen], None


def _with_keys(value: Registered) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey(n), getattr(value, n)) for n in ("keys", "seen")], None


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    pytree.register_pytree_node(
        Registered, _open, lambda parts, _: Registered(*parts), flatten_with_keys_fn=_with_keys
    )
    yield
    pytree._deregister_pytree_node(Registered)


def _opened(read: Any, *args: Any) -> Any:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "y")[: len(args)]]
    tracer = fx.proxy.GraphAppendingTracer(graph)
    graph.output(read(*(fx.Proxy(node, tracer) for node in nodes)).node)
    module = fx.GraphModule({}, graph)
    given, kwargs = with_plain_arguments(module, args, {})
    assert not kwargs
    return given, module(*given)


def total(values: Any) -> torch.Tensor:
    """Looks at a named tuple as a whole."""
    assert type(values) is Pair
    return values.first + values.second


fx.wrap("total")


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.first + x[1],
        lambda x: x[-2] + x.second,
        lambda x: fx.Proxy(x.node.graph.call_function(total, (x.node,)), x.tracer),
        lambda x: (x[:1] + x[1:])[0] + x.second,
    ],
    ids=["fields", "negative", "whole", "slices"],
)
def test_named_tuples_are_dicts(read: Any) -> None:
    pair = Pair(torch.ones(2), torch.tensor([2.0, 3.0]))
    given, found = _opened(read, pair)
    assert given == ({"first": pair.first, "second": pair.second},)
    assert found.tolist() == [3, 4]


def test_objects_of_any_kind_inside_of_each_other() -> None:
    x = torch.ones(2)
    value = (Pair(Registered(x, SimpleNamespace(a=x + 1)), [Pair(x + 2, x)]), 3)
    given, found = _opened(lambda x: x[0].first.seen.a + x[0][1][0].first, value)
    assert found.tolist() == [5, 5]
    assert type(given[0]) is tuple and given[0][0]["first"]["seen"] == {
        "a": given[0][0]["first"]["seen"]["a"]
    }
    assert plain([x, (x, {"a": x})])[1][0] is x


def test_shapes_of_what_becomes_a_dict() -> None:
    x, free = torch.ones(2, 3), {0: "batch"}
    pair, registered = Pair(x, [x, x]), Registered(x, x)
    opened = {"first": free, "second": [None, free]}
    for given in (Pair(free, [None, free]), (free, [None, free]), opened):
        assert plain_shapes({"p": given, "x": free}, ["x", "p"], (x,), {"p": pair}) == {
            "p": opened,
            "x": free,
        }
    found = plain_shapes(([free, None], None), ["r", "x"], (registered, x), {})
    assert found == [{"keys": free, "seen": None}, None]
    assert plain_shapes({"x": free}, ["x"], (x,), {}) == {"x": free}
