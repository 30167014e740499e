"""What OpenVINO's CPU plugin (2026.4) computes wrong, slowly or not at all, and what is written instead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from backquant.deploy.exported import TargetKernel
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    array_of,
    comes_from,
    graph_of,
    input_of,
    inputs_of,
    only_reader,
    readers_of,
    replace,
    rewrite,
)
from backquant.deploy.openvino.session import OpenVinoSession
from backquant.deploy.roundings import float_tensors, ratio
from backquant.errors import ExportError
from backquant.lower.machine import machine_facts

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["check_amx"]


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
_END = 2**63 - 1  # of a slice: the last place


def separate_biases(model: Any) -> None:
    """Give every convolution but the first that reads a bias a copy of it. Changes an ``onnx_ir.Model``."""
    read: set[str] = set()

    def separate(node: ir.Node) -> None:
        bias = input_of(node, _BIAS)
        array = array_of(bias)
        if array is not None and bias.name in read:
            node.replace_input_with(_BIAS, OnnxCalls(node).constant(array, bias.name))
        elif array is not None:
            read.add(bias.name)

    rewrite(model, dict.fromkeys(_CONVOLUTIONS, separate))


def keep_zero_biases(model: Any) -> None:
    """Give layers without a bias, or with one of zeros, a bias that adds nothing.

    OpenVINO moves the scales of such a layer behind what moves its result (``Reshape`` and the like), and
    throws where sizes of 1 or new dimensions make that ambiguous: layers of one token, ``unfold``. Where
    several read the result, it moves them behind one, and leaves them before it for the others: that one is
    scaled twice. With a bias that is not zero it leaves them: ``_LEAST`` changes no float above 1e-30.
    Changes an ``onnx_ir.Model``.
    """
    rewrite(model, dict.fromkeys(("MatMul", *_CONVOLUTIONS), _with_bias))


def _with_bias(node: ir.Node) -> Any:
    dequantize, write = comes_from(node.inputs[1], "DequantizeLinear"), OnnxCalls(node)
    if dequantize is None:
        return None
    weight = dequantize.inputs[0].const_value
    if weight is None:  # a product of two activations
        return _with_nothing(node, write.constant(_LEAST)) if _is_read_often(node) else None
    readers = readers_of(node)
    if [reader.op_type for reader in readers] == ["Add"]:
        _replace_zeros(readers[0])
        return None
    convolves = node.op_type in _CONVOLUTIONS
    if not _is_moved(node) or (convolves and len(node.inputs) > _BIAS):
        return None
    width = weight.shape[0 if node.op_type == "Conv" else -1]
    if node.op_type == "ConvTranspose":
        width = weight.shape[1] * node.attributes.get_int("group", 1)
    nothing = write.constant(np.full(width, _LEAST))
    return write.again(*node.inputs, nothing) if convolves else _with_nothing(node, nothing)


def _with_nothing(node: ir.Node, nothing: Any) -> Any:
    product = OnnxCalls(node).again()
    product.shape = node.outputs[0].shape
    return OnnxCalls(node).Add(product, nothing)


def _is_moved(node: ir.Node) -> bool:
    """Whether OpenVINO would move the scales of ``node`` behind what reads it, and should not."""
    moves = any(reader.op_type in _MOVES for reader in readers_of(node))
    return (moves and node.op_type != "ConvTranspose") or _is_read_often(node)


def _is_read_often(node: ir.Node) -> bool:
    """Whether several read what ``node`` gives, or what scales are moved through behind it."""
    while (reader := only_reader(node, *_PASSED)) is not None:
        node = reader
    return len(readers_of(node)) + node.outputs[0].is_graph_output() > 1


def _replace_zeros(adds: Any) -> None:
    """The constant zeros that ``adds`` adds, where something that moves values reads its result."""
    if not _is_moved(adds):
        return
    for place, held in enumerate(map(array_of, adds.inputs)):
        if held is not None and held.dtype == np.float32 and not held.any():
            adds.replace_input_with(place, OnnxCalls(adds).constant(np.full(held.shape, _LEAST)))


# Reductions whose result is scaled by channel, and then quantized.
#
# OpenVINO (2026.4) makes one quantization, with a range for each channel, of a batch norm, factor or addend
# and of the quantization behind it, and computes it at the end of the reduction before it. Where the reduced
# axes are left out of the result it mixes up the channels. So they are kept, with length one, and left out
# behind.
_SCALING = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})
_AXES = 1  # the input that names them
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def keep_reduced_axes(model: Any) -> None:
    """Write such reductions so. Changes an ``onnx_ir.Model``."""
    rewrite(model, dict.fromkeys((f"Reduce{kind}" for kind in _REDUCTIONS), _keep_axes))


def _keep_axes(node: ir.Node) -> Any:
    axes = input_of(node, _AXES)
    keeps = node.attributes.get_int("keepdims", 1)
    if axes is None or keeps or not _is_scaled_and_quantized(node):
        return None
    return OnnxCalls(node).Squeeze(OnnxCalls(node).again(keepdims=1), axes)


def _is_scaled_and_quantized(node: ir.Node) -> bool:
    """Whether one node after another scales the result, which nothing else reads, up to a quantization."""
    scaled = False
    while (node := only_reader(node, *_SCALING, "QuantizeLinear")) is not None:
        if node.op_type == "QuantizeLinear":
            return scaled
        scaled = True
    return False


# Tables of embeddings whose rows are scaled: the factor goes into the table.
#
# OpenVINO (2026.4) takes ``Gather(table) * factor`` for compressed weights that are decompressed, and throws
# while it folds what is quantized behind them (Speech2Text). The products are the same floats, computed once.
_LARGE = 1 << 24  # elements of a table that others read, too: a copy of more is not worth it


def scale_tables(model: Any) -> None:
    """Fold factors of one number that alone read rows of a table. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"Mul": _scale_table})


def _is_table(value: Any) -> bool:
    held = None if value is None else value.const_value
    if held is None or str(held.dtype.name) != "FLOAT":
        return False
    return len(held.shape) == 2 and (len(value.uses()) == 1 or held.size <= _LARGE)


def _scale_table(node: ir.Node) -> Any:
    for rows, factor in (inputs_of(node), inputs_of(node)[::-1]):
        gather, number = comes_from(rows, "Gather"), array_of(factor)
        if gather is None or number is None or number.size != 1 or rows.shape is None:
            continue
        table = gather.inputs[0]
        if _is_table(table) and len(readers_of(gather)) == 1 and number.ndim <= len(rows.shape):
            scaled = array_of(table) * number.astype(np.float32).reshape(())
            made = OnnxCalls(gather).constant(scaled, f"{table.name}/scaled")
            return OnnxCalls(gather).again(made, *gather.inputs[1:])
    return None


# Integers of their own for products that read one weight.
#
# 1. A layer that is called several times (a recurrent cell, step by step) has one weight in the file.
#    OpenVINO (2026.4) takes a number that its result is multiplied with (``1.7159 * tanh(0.666 *
#    layer(x))``) into the weight, and where others read the weight, too, it computes the product in floats.
# 2. Of two products of one value and one weight, which differ in their biases, it makes one that several
#    read: in floats, or scaled twice for one of them.
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_WEIGHT = 1


def separate_weights(model: Any) -> None:
    """Copy the weight for each such product but one. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"DequantizeLinear": _separate_weight})


def _separate_weight(node: ir.Node) -> None:
    weight, *qparams = inputs_of(node)
    if weight.const_value is None:
        return
    uses, read = list(node.outputs[0].uses()), set()
    for use in uses:
        value = use.node.inputs[0]
        if use.idx == _WEIGHT and (value in read or (len(uses) > 1 and _is_scaled(use.node))):
            write = OnnxCalls(node)
            copied = write.again(write.constant(array_of(weight), weight.name), *qparams)
            copied.shape = node.outputs[0].shape
            use.node.replace_input_with(_WEIGHT, copied)
        read.add(value)


def _is_scaled(product: Any) -> bool:
    """Whether the result of a product, with its bias added, is multiplied with a constant."""
    if product.op_type not in _PRODUCTS:
        return False
    reader = only_reader(product, "Add", "Mul", "Div")
    if reader is not None and reader.op_type == "Add" and _reads_constant(reader):
        reader = only_reader(reader, "Mul", "Div")
    return reader is not None and reader.op_type != "Add" and _reads_constant(reader)


def _reads_constant(node: ir.Node) -> bool:
    return any(value.const_value is not None for value in inputs_of(node))


# Averages with padding that is counted, of integers.
#
# OpenVINO (2026.4) pads integers with 0 in place of their zero point. A convolution of each channel has the
# same values.
def sum_padded_averages(model: Any) -> None:
    """Write such poolings so. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"AveragePool": _sum_padded})


def _sum_padded(node: ir.Node) -> Any:
    read, value = node.attributes, input_of(node, 0)
    counted = read.get_int("count_include_pad", 0) and any(read.get_ints("pads", [0]))
    integers = comes_from(value, "DequantizeLinear")
    zero_point = None if integers is None else array_of(input_of(integers, 2))
    if not counted or (zero_point is not None and not zero_point.any()):
        return None
    kernel, channels = read.get_ints("kernel_shape"), int(value.shape[1])
    weight = np.full((channels, 1, *kernel), 1 / np.prod(kernel), np.float32)
    kept = {name: read.get_ints(name, [1]) for name in ("kernel_shape", "pads", "strides")}
    write = OnnxCalls(node)
    return write.Conv(value, write.constant(weight), group=channels, **kept)


# Paddings that go round, which OpenVINO (2026.4) does not read, as what is joined: the end, all, the start.
def join_wrapped(model: Any) -> None:
    """Write such paddings so. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"Pad": _join_wrapped})


def _join_wrapped(node: Any) -> Any:
    value, sizes, write = node.inputs[0], array_of(node.inputs[1]), OnnxCalls(node)
    if node.attributes.get_string("mode", "constant") != "wrap" or sizes is None:
        return None
    for axis, (before, after) in enumerate(zip(*np.split(sizes, 2), strict=True)):
        if min(before, after) < 0:
            return None
        ends = [(-int(before), _END)] * bool(before), [(0, int(after))] * bool(after)
        last, first = (
            [
                write.Slice(value, *(write.constant([at]) for at in (*bounds, axis)))
                for bounds in each
            ]
            for each in ends
        )
        if last or first:
            value = write.Concat(*last, value, *first, axis=axis)
    return value


# Bounds of clamps between integers: OpenVINO (2026.4) makes integers of them by cutting off, where the
# description rounds. So a bound is put a quarter of a step above the integer that it rounds to.
_BOUNDS = (1, 2)  # least, most


def shift_bounds(model: Any) -> None:
    """Give clamps that one node quantizes bounds that are cut off to the integers that they round to.

    Everything below a bound and everything in its step becomes the same integer before and after. Changes an
    ``onnx_ir.Model``.
    """
    rewrite(model, {"Clip": _shift_bounds})


def _shift_bounds(node: ir.Node) -> None:
    readers = readers_of(node)
    if [reader.op_type for reader in readers] != ["QuantizeLinear"]:
        return
    scale, zero_point = (array_of(input_of(readers[0], at)) for at in (1, 2))
    if scale is None or zero_point is None or scale.size != 1:
        return
    for at in _BOUNDS:
        bound = array_of(input_of(node, at))
        if bound is not None:
            step = scale.astype(np.float64).reshape(())
            made = (np.rint(bound.astype(np.float64) / step) + 0.25) * step
            shifted = OnnxCalls(node).constant(made.astype(bound.dtype), input_of(node, at).name)
            node.replace_input_with(at, shifted)


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


def never_ends(node: ir.Node) -> bool:
    """Whether ``node`` is such a convolution.

    >>> import onnx_ir
    >>> weight = onnx_ir.Value(name="w", shape=onnx_ir.Shape([16, 1, 1, 16]))
    >>> node = onnx_ir.node("Conv", [onnx_ir.Value(name="x"), weight], {"group": 16})
    >>> never_ends(node)
    True
    """
    shape = input_of(node, 1).shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    attributes = node.attributes
    last = [attributes.get_ints(name, [1])[-1] for name in ("strides", "dilations")]
    depthwise = attributes.get_int("group", 1) == shape[0] == _CHANNELS
    return bool(depthwise and last == [1, 1] and shape[-1] >= _TAPS)


# OpenVINO's 8-bit convolutions on AMX, some of which give wrong numbers.
#
# Its copy of oneDNN has the defect of torch's (docs/kernels.md): shapes whose rule is not known. So the
# file is run on the example inputs. Where it is far from the reference model, it is run once more in a
# process whose oneDNN may not use AMX: the same runtime, file and inputs. Nearer there, the numbers of this
# CPU are wrong.

_NEAR = 20.0  # dB: results that are as near as roundings of integers leave them
_MORE = 6.0  # dB: half the noise of the amplitude is no rounding
_RUN = """
import sys
import numpy as np
import openvino
hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
model = openvino.Core().compile_model(sys.argv[1], "CPU", hints)
given = np.load(sys.argv[2])
results = model([given[name] for name in given.files])
np.savez(sys.argv[3], *(results[item] for item in model.outputs))
"""


def check_amx(job: ExportJob, path: Path, kernels: Sequence[TargetKernel]) -> None:
    """Raise ``ExportError`` if the model at ``path`` computes wrong numbers here, and right ones without AMX.

    Nothing is run where the CPU has no AMX, where it is switched off, or without integer convolutions.
    """
    convolves = any(use.kernel.startswith("Convolution") and use.integer for use in kernels)
    if not convolves or not _uses_amx():
        return
    inputs = _arrays((job.args, dict(job.kwargs)))
    with torch.no_grad():
        wanted = _arrays(job.module(*job.args, **job.kwargs))
    here = _ratio(wanted, _outputs(path, inputs))
    if here is None or here >= _NEAR:
        return
    without = _ratio(wanted, _outputs_without_amx(path, inputs))
    if without is None or without < here + _MORE:
        return
    raise ExportError(
        f"OpenVINO's 8-bit convolutions are wrong on this CPU: {here:.1f} dB to the reference model with "
        f"AMX, {without:.1f} dB without",
        where="a defect of the oneDNN in OpenVINO on CPUs with AMX, in convolutions of some shapes "
        "(docs/kernels.md)",
        fix="set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI before Python starts, here\n"
        "and wherever the file runs on such a CPU",
    )


def _uses_amx() -> bool:
    facts = machine_facts()
    limit = facts.isa_limit.upper()
    return bool(facts.capabilities.get("amx_int8")) and (not limit or "AMX" in limit)


def _arrays(value: Any) -> list[np.ndarray]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [(t.float() if t.dtype is torch.bfloat16 else t).numpy() for t in tensors]


def _outputs(path: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """What OpenVINO computes in this process; ``None`` where it does not take these inputs."""
    try:
        return OpenVinoSession(path, 1, is_exact=True).run(inputs)
    except RuntimeError:
        return None


def _outputs_without_amx(path: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The same in a process of its own, whose oneDNN reads another limit when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder, "given.npz"), Path(folder, "got.npz")
        np.savez(given, *inputs)
        command = [sys.executable, "-c", _RUN, str(path), str(given), str(got)]
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode:
            return None
        with np.load(got) as results:
            return [results[name] for name in results.files]


def _ratio(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray] | None) -> float | None:
    """The least signal-to-noise ratio of the floating-point outputs, in dB; ``None``: they do not compare."""
    found = [] if got is None else list(map(torch.as_tensor, got))
    return (
        ratio(float_tensors([*map(torch.as_tensor, wanted)]), float_tensors(found))
        if found
        else None
    )


# Fourier transforms as OpenVINO (2026.4) reads them right.
#
# 1. It takes the axis of an ONNX ``DFT`` from the attribute of opsets before 20 only. From 20 on, where the
#    axis is an input, it transforms axis 1, in silence. So others change places with that one.
# 2. One-sided transforms of real values get an axis too many. Two-sided ones are cut.
# 3. One-sided inverse transforms lose an axis. Two-sided ones, of values padded with zeros, have the same
# real    part where all but the first, and of an even number the middle one, are doubled.

_SINCE = 20  # the opset in which the axis is an input
_LENGTH, _AXIS = 1, 2  # the inputs


def plain_transforms(model: Any) -> None:
    """Write them so. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"DFT": _plain})


def _plain(node: ir.Node) -> Any:
    axis, value = _axis(node), input_of(node, 0)
    if axis is None:
        return None
    write = OnnxCalls(node)
    is_inverse, factors = node.attributes.get_int("inverse", 0), _factors(node, axis)
    if not node.attributes.get_int("onesided", 0) or (is_inverse and factors is None):
        is_read = input_of(node, _AXIS) is None or axis == 1
        return None if is_read else _transformed(write, value, axis)
    if not is_inverse:  # rule 2: of n values the first n // 2 + 1
        whole = _transformed(write, value, axis, onesided=0)
        size = write.Shape(whole, start=axis, end=axis + 1)
        half = write.Div(size, write.constant([2]))
        end = write.Add(half, write.constant([1]))
        return write.Slice(whole, write.constant([0]), end, write.constant([axis]))
    scaled = write.Mul(value, write.constant(factors))
    scaled.shape = value.shape
    real = _transformed(write, scaled, axis, onesided=0)
    return write.Slice(real, write.constant([0]), write.constant([1]), write.constant([-1]))


def _axis(node: ir.Node) -> int | None:
    """The axis that is transformed, from the front; none where it is not known."""
    shape = input_of(node, 0).shape
    if graph_of(node).opset_imports[""] < _SINCE:
        return int(node.attributes.get_int("axis", 1))
    given = input_of(node, _AXIS)
    if shape is None or (given is not None and given.const_value is None):
        return None
    return (-2 if given is None else int(array_of(given))) % len(shape)


def _factors(node: ir.Node, axis: int) -> Any:
    """Rule 3, where the lengths are known."""
    shape, length = input_of(node, 0).shape, array_of(input_of(node, _LENGTH))
    if shape is None or not isinstance(shape[axis], int) or length is None:
        return None
    if shape[axis] != int(length) // 2 + 1:
        return None
    factors = np.full(shape[axis], 2, np.float32)
    factors[0] = 1
    if int(length) % 2 == 0:
        factors[-1] = 1
    return factors.reshape(-1, *[1] * (len(shape) - axis - 1))


def _transformed(write: OnnxCalls, value: Any, axis: int, **attributes: int) -> Any:
    """The transform of ``value``: by rule 1."""
    _, length, given = (input_of(write.node, place) for place in range(3))
    if given is None or axis == 1:
        return write.again(value, *write.node.inputs[1:], **attributes)
    order = list(range(len(value.shape)))
    order[1], order[axis] = axis, 1
    made = write.again(write.Transpose(value, perm=order), length, write.constant(1), **attributes)
    return write.Transpose(made, perm=order)


# Joined values that products read as integers: OpenVINO (2026.4) rounds the parts, with one zero point for
# each place along the axis that they are joined on. Matrix products fail on that, and convolutions become
# floats unless that axis holds channels. An axis of one between the join and its rounding keeps them apart.


#
# A quantization that OpenVINO computes at the end of a maximum or minimum over axes gets partial results that
# were rounded to bytes without a sign. Of products of one value and one weight it makes one, and loses their
# addends in the quantizations behind them where sizes are free. The same axis keeps these apart.
_FUSED = _SCALING | frozenset(
    "Abs Clip Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Max Min Mish PRelu Relu Round Sigmoid "  # noqa: SIM905
    "Softplus Sqrt Tanh".split()
)


def round_whole(model: Any) -> None:
    """Let joined values that products alone read, maxima and minima, and products of one value and one
    weight be rounded so. Changes an ``onnx_ir.Model``."""
    extremes = dict.fromkeys(("ReduceMax", "ReduceMin"), _round_behind)
    products = dict.fromkeys(_PRODUCTS, _round_alike)
    rewrite(model, {"Concat": _round_joined, **extremes, **products})


def _round_joined(node: ir.Node) -> None:
    rounded = only_reader(node, "QuantizeLinear")
    back = None if rounded is None else only_reader(rounded, "DequantizeLinear")
    readers = [] if back is None else readers_of(back)
    fails = _PRODUCTS if _joins_channels(node) else _PRODUCTS | _CONVOLUTIONS
    if rounded is not None and readers and all(reader.op_type in fails for reader in readers):
        _round_apart(rounded)


def _round_alike(node: ir.Node) -> None:
    weight = array_of(node.inputs[_WEIGHT])
    others = {use.node for use in input_of(node, 0).uses() if use.idx != _WEIGHT} - {node}
    alike = (each for each in others if each.op_type in _PRODUCTS)
    if weight is not None and any(
        np.array_equal(weight, array_of(each.inputs[_WEIGHT])) for each in alike
    ):
        _round_behind(node)


def _round_behind(node: ir.Node) -> None:
    reader: Any = node
    while (reader := only_reader(reader, *_FUSED, "QuantizeLinear")) is not None:
        if reader.op_type == "QuantizeLinear":
            _round_apart(reader)
            return


def _round_apart(rounded: ir.Node) -> None:
    """Round with another axis, in front, where one node reads the integers."""
    back = only_reader(rounded, "DequantizeLinear")
    if back is not None:
        write, axis = OnnxCalls(rounded), OnnxCalls(rounded).constant([0])
        whole = write.again(write.Unsqueeze(rounded.inputs[0], axis), *rounded.inputs[1:])
        floats = OnnxCalls(back).again(whole, *back.inputs[1:])
        replace(back, OnnxCalls(back).Squeeze(floats, axis))


def _joins_channels(node: ir.Node) -> bool:
    axis, shape = node.attributes["axis"].as_int(), node.outputs[0].shape
    return axis == 1 or (shape is not None and axis + len(shape) == 1)


# Norms and sums of what was integers before: OpenVINO (2026.4) moves the scale of integers behind them.
#
# 1. A norm that takes their mean and divides by their deviation keeps its epsilon: where values are small
# it is    too small, by the square of the scale (xLSTM: 6.6 dB in place of 33). 2. Sums and means of
# integers of three axes (tokens of sequences) are right in the first sample alone.
#
# A maximum that changes nothing, which no scale passes, is put in between.

_NORMS = (
    *("GroupNormalization", "InstanceNormalization", "LayerNormalization"),
    "MeanVarianceNormalization",
)
_SUMS = ("GlobalAveragePool", "ReduceMean", "ReduceSum")

#: Operators that OpenVINO takes a scale through.
_PASSED = frozenset(
    "Reshape Transpose Flatten Squeeze Unsqueeze Slice Gather Split Identity Concat Expand Pad Tile "  # noqa: SIM905
    "MaxPool Relu Clip PRelu LeakyRelu AveragePool ReduceMax ReduceMean ReduceMin ReduceSum "
    "DepthToSpace SpaceToDepth Mul Div".split()
)
_SCALED = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm", "DequantizeLinear"})
_SEQUENCES = 3  # axes
_LEAST_FLOAT = np.finfo(np.float32).min


def keep_scales_before_norms(model: Any) -> None:
    """Put such a maximum before every norm or sum that scales could reach. Changes an ``onnx_ir.Model``."""
    rewrite(model, dict.fromkeys((*_NORMS, *_SUMS), _keep_scale))


def _keep_scale(node: ir.Node) -> None:
    value, write = input_of(node, 0), OnnxCalls(node)
    if not _comes_from_integers(value):
        return
    # rule 2; an unknown number of axes may be three
    if node.op_type in _NORMS or value.shape is None or len(value.shape) == _SEQUENCES:
        kept = write.Max(value, write.constant(_LEAST_FLOAT))
        kept.shape = value.shape
        node.replace_input_with(0, kept)


def _comes_from_integers(value: Any) -> bool:
    """Whether ``value``, a float, is what comes from integers times a scale."""
    if value is None or value.dtype is None or value.dtype.name != "FLOAT":
        return False
    pending, seen = [value], set()
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in _SCALED:
            return True
        if node.op_type in _PASSED:
            pending += [given for given in node.inputs if given is not None]
    return False
