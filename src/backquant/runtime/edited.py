"""Graphs that were edited, and do not run: which operator fails, and why.

1. Values between quantized operators are integers. A new operator that reads them as if they were floats
   fails on PyTorch's quantized tensors; on the plain integers of kernels it would give wrong numbers, and is
   refused before the call.
2. Any other failure says what the operator says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from backquant.errors import UsageError
from backquant.graph.call_table import failed_node
from backquant.runtime.failed_call import sentence
from backquant.runtime.kernel_qparams import kernel_qparams

_QUANTIZED = "'QuantizedCPU' backend"
_SHAPES = (getattr, "size", "shape", "dim", "numel")


def edited_failure(error: Exception, model: fx.GraphModule) -> UsageError:
    """The error of ours for ``error``, which a run of the edited graph of ``model`` raised."""
    node = failed_node(error, model)
    if node is not None and _QUANTIZED in str(error):
        return reads_integers(node, next(iter(node.all_input_nodes), node))
    return UsageError(
        f"the graph, as it was edited, fails: {sentence(error)}",
        where="QuantizedModel.graph" if node is None else f"node {node.format_node()}",
        fix="quantized.graph.print_tabular() shows what each operator gets",
    )


def reads_integers(node: fx.Node, source: fx.Node) -> UsageError:
    """The error for an operator of floats that reads integers.

    >>> graph = fx.symbolic_trace(lambda x: x.sin()).graph
    >>> print(reads_integers(graph.find_nodes(op="call_method", target="sin")[0], next(iter(graph.nodes))))
    the graph, as it was edited, fails: `sin` is an operator of floats, and reads the integers of `x`
      where  node %sin : [num_users=1] = call_method[target=sin](args = (%x,), kwargs = {})
      fix    put the operator after `dequantize`, or leave `x` in float:
             qconfig_mapping.set_module_name(..., None)
    """
    return UsageError(
        f"the graph, as it was edited, fails: `{node.name}` is an operator of floats, and reads the "
        f"integers of `{source.name}`",
        where=f"node {node.format_node()}",
        fix=f"put the operator after `dequantize`, or leave `{source.name}` in float:\n"
        "qconfig_mapping.set_module_name(..., None)",
    )


def check_reads(model: fx.GraphModule, before: set[fx.Node]) -> None:
    """Rule 1 for the plain integers of kernels: ``before`` are the nodes that were there at first.

    Raises UsageError.
    """
    for source in model.graph.nodes:
        if source in before and source.op.startswith("call_"):
            for node in _new_readers(source, before):
                qparams = kernel_qparams(model, source)
                if qparams is not None and qparams.output is not None:
                    raise reads_integers(node, source)


def _new_readers(source: fx.Node, before: set[fx.Node]) -> Iterator[Any]:
    for node in source.users:
        if node not in before and node.op.startswith("call_") and node.target not in _SHAPES:
            yield node
