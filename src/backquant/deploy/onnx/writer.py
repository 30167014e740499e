"""The ONNX writer: static quantization as QDQ, dynamic as integer products, weights as integers.

Other targets that read ONNX use it as it is; what differs between them is in the graph that they are
given (signed or unsigned, symmetric or not) and so in the backend's description.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backquant.deploy.edits import arguments
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.exporter import exported_to_onnx, name_nodes
from backquant.deploy.onnx.gemm import (
    settle_types,
    store_described_biases,
    store_integer_biases,
    use_integer_products,
)
from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    Rule,
    array_of,
    comes_from,
    drop_unused,
    input_of,
    name_axes,
    name_outputs,
    narrow_constants,
    rewrite,
    settle_blocks,
    transposed_blocks,
)
from backquant.deploy.onnx.roundings import described_quantize, spell_roundings
from backquant.deploy.onnx.spelled import spell_for_onnx
from backquant.deploy.onnx.translate import Table, own_translations, translations
from backquant.errors import BackquantError, ExportError, UsageError
from backquant.graph import register_quantized_decomposed
from backquant.graph.own_thread import printing_nowhere
from backquant.graph.silence import quiet
from backquant.match.refusal import described_by_node

if TYPE_CHECKING:
    import onnx_ir as ir

# The option ``opset``: the operator set that was asked for, or an error that says why not.
#
# PyTorch's exporter writes operator set 18 and converts to later ones. An earlier one (17, the last of
# TensorRT 8.6) is written where each operator of the file means there what it means in 18:
#
# 1. Operators that did not change between the two.
# 2. Reductions over constant axes, which are an attribute before 18.
# 3. ``Pad``, ``Resize``, ``Split`` and scatters that use nothing of what 18 added.

_FIRST = 17
_WRITTEN = 18  # what PyTorch's translations are written for
_SAME_INPUTS = {"Pad": 3, "Resize": 4, "ScatterElements": 3, "ScatterND": 3}
_NEW_ATTRIBUTES: Mapping[str, Mapping[str, object]] = {
    "Resize": {"antialias": 0, "axes": None, "keep_aspect_ratio_policy": "stretch"},
    "Split": {"num_outputs": None},
}
_NEW_REDUCTIONS = (b"max", b"min", "max", "min")


def asked_opset(options: Mapping[str, Any], least: int) -> int:
    """The operator set of ``options``; ``least``, which the dtypes need, where none is asked for.

    Raises ``UsageError`` for what is none, or is below ``least`` where that is above 18.

    >>> asked_opset({}, 18), asked_opset({"opset": 17}, 18)
    (18, 17)
    """
    import onnx

    asked, last = options.get("opset", least), onnx.defs.onnx_opset_version()
    is_number = isinstance(asked, int) and not isinstance(asked, bool)
    first = _FIRST if least <= _WRITTEN else least
    if is_number and first <= asked <= last:
        return int(asked)
    raise UsageError(
        f"opset is a whole number from {first} to {last} for this model, not {asked!r}",
        where=f"options={{'opset': {asked!r}}}",
        fix=f"options={{'opset': {least}}}",
    )


def check_opset(model: Any, asked: int) -> None:
    """Raise ``ExportError`` where the exporter left a model at another operator set than ``asked``."""
    made = model.opset_imports.get("", 0)
    if made != asked:
        raise ExportError(
            f"PyTorch's exporter cannot write this model in operator set {asked}: it stays at {made}",
            where=f"options={{'opset': {asked}}}",
            fix=f"options={{'opset': {made}}}",
        )


def lower_opset(model: Any, version: int) -> None:
    """From operator set 18 to ``version``, in place.

    Raises ``ExportError`` with the operators that ``version`` lacks.
    """
    import onnx

    lacking = []
    for node in list(model.graph.all_nodes()):
        if node.domain not in ("", "ai.onnx"):
            continue
        since = onnx.defs.get_schema(node.op_type, _WRITTEN).since_version
        if since > version and not _is_same(node) and not _with_axes_attribute(node):
            lacking.append(f"{node.op_type} ({node.name})")
    if lacking:
        raise ExportError(
            f"operator set {version} has no form of {lacking[0].split(' ')[0]} as the model uses it",
            where=", ".join(lacking[:3]),
            fix=f"options={{'opset': {_WRITTEN}}}, or write that part of the model with other operators",
        )
    model.opset_imports[""] = version


def _is_same(node: ir.Node) -> bool:
    """Rule 3."""
    if node.op_type not in {*_SAME_INPUTS, *_NEW_ATTRIBUTES}:
        return False
    inputs = [
        value for value in node.inputs[_SAME_INPUTS.get(node.op_type, 2) :] if value is not None
    ]
    new = _NEW_ATTRIBUTES.get(node.op_type, {})
    used = [
        n for n, plain in new.items() if n in node.attributes and node.attributes[n].value != plain
    ]
    reduction = node.attributes.get("reduction")
    if node.op_type == "Split" and _is_even(node):
        used = []
    if inputs or used or (reduction is not None and reduction.value in _NEW_REDUCTIONS):
        return False
    for name in new:
        node.attributes.pop(name, None)
    return True


def _is_even(node: ir.Node) -> bool:
    """Whether a ``Split`` without sizes gives equal parts: before 18 there are no others."""
    axis = node.attributes["axis"].value if "axis" in node.attributes else 0
    shape = input_of(node, 0).shape
    size = None if shape is None else shape[axis]
    return isinstance(size, int) and size % len(node.outputs) == 0


def _with_axes_attribute(node: ir.Node) -> bool:
    """Rule 2."""
    import onnx_ir as ir

    if not node.op_type.startswith("Reduce"):
        return False
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is not None:
        if axes.const_value is None:
            return False
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.const_value.numpy().tolist())
        node.resize_inputs(1)
    no_axes = node.attributes.pop("noop_with_empty_axes", None)
    return no_axes is None or not no_axes.value or axes is not None


OPSET = 18
_BITS_16 = (torch.int16, torch.uint16)
_LIMIT = 2**31 - 2**20  # a protobuf file holds less than 2 GiB; larger weights go beside it


def onnx_model(job: ExportJob) -> Any:
    """``job`` as an ``onnx_ir.Model``; nodes carry the names of the reference graph's nodes.

    The option ``opset`` is the ONNX operator set (default 18, where dtypes need it 19 or 21). Raises
    ``ExportError`` when the exporter has no translation for an operator.
    """
    model = _translated(job, translations())
    use_integer_products(model)
    settle_blocks(model)
    if job.qdq.additions == "sum":
        rewrite(model, {"Add": _as_sum})
    if job.qdq.bias == "int32":
        store_integer_biases(model)
    return _finished(model, job)


def qdq_model(job: ExportJob) -> Any:
    """``job`` as an ``onnx_ir.Model`` without what runtimes find their kernels by.

    Weights whose range fits into four bits are stored in them. The option ``translations`` is a table of
    one's own, as ``torch.onnx.export(custom_translation_table=...)`` takes it, or ``"module:NAME"`` of one.
    """
    narrow = _of_four_bits(job)
    table = {**translations(), **described_quantize(job), **own_translations(job)}
    model = _translated(job, table, 21 if narrow else OPSET)
    settle_blocks(model)
    narrow_constants(model, narrow)
    spell_roundings(model, job)
    return _finished(model, job)


def _translated(job: ExportJob, table: Table, least: int = OPSET) -> Any:
    register_quantized_decomposed()
    asked = asked_opset(job.options, max(least, _least_opset(job)))
    opset = max(asked, OPSET)
    try:
        with quiet(), printing_nowhere():
            spell_for_onnx(job.program.exported)
            made = exported_to_onnx(job.program.exported, table, opset)
    except Exception as error:
        raise _refused(error) from error
    name_nodes(made.model)
    settle_types(made.model)
    rewrite(made.model, FOLDS)
    rewrite(made.model, EPSILONS)
    with quiet(), printing_nowhere():
        made.optimize()
    rewrite(made.model, FOLDS)
    check_opset(made.model, opset)
    return made.model


def _finished(model: Any, job: ExportJob) -> Any:
    store_described_biases(model, described_by_node(job.plan, job.config))
    drop_unused(model)
    name_axes(model, job.dynamic_shapes)
    name_outputs(model, job.program.output_names)
    return model


def _least_opset(job: ExportJob) -> int:
    """8-bit floats came with operator set 19, groups and 16 bits with 21."""
    least = OPSET
    for node in job.program.exported.graph.nodes:
        name = str(node.target)
        is_16_bits = name.startswith("quantized_decomposed.quantize") and node.args[-1] in _BITS_16
        if name.startswith("backquant.dequantize_blocks") or is_16_bits:
            least = 21
        elif name.startswith("backquant.quantize_float8"):
            least = max(least, 19)
    return least


def _of_four_bits(job: ExportJob) -> frozenset[str]:
    """The origins of dequantize nodes whose constants have a range of four bits."""
    found = set()
    for node in job.program.exported.graph.nodes:
        if not str(node.target).startswith("quantized_decomposed.dequantize_per_"):
            continue
        given = arguments(node)
        low, high = given.get("quant_min", -128), given.get("quant_max", 127)
        fits = (low >= -8 and high <= 7) or (low >= 0 and high <= 15)
        if fits and given["input"].op == "placeholder":
            found.add(job.program.origins.get(node.name, ""))
    return frozenset(found - {""})


def save_onnx(model: Any, path: Path, job: ExportJob) -> None:
    """Write and check an ``onnx_ir.Model``; weights of 2 GiB and more go to a file beside it.

    The option ``opset`` below 18 is applied here, when the target's own rules have been."""
    import onnx
    import onnx_ir

    asked = int(job.options.get("opset", OPSET))
    if asked < OPSET:
        lower_opset(model, asked)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    external = f"{path.name}.data" if size >= _LIMIT else None
    onnx_ir.save(model, path, external_data=external)
    with quiet():
        onnx.checker.check_model(str(path), full_check=True)


def _refused(error: Exception) -> BackquantError:
    """A refusal of ours in the chain, or what the exporter said last, of which node."""
    node, said = "", [str(error)]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BackquantError):
            return cause
        said.append(str(cause))
        node = _node_in(str(cause)) or node
        cause = cause.__cause__ or cause.__context__
    if node:
        what = (
            said[-1]
            .replace("<OpOverload(op='", "")
            .replace("', overload='", ".")
            .replace("')>", "")
        )
        what = " ".join(what.split())
    else:
        what = " ".join([line.strip() for line in said[0].splitlines() if line.strip()][:4])
    return ExportError(
        f"the model cannot be written as ONNX: {what[:400]}",
        where=node or type(error).__name__,
        fix="leave the part out, or write it with operators that ONNX has",
    )


def _node_in(message: str) -> str:
    """The node of which an error of the exporter speaks: ``mul = torch.ops.aten.mul.Scalar(x, 1j)``."""
    found = re.match(
        r"Error when translating node %(\w+) .*?target=([\w.]+)\]\(args = (.*), kwargs", message
    )
    if found is None:
        return ""
    name, target, args = found.groups()
    return f"{name} = {target}{args.replace('%', '')}"[:200]


# Float additions of two activations, written as ``Sum``: runtimes do not fuse it with the next operator.
#
# Source: ONNX operator documentation, Add-14 and Sum-13: the same result, with the same broadcasting.
def _as_sum(node: ir.Node) -> None:
    is_quantized = all(comes_from(value, "DequantizeLinear") for value in node.inputs)
    if all(map(_is_activation, node.inputs)) and not is_quantized:
        node.op_type = "Sum"


def _is_activation(value: Any) -> bool:
    """Floats, as an activation or a constant has them that is no bias: a position embedding."""
    kind, constant = value.dtype, value.const_value
    if kind is None or not kind.is_floating_point():
        return False
    return constant is None or len(constant.shape) > 1


# Additions of an epsilon and products with nearly one, kept from the exporter's optimizer.
#
# 1. It takes a number of up to 1e-8 for zero and leaves the addition out: ``log(x + 1e-15)`` became
#   ``log(x)``, infinite at zero. ``Sum`` of the same two values is not touched.
# 2. It takes a number within 1e-5 of one for one: ``1 - x / (1 + 1e-6)`` became zero at one. A tensor with an
# axis is not touched.
#
# Source: ONNX operator documentation, Add-14, Sub-14, Mul-14, Div-14 and Sum-13.
_TAKEN_FOR_ZERO = 1e-8
_TAKEN_FOR_ONE = 1.1e-5


def _keep_addend(node: ir.Node) -> None:
    one, other = map(_epsilon, node.inputs)
    if node.op_type == "Sub" and other is not None:
        node.replace_input_with(1, OnnxCalls(node).constant(np.negative(other)))
    if other is not None or (node.op_type == "Add" and one is not None):
        node.op_type = "Sum"


def _keep_factor(node: ir.Node) -> None:
    for place, value in enumerate(node.inputs):
        factor, other = _number(value), node.inputs[1 - place]
        if factor is None or (place == 0 and node.op_type == "Div"):
            continue
        has_axes = other is not None and other.shape is not None and len(other.shape) > 0
        if has_axes and 0 < abs(float(factor.item()) - 1) <= _TAKEN_FOR_ONE:
            node.replace_input_with(place, OnnxCalls(node).constant(factor.reshape(1)))


def _epsilon(value: Any) -> Any:
    """The array of a float constant that is one small number, and not zero."""
    array = _number(value)
    return array if array is not None and 0 < abs(float(array.item())) <= _TAKEN_FOR_ZERO else None


def _number(value: Any) -> Any:
    """The array of a float constant that is one number."""
    import onnx_ir as ir

    constant = None if value is None else ir.convenience.get_const_tensor(value)
    if constant is None or constant.size != 1 or not constant.dtype.is_floating_point():
        return None
    return constant.numpy()


#: Of ``x + c``, ``c + x``, ``x - c``, ``x * c``, ``c * x`` and ``x / c``.
EPSILONS: dict[str, Rule] = {
    **dict.fromkeys(("Add", "Sub"), _keep_addend),
    **dict.fromkeys(("Mul", "Div"), _keep_factor),
}


# Casts and transposes of constants, computed when the file is written.
#
# The exporter does this for small constants only; weights are larger than its limit.
def _fold_cast(node: ir.Node) -> Any:
    import onnx_ir as ir

    source, target = input_of(node, 0), ir.DataType(node.attributes["to"].as_int())
    array = array_of(source)
    if array is None or not _is_integer(source.const_value.dtype) or not _is_integer(target):
        return None
    return OnnxCalls(node).constant(array.astype(target.numpy()), node.outputs[0].name)


def _is_integer(dtype: Any) -> bool:
    return str(dtype.name).startswith(("INT", "UINT"))


def _is_stored(dtype: Any) -> bool:
    """Integers, or 8-bit floats: what weights are stored in."""
    return _is_integer(dtype) or str(dtype.name).startswith("FLOAT8")


def _fold_transpose(node: ir.Node) -> Any:
    """Weights are transposed as integers: DequantizeLinear(w, axis) → Transpose is one DequantizeLinear."""
    import onnx_ir as ir

    source = input_of(node, 0)
    dequantize = comes_from(source, "DequantizeLinear")
    arrays = [] if dequantize is None else list(map(array_of, dequantize.inputs))
    if dequantize is None or arrays[0] is None:
        return None
    order = list(node.attributes.get_ints("perm", range(arrays[0].ndim)[::-1]))
    if "block_size" in dequantize.attributes:
        return None if any(a is None for a in arrays) else transposed_blocks(dequantize, order)
    weight, scale, *zero_point = dequantize.inputs
    if not _is_stored(weight.const_value.dtype):
        return None
    write, attributes = OnnxCalls(dequantize), {}
    if scale.shape is not None and len(scale.shape) == 1:
        axis = dequantize.attributes["axis"].as_int() % arrays[0].ndim
        attributes = {"axis": order.index(axis)}
    turned = write.constant(arrays[0].transpose(order), weight.name)
    made = write.DequantizeLinear(turned, scale, *zero_point, **attributes)
    made.type, made.shape = source.type, ir.Shape(turned.shape)
    return made


#: Cast of integers, and Transpose behind a per-channel or per-tensor DequantizeLinear.
FOLDS: dict[str, Rule] = {"Cast": _fold_cast, "Transpose": _fold_transpose}
