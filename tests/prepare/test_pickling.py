"""Graphs and configs through pickle."""

from __future__ import annotations

import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from backquant.backend_config import get_backend_config, list_backends
from backquant.graph import register_quantized_decomposed
from backquant.prepare.record import dump, graph_from_rows, graph_rows, load

register_quantized_decomposed()

FUNCTIONS = [
    torch.cat,
    F.linear,
    F.max_pool2d,
    F.adaptive_max_pool1d,
    F.relu,
    operator.add,
    operator.getitem,
    getattr,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add,
    torch.ops.quantized_decomposed.quantize_per_tensor.default,
    torch.Tensor.add,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions_come_back_as_themselves(function):
    assert load(dump(function)) is function


@pytest.mark.parametrize("name", list_backends())
def test_backends(name):
    backend = get_backend_config(name)
    assert load(dump(backend)) == backend


def test_graphs_keep_names_and_arguments():
    graph = fx.Graph()
    x = graph.placeholder("x", default_value=None)
    both = graph.create_node("call_function", torch.cat, ([x, x], 1), name="odd_7")
    part = graph.call_function(operator.getitem, (both, (slice(None), slice(None, 2))))
    graph.call_method("view", (part,), {"dtype": torch.int32})
    graph.output({"a": [both, None], "b": (part,)})
    again = graph_from_rows(load(dump(graph_rows(graph))))
    again.lint()
    assert [str(node.format_node()) for node in again.nodes] == [
        str(node.format_node()) for node in graph.nodes
    ]
    assert str(again) == str(graph)


def test_operators_that_are_not_registered_yet(tmp_path: Path) -> None:
    """A process that only reads a pickle has called nothing that registers them."""
    register_quantized_decomposed()
    path = tmp_path / "operator.pickle"
    path.write_bytes(dump(torch.ops.quantized_decomposed.quantize_per_tensor.default))
    code = (
        "import sys, backquant.prepare.record as p; print(p.load(open(sys.argv[1], 'rb').read()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, path], check=False, capture_output=True, text=True
    )
    assert found.stdout.strip() == "quantized_decomposed.quantize_per_tensor.default", found.stderr
