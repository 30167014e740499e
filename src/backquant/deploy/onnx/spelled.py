"""An exported program in the spelling that PyTorch's ONNX exporter takes. Values stay what they were.

1. Numbers among the outputs (how much of a sliding cache is filled) are tensors without axes: to ONNX an
   output is a tensor.
2. The result of attention is copied into row-major order, and ``view`` becomes ``reshape``. The exporter runs
   the program again, twice, and attention may lie in memory in another order each time, which a view behind
   it does not survive. In the file a copy is nothing.
3. The least and the greatest value of a whole tensor (``x.amin()``) are those along all its axes, which are
   written out: of an empty list the exporter makes nothing. Both at once (``x.aminmax()``), which it does not
   know, are one after the other.
4. Integers that are taken from a float number (``1.0 - mask``) become floats before: the exporter makes the
   subtraction one whose first operand is the number, and finds no form of it for the types.
5. Attention has four axes: the exporter refuses others (``four_axes``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputSpec, TensorArgument

from backquant.deploy.edits import AtenCalls
from backquant.deploy.onnx.complex_numbers import spell_complex
from backquant.deploy.onnx.four_axes import with_four_axes
from backquant.operators import overload, overloads
from backquant.operators.windows import cut_windows

__all__ = ["spell_for_onnx"]


def spell_for_onnx(program: ExportedProgram) -> None:
    """Apply the rules, in place.

    >>> class Filled(torch.nn.Module):
    ...     def forward(self, x): return x.view(-1), x.shape[0]
    >>> program = torch.export.export(Filled(), (torch.zeros(3, 2),))
    >>> spell_for_onnx(program)
    >>> [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ['aten.reshape.default', 'aten.full.default']
    """
    attention = overloads("scaled_dot_product_attention")
    cut_windows(program.graph)
    spell_complex(program.graph)
    for node in list(program.graph.nodes):
        if node.target is overload("view"):
            node.target = overload("reshape")
        elif node.target in attention:
            _lay_out(with_four_axes(node))
        elif node.target in (overload("amin"), overload("amax")):
            x, axes, *more = node.args if len(node.args) > 1 else (*node.args, [])
            node.args = (x, axes or list(range(x.meta["val"].dim())), *more)
        elif node.target is overload("aminmax"):
            _one_after_the_other(node)
        elif node.target is overload("rsub", "Scalar"):
            _promote(node)
    _outputs_as_tensors(program)
    program.graph_module.recompile()


def _lay_out(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        copied = node.graph.call_function(
            overload("clone"), (node,), {"memory_format": torch.contiguous_format}
        )
    copied.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)


def _one_after_the_other(node: fx.Node) -> None:
    x, axis = node.args[0], node.kwargs.get("dim")
    assert isinstance(x, fx.Node)
    axes = list(range(x.meta["val"].dim())) if axis is None else [axis]
    for user in list(node.users):
        function = overload(("amin", "amax")[user.args[1]])  # type: ignore[index]
        with node.graph.inserting_before(user):
            made = node.graph.call_function(function, (x, axes, node.kwargs.get("keepdim", False)))
        made.meta = user.meta
        user.replace_all_uses_with(made)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _promote(node: fx.Node) -> None:
    """Rule 4."""
    x, dtype = node.args[0], node.meta["val"].dtype
    assert isinstance(x, fx.Node)
    if x.meta["val"].dtype != dtype:
        node.args = (AtenCalls(node).to(x, dtype), *node.args[1:])


def _outputs_as_tensors(program: ExportedProgram) -> None:
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    values, specs = list(output.args[0]), program.graph_signature.output_specs
    for i, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if isinstance(spec.arg, ConstantArgument) and isinstance(value, (bool, int, float)):
            values[i] = _tensor(output, value)
            specs[i] = OutputSpec(spec.kind, TensorArgument(name=values[i].name), spec.target)
    output.args = (tuple(values),)


def _tensor(output: fx.Node, value: Any) -> fx.Node:
    made = torch.tensor(value)
    with output.graph.inserting_before(output):
        node = output.graph.call_function(overload("full"), ([], value), {"dtype": made.dtype})
    node.meta["val"] = made.to("meta")
    return node
