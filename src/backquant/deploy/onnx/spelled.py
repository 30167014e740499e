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
6. ``squeeze(dim)`` of an axis longer than 1 moves nothing; ONNX refuses it.
7. Parts of an axis of free size are slices: of ``split`` the exporter makes a sequence, which OpenVINO does
   not read, and of ``chunk`` into one part nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputSpec, TensorArgument

from backquant.deploy.edits import AtenCalls, arguments, replace, sizes_of
from backquant.deploy.job import same_sizes
from backquant.operators import overload, overloads
from backquant.operators.aten import cut_windows

_END = 2**63 - 1  # of a slice: the last place


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
        elif node.target is overload("squeeze", "dim"):
            if node.meta["val"].dim() == node.args[0].meta["val"].dim():
                node.target, node.args = overload("clone"), node.args[:1]
        elif node.target in (overload("split"), overload("chunk")):
            _slice_parts(node)
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


def _slice_parts(node: fx.Node) -> None:
    """Rule 7."""
    x, size, axis = arguments(node).values()
    is_one = len(node.meta["val"]) == 1
    if isinstance(x.meta["val"].shape[axis], int) or not (
        is_one or node.target is overload("split")
    ):
        return
    for item in list(node.users):
        start = 0 if is_one else item.args[1] * size
        end = _END if is_one and node.target is overload("chunk") else start + size
        replace(item, AtenCalls(item).slice(x, axis, start, end))
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


# Complex numbers in the spelling of PyTorch's ONNX exporter, which takes no floats beside them.
#
# A float beside complex numbers is complex, without an imaginary part; floats times a complex constant
# (``1j``) are the two parts.

_ARITHMETIC = {*overloads("add", "sub", "mul"), overload("mul", "Scalar")}


def spell_complex(graph: fx.Graph) -> None:
    """Apply it to sums, differences and products of an exported ``graph``, in place.

    >>> class Turned(torch.nn.Module):
    ...     def forward(self, x): return x.cos() + 1j * x.sin()
    >>> graph = torch.export.export(Turned(), (torch.zeros(2),)).graph
    >>> spell_complex(graph)
    >>> [node.name for node in graph.nodes if "complex" in node.name]
    ['complex_default', 'complex_default_1']
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ARITHMETIC and _is_complex(node):
            _spell(node)


def _is_complex(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
        return isinstance(value, torch.Tensor) and value.is_complex()
    return isinstance(value, complex)


def _spell(node: fx.Node) -> None:
    x, y = node.args[:2]
    write = AtenCalls(node)
    if not isinstance(y, complex):
        for value in (x, y):
            if isinstance(value, fx.Node) and _is_part_of(value, node):
                node.replace_input_with(value, write.complex(value, write.zeros_like(value)))
    elif "mul" in str(node.target) and _is_part_of(x, node):
        replace(node, write.complex(*(write.mul(x, part) for part in (y.real, y.imag))))


def _is_part_of(value: Any, node: fx.Node) -> bool:
    """Whether a value holds floats of the width that the complex numbers of ``node`` have."""
    dtype: torch.dtype = value.meta["val"].dtype
    return dtype.is_floating_point and dtype.to_complex() == node.meta["val"].dtype


# Attention with four axes: PyTorch's ONNX exporter refuses any other number.
#
# Fewer get axes of size 1 in front. Of more, those before the heads become one.

_AXES = 4


def with_four_axes(node: fx.Node) -> fx.Node:
    """The attention that stands for ``node``, in its place.

    ``node`` itself where it has four axes already, or inputs that cannot be brought to the same.

    >>> import torch
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x): return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> program = torch.export.export(Attention(), (torch.zeros(3, 5, 4),))
    >>> node = program.graph.output_node().args[0][0]
    >>> made = with_four_axes(node)
    >>> made.meta["val"].shape, [user.name for user in made.users]
    (torch.Size([1, 3, 5, 4]), ['squeeze_dim'])
    """
    inputs: list[Any] = list(node.args[:3])
    rank, write = node.meta["val"].dim(), AtenCalls(node)
    shapes = [x.meta["val"].shape for x in inputs]
    if rank == _AXES or any(len(shape) != rank for shape in shapes):
        return node
    if rank > _AXES:
        return _with_one_front(node, inputs)
    more = _AXES - rank
    for _ in range(more):
        inputs = [write.unsqueeze(x, 0) for x in inputs]
    made: fx.Node = write.call(node.target, *inputs, *node.args[3:], **node.kwargs)
    result = made
    for _ in range(more):
        result = write.call(overload("squeeze", "dim"), result, 0)
    replace(node, result)
    return made


def _with_one_front(node: fx.Node, inputs: list[Any]) -> fx.Node:
    write, sizes = AtenCalls(node), sizes_of(node)
    front = node.meta["val"].shape[:-3]
    given = (*node.args[3:], *node.kwargs.values())
    masks = [value for value in given if isinstance(value, fx.Node)]
    is_free = any(not isinstance(size, int) for size in sizes)  # of more than one axis
    others = [*inputs, *[mask for mask in masks if mask.meta["val"].dim() >= _AXES]]
    if is_free or not all(same_sizes(x.meta["val"].shape[:-3], front) for x in others):
        return node
    flat = {x: write.flatten(x, 0, -_AXES) for x in others}
    made: fx.Node = write.call(
        node.target,
        *[flat.get(value, value) if isinstance(value, fx.Node) else value for value in node.args],
        **{k: flat.get(v, v) if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()},
    )
    replace(node, write.reshape(made, sizes))
    return made
