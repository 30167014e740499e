"""What OpenVINO's CPU plugin (2026.4) computes wrong, slowly or not at all, and what is written instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer, drop_unused
from backquant.deploy.openvino.joins import put_after
from backquant.errors import ExportError
from backquant.lower.machine import machine_facts

# Biases as OpenVINO (2026.4) takes them.
#
# A bias of its own for each convolution: OpenVINO leaves one that several convolutions read out of their
# kernels, and computes it, and what would be fused behind it, in a generated kernel on floats.


_BIAS = 2
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: What moves values, and sums of them: OpenVINO takes scales through these.
_MOVES = frozenset(
    [
        *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "Split"),
        *("Concat", "Expand", "Pad", "Tile", "ReduceMean", "ReduceSum"),
    ]
)
_LEAST = np.float32(2.0**-126)  # the smallest normal number


def separate_biases(model: Any) -> None:
    """Give every convolution but the first that reads a bias a copy of it. Changes an ``onnx_ir.Model``."""
    read: set[str] = set()
    for node in model.graph:
        if node.op_type not in _CONVOLUTIONS or len(node.inputs) <= _BIAS:
            continue
        bias = node.inputs[_BIAS]
        if bias is None or bias.const_value is None:
            continue
        if bias.name in read:
            copied = add_initializer(model, bias.const_value.numpy(), bias.name)
            node.replace_input_with(_BIAS, copied)
        read.add(bias.name)


def keep_zero_biases(model: Any) -> None:
    """Give layers without a bias, or with one of zeros, a bias that adds nothing.

    OpenVINO moves the scales of such a layer behind what moves its result (``Reshape`` and the like), and
    throws where sizes of 1 or new dimensions make that ambiguous: layers of one token, ``unfold``. With
    a bias that is not zero it leaves them: ``_LEAST`` changes no float above 1e-30. Changes an
    ``onnx_ir.Model``.
    """
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "Conv") or not _has_integer_weight(node):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) == 1 and readers[0].op_type == "Add":
            _replace_zeros(model, readers[0])
        elif any(reader.op_type in _MOVES for reader in readers):
            if node.op_type == "MatMul":
                _add_nothing(model, node)
            elif len(node.inputs) == _BIAS:
                node.resize_inputs(_BIAS + 1)
                node.replace_input_with(_BIAS, _nothing(model, node, 0))


def _nothing(model: Any, layer: Any, axis: int) -> Any:
    width = int(layer.inputs[1].producer().inputs[0].shape[axis])
    return add_initializer(model, np.full(width, _LEAST), f"{layer.name}/no_bias")


def _add_nothing(model: Any, product: Any) -> None:
    import onnx_ir as ir

    result = product.outputs[0]
    adds = ir.Node("", "Add", [result, _nothing(model, product, -1)], name=f"{product.name}/bias")
    adds.metadata_props.update(product.metadata_props)
    biased = adds.outputs[0]
    biased.name, biased.type, biased.shape = f"{result.name}_biased", result.type, result.shape
    model.graph.insert_after(product, adds)
    result.replace_all_uses_with(biased, replace_graph_outputs=True)
    adds.replace_input_with(0, result)


def _has_integer_weight(product: Any) -> bool:
    source = product.inputs[1].producer()
    return (
        source is not None
        and source.op_type == "DequantizeLinear"
        and source.inputs[0].const_value is not None
    )


def _replace_zeros(model: Any, adds: Any) -> None:
    """The constant zeros that ``adds`` adds, where something that moves values reads its result."""
    if not any(use.node.op_type in _MOVES for use in adds.outputs[0].uses()):
        return
    for place, value in enumerate(adds.inputs):
        held = None if value.const_value is None else value.const_value.numpy()
        if held is not None and held.dtype == np.float32 and not held.any():
            bias = add_initializer(model, np.full(held.shape, _LEAST), f"{adds.name}/zeros")
            adds.replace_input_with(place, bias)


# Reductions whose result is scaled by channel, and then quantized.
#
# OpenVINO (2026.4) makes one quantization, with a range for each channel, of a batch norm, factor or addend
# and of the quantization behind it, and computes it at the end of the reduction before it. Where the reduced
# axes are left out of the result it mixes up the channels. So they are kept, with length one, and left out
# behind.

_SCALING = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})
_AXES = 1  # the input that names them


def keep_reduced_axes(model: Any) -> None:
    """Write such reductions so. Changes an ``onnx_ir.Model``."""
    import onnx_ir

    for node in list(model.graph):
        if not node.op_type.startswith("Reduce") or len(node.inputs) <= _AXES:
            continue
        keeps = node.attributes.get("keepdims")
        if (keeps is None or keeps.as_int()) or not _is_scaled_and_quantized(node):
            continue
        node.attributes["keepdims"] = onnx_ir.AttrInt64("keepdims", 1)
        value = node.outputs[0]
        readers, shape = list(value.uses()), value.shape
        shorter = put_after(model, node, "Squeeze", node.inputs[_AXES])
        value.shape, shorter.shape = None, shape
        for reader in readers:
            reader.node.replace_input_with(reader.idx, shorter)


def _is_scaled_and_quantized(node: Any) -> bool:
    """Whether one node after another scales the result, which nothing else reads, up to a quantization."""
    scaled = False
    while True:
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return False
        node = uses[0].node
        if node.op_type not in _SCALING:
            return scaled and node.op_type == "QuantizeLinear"
        scaled = True


# Tables of embeddings whose rows are scaled: the factor goes into the table.
#
# OpenVINO (2026.4) takes ``Gather(table) * factor`` for compressed weights that are decompressed, and throws
# while it folds what is quantized behind them (Speech2Text). The products are the same floats, computed once.

_LARGE = 1 << 24  # elements of a table that others read, too: a copy of more is not worth it


def scale_tables(model: Any) -> None:
    """Fold factors of one number that alone read rows of a table. Changes an ``onnx_ir.Model``."""
    changed = False
    for node in list(model.graph):
        if node.op_type != "Gather" or not _is_table(node.inputs[0]):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if len(readers) == 1 and readers[0].op_type == "Mul":
            changed |= _fold(model, node, readers[0])
    if changed:
        drop_unused(model)


def _is_table(value: Any) -> bool:
    held = None if value is None else value.const_value
    if held is None or str(held.dtype.name) != "FLOAT":
        return False
    return len(held.shape) == 2 and (len(value.uses()) == 1 or held.size <= _LARGE)


def _fold(model: Any, gather: Any, product: Any) -> bool:
    rows = gather.outputs[0]
    factor = next((value for value in product.inputs if value is not rows), None)
    if factor is None or factor.const_value is None or factor.const_value.size != 1:
        return False
    if rows.shape is None or len(factor.const_value.shape) > len(rows.shape):
        return False
    number = factor.const_value.numpy().astype(np.float32).reshape(())
    table = gather.inputs[0]
    scaled = table.const_value.numpy() * number
    gather.replace_input_with(0, add_initializer(model, scaled, f"{table.name}/scaled"))
    product.outputs[0].replace_all_uses_with(rows, replace_graph_outputs=True)
    model.graph.remove(product, safe=True)
    return True


# Integers of their own for each product whose result is scaled, where several read one weight.
#
# A layer that is called several times (a recurrent cell, step by step) has one weight in the file. OpenVINO
# (2026.4) takes a number that its result is multiplied with (``1.7159 * tanh(0.666 * layer(x))``) into the
# weight, and where others read the weight, too, it computes the product in floats.

_PRODUCTS = frozenset({"MatMul", "Gemm"})
_WEIGHT = 1


def separate_weights(model: Any) -> None:
    """Copy a weight for each such product but one. Changes an ``onnx_ir.Model``."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0].const_value is None:
            continue
        uses = list(node.outputs[0].uses())
        scaled = [use for use in uses if use.idx == _WEIGHT and _is_scaled(use.node)]
        kept = 1 if len(scaled) == len(uses) else 0
        for use in scaled[kept:]:
            use.node.replace_input_with(_WEIGHT, _copied(model, node, use.node))


def _is_scaled(product: Any) -> bool:
    """Whether the result of a product, with its bias added, is multiplied with a constant."""
    if product.op_type not in _PRODUCTS:
        return False
    reader = _only_reader(product)
    if reader is not None and reader.op_type == "Add" and _reads_constant(reader):
        reader = _only_reader(reader)
    return reader is not None and reader.op_type in ("Mul", "Div") and _reads_constant(reader)


def _only_reader(node: Any) -> Any:
    uses = node.outputs[0].uses()
    return uses[0].node if len(uses) == 1 else None


def _reads_constant(node: Any) -> bool:
    return any(value.const_value is not None for value in node.inputs)


def _copied(model: Any, node: Any, reader: Any) -> Any:
    import onnx_ir as ir

    integers = node.inputs[0]
    copied = add_initializer(model, integers.const_value.numpy(), integers.name)
    inputs, attributes = [copied, *node.inputs[1:]], list(node.attributes.values())
    made = ir.Node("", node.op_type, inputs, attributes=attributes, name=f"{reader.name}/weight")
    made.metadata_props.update(node.metadata_props)
    value, result = node.outputs[0], made.outputs[0]
    result.name, result.type, result.shape = f"{reader.name}/weight", value.type, value.shape
    model.graph.insert_before(reader, made)
    return result


# Bounds of clamps between integers: OpenVINO (2026.4) makes integers of them by cutting off, where the
# description rounds. So a bound is put a quarter of a step above the integer that it rounds to.

_CLAMPS = frozenset({"Clip"})
_SCALE, _ZERO_POINT = 1, 2
_BOUNDS = (1, 2)  # least, most


def shift_bounds(model: Any) -> None:
    """Give clamps that one node quantizes bounds that are cut off to the integers that they round to.

    Everything below a bound and everything in its step becomes the same integer before and after. Changes an
    ``onnx_ir.Model``.
    """
    for node in list(model.graph):
        readers = [use.node for use in node.outputs[0].uses()]
        if node.op_type not in _CLAMPS or [each.op_type for each in readers] != ["QuantizeLinear"]:
            continue
        scale, zero_point = (_constant(readers[0].inputs[at]) for at in (_SCALE, _ZERO_POINT))
        if scale is None or zero_point is None or scale.size != 1:
            continue
        for at in _BOUNDS:
            bound = _constant(node.inputs[at]) if len(node.inputs) > at else None
            if bound is not None:
                step = scale.astype(np.float64).reshape(())
                places = np.rint(bound.astype(np.float64) / step) + 0.25
                made = (places * step).astype(bound.dtype)
                node.replace_input_with(at, add_initializer(model, made, node.inputs[at].name))


def _constant(value: Any) -> Any:
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


# Convolutions that OpenVINO never finishes to compile.
#
# Depthwise ones of 16 channels with 14 taps and more along the last axis (2026.4; docs/kernels.md): its
# oneDNN writes code without end, for integers, which the description leaves out, and for bfloat16, in
# which OpenVINO computes what is float where the CPU has it.

_CHANNELS, _TAPS = 16, 14


def check_ends(nodes: Iterable[Any]) -> None:
    """Raise ``ExportError`` if one of the nodes, of an ONNX graph, is such a convolution, and the CPU has
    bfloat16."""
    if not machine_facts().capabilities.get("avx512_bf16"):
        return
    for node in nodes:
        if node.op_type == "Conv" and never_ends(node):
            raise ExportError(
                "OpenVINO never finishes to compile a depthwise convolution of 16 channels with 14 taps or "
                "more along its last axis on this CPU, not even in float",
                where=f"node {node.name}",
                fix='backend="onnxruntime", which runs it on integers',
            )


def never_ends(node: Any) -> bool:
    """Whether ``node`` is such a convolution.

    >>> import onnx_ir
    >>> weight = onnx_ir.Value(name="w", shape=onnx_ir.Shape([16, 1, 1, 16]))
    >>> node = onnx_ir.node("Conv", [onnx_ir.Value(name="x"), weight], {"group": 16})
    >>> never_ends(node)
    True
    """
    shape = node.inputs[1].shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    attributes = node.attributes
    last = [attributes.get_ints(name, [1])[-1] for name in ("strides", "dilations")]
    depthwise = attributes.get_int("group", 1) == shape[0] == _CHANNELS
    return bool(depthwise and last == [1, 1] and shape[-1] >= _TAPS)
