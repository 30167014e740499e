"""The target ``litert``: ``.tflite`` files, read back from LiteRT's interpreter and compared with the model.

Option: ``channels_last`` (inputs and outputs of four axes are stored with their channels last).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from backquant.deploy.edits import arguments
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.litert import arithmetic, convolutions, moves, norms, pools
from backquant.deploy.litert.convolutions import bias_of, has_integer_weight, stored_weight
from backquant.deploy.litert.emitter import (
    Call,
    Layout,
    Rule,
    Table,
    UnsupportedError,
    Value,
    activation,
    plain,
)
from backquant.deploy.litert.lowering import FILLED, Lowering
from backquant.deploy.litert.network import CHANNELS_LAST, Array, Network, Tensor, to_bytes
from backquant.deploy.program import Program, origins_of_stacks
from backquant.deploy.roundings import other_dtypes, unstated_rounding
from backquant.deploy.target import Requirement
from backquant.errors import ExportError
from backquant.graph.silence import quiet
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

# What the interpreter runs of a ``.tflite`` file: each operator, its types, and whether XNNPACK takes it.

_CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")
_INTEGERS = ("int8", "int16", "uint8")
_DELEGATE = "DELEGATE"


@dataclass(frozen=True)
class ReadOperator:
    """One operator of the file, in its order. ``inputs``, ``output``: dtypes of its tensors;
    ``delegated``: XNNPACK runs it where that is compiled in."""

    code: str
    inputs: tuple[str, ...]
    output: str
    delegated: bool

    @property
    def is_integer(self) -> bool:
        """Whether it computes on integers, or moves them: a conversion between dtypes does not, nor does
        a kernel that reads floats."""
        if self.code in _CONVERSIONS and not set(self.inputs) <= set(_INTEGERS):
            return False
        if self.code == "DEQUANTIZE":
            return False
        return self.output in _INTEGERS or (
            bool(self.inputs) and self.inputs[0] in _INTEGERS and self.output != "float32"
        )

    @property
    def dtype(self) -> str:
        """The dtype that it computes in."""
        return self.output if self.is_integer or not self.inputs else self.inputs[0]


def interpreter_of(
    content: bytes, *, reference: bool = False, delegates: bool = True, threads: int = 1
) -> Any:
    """The interpreter of a file. ``reference``: LiteRT's reference kernels; ``delegates``: XNNPACK's,
    where they are."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kind = OpResolverType.AUTO
    if reference:
        kind = OpResolverType.BUILTIN_REF
    elif not delegates:
        kind = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    return Interpreter(
        model_content=content, experimental_op_resolver_type=kind, num_threads=threads
    )


def read_back(content: bytes) -> list[ReadOperator]:
    """The operators of a file, as the interpreter has them."""
    plain = interpreter_of(content, delegates=False)
    plain.allocate_tensors()
    fast = interpreter_of(content)
    fast.allocate_tensors()
    taken = _delegated(fast._get_ops_details())
    types = {each["index"]: np.dtype(each["dtype"]).name for each in plain.get_tensor_details()}
    found = []
    for each in plain._get_ops_details():
        inputs = tuple(types[int(i)] for i in each["inputs"] if int(i) in types)
        outputs = [types[int(i)] for i in each["outputs"] if int(i) in types]
        delegated = each["op_name"] != _DELEGATE and each["index"] in taken
        found.append(
            ReadOperator(each["op_name"], inputs, outputs[0] if outputs else "", delegated)
        )
    return found


def _delegated(details: Sequence[Mapping[str, Any]]) -> set[int]:
    """The operators that delegates replaced: what computes their outputs from their inputs."""
    makers = {
        int(output): each
        for each in details
        if each["op_name"] != _DELEGATE
        for output in each["outputs"]
    }
    found: set[int] = set()
    for delegate in details:
        if delegate["op_name"] != _DELEGATE:
            continue
        given = {int(each) for each in delegate["inputs"]}
        pending = [int(each) for each in delegate["outputs"]]
        while pending:
            maker = makers.get(pending.pop())
            if maker is not None and maker["index"] not in found:
                found.add(maker["index"])
                pending += [int(each) for each in maker["inputs"] if int(each) not in given]
    return found


class LoadedFile:
    """See ``backquant.deploy.session.Loaded``: arrays as the model takes and gives them, which a file
    with its channels last takes and gives in another order."""

    def __init__(self, content: bytes, *, reference: bool = False, threads: int = 1) -> None:
        self.interpreter = interpreter_of(content, reference=reference, threads=threads)
        self._channels_last = _is_channels_last(content)
        self._inputs = self.interpreter.get_input_details()
        self._outputs = self.interpreter.get_output_details()
        self._shapes: list[tuple[int, ...]] = []

    @property
    def inputs(self) -> dict[str, list[int | None]]:
        """The sizes of each input; free ones are ``None``."""
        found = {}
        for each in self._inputs:
            sizes = [None if size == -1 else int(size) for size in each["shape_signature"]]
            if self._channels_last and len(sizes) == 4:
                sizes = [sizes[0], sizes[3], *sizes[1:3]]
            found[each["name"]] = sizes
        return found

    def run(self, inputs: Sequence[Any]) -> list[Array]:
        """One call."""
        given = zip(inputs, self._inputs, strict=True)
        arrays = [self._as_stored(np.asarray(value), each) for value, each in given]
        shapes = [array.shape for array in arrays]
        if shapes != self._shapes:
            for each, array in zip(self._inputs, arrays, strict=True):
                self.interpreter.resize_tensor_input(each["index"], array.shape, strict=True)
            self.interpreter.allocate_tensors()
            self._shapes = shapes
        for each, array in zip(self._inputs, arrays, strict=True):
            self.interpreter.set_tensor(each["index"], array)
        self.interpreter.invoke()
        return [self._as_given(each) for each in self._outputs]

    def _as_stored(self, array: Array, detail: Mapping[str, Any]) -> Array:
        if self._channels_last and array.ndim == 4:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        return array.astype(detail["dtype"])

    def _as_given(self, detail: Mapping[str, Any]) -> Array:
        array = self.interpreter.get_tensor(detail["index"])
        if self._channels_last and array.ndim == 4:
            array = array.transpose(0, 3, 1, 2)
        return np.asarray(array)


def _is_channels_last(content: bytes) -> bool:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    names = (model.Metadata(place).Name() for place in range(model.MetadataLength()))
    return CHANNELS_LAST.encode() in names


# Linear layers, products of matrices, and tables.
#
# 1. A linear layer that reads a flattened image with its channels last has the columns of its weight in
# that order.
# 2. A matrix whose last two axes are swapped is read so by the kernel.
TABLE = Table()
_MOST_AXES = 5  # of the kernel of matrix products


@TABLE.rule("linear", has_integer_weight(0), fuses=True)
def _linear(call: Call) -> Value:
    value = call.read("input")
    rank = len(value.shape)
    layout = value.layout if value.layout[-1] == rank - 1 else plain(rank)
    source = call.emitter.laid(value, layout)
    if call.constant("weight") is None:
        return _by_computed(call, source, layout)

    def arrange(weight: Array) -> Array:
        """Rule 1."""
        return weight if value.columns is None else np.ascontiguousarray(weight[:, value.columns])

    weight = stored_weight(call, arrange, 0)
    with_bias = call.has("bias") or call.integer
    bias = bias_of(call, source, weight, weight.shape[0]) if with_bias else None
    return call.emit(
        "FULLY_CONNECTED",
        (source, weight, bias),
        layout,
        keepNumDims=rank != 2,
        fusedActivationFunction=activation(call),
    )


def _by_computed(call: Call, source: Tensor, layout: Layout) -> Value:
    if call.has("bias"):
        raise UnsupportedError("a linear layer whose weight is computed")
    weight = call.emitter.laid(call.read("weight"), (0, 1))
    return call.emit("BATCH_MATMUL", (source, weight), layout, adjY=True)


def _few_axes(call: Call) -> bool:
    return len(call.shape) <= _MOST_AXES


@TABLE.rule("matmul bmm mm", _few_axes)
def _matmul(call: Call) -> Value:
    second = "mat2" if "mat2" in call.args else "other"
    values = call.read("self"), call.read(second)
    if min(len(value.shape) for value in values) < 2:
        raise UnsupportedError("a product with a vector")
    (one, adjoint_x), (two, adjoint_y) = (_matrix(call, value) for value in values)
    return call.emit("BATCH_MATMUL", (one, two), adjX=adjoint_x, adjY=adjoint_y)


def _matrix(call: Call, value: Value) -> tuple[Tensor, bool]:
    """The operand with its axes in order, and whether its last two are swapped; rule 2."""
    rank = len(value.shape)
    if value.layout == (*range(rank - 2), rank - 1, rank - 2):
        return value.tensor, True
    return call.emitter.laid(value, plain(rank)), False


@TABLE.rule("embedding")
def _embedding(call: Call) -> Value:
    rank = len(call.shape)
    places = call.emitter.laid(call.read("indices"), plain(rank - 1))
    return call.emit("GATHER", (call.read("weight").tensor, places), axis=0)


#: What LiteRT's kernels have: XNNPACK's, those that round twice, those that round once.
_ARITHMETIC = (
    ("float", "half_even"),
    ("fixed_point_twice", "half_even"),
    ("fixed_point", "half_up"),
    ("fixed_point_16", "half_up"),
    ("float", "half_up"),
    ("float", "half_away"),
)


class LiteRTTarget:
    """See the module; the attributes are those of ``backquant.deploy.Target``."""

    name = "litert"
    backend = "litert"
    suffixes = (".tflite",)
    extra = "litert"
    requires = (
        Requirement("ai-edge-litert", "ai_edge_litert", "2.0", "2.3"),
        Requirement("flatbuffers", "flatbuffers"),
    )
    options: tuple[str, ...] = ("channels_last",)

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """Activations of other dtypes, and operators that the format has not."""
        stated = unstated_rounding(job, "LiteRT", arithmetic=_ARITHMETIC)
        wrong = other_dtypes(job, "LiteRT", self.backend, torch.int8, torch.int16)
        return [*stated, *wrong, *_unknown(job)]

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write, and read back."""
        network, content = written_file(job)
        path.write_bytes(content)
        return _report(job, network, read_back(content))

    def loaded(self, path: Path) -> LoadedFile:
        """See ``backquant.deploy.session``."""
        return LoadedFile(path.read_bytes())


def written_file(job: ExportJob) -> tuple[Network, bytes]:
    """The network of a job, and its bytes. Raises ``ExportError`` for what the format cannot express."""
    program = decomposed(job.program)
    last = bool(job.options.get("channels_last"))
    try:
        network = Lowering(program, RULES, last).run()
    except UnsupportedError as error:
        if error.node is None:
            raise
        raise _refused(job, program, error.node, error) from error
    return network, to_bytes(network, channels_last=last)


def _refused(job: ExportJob, program: Program, node: fx.Node, error: Exception) -> ExportError:
    origin = program.origins.get(node.name, node.name)
    return ExportError(
        f"LiteRT has no counterpart for {node.target}: {error}",
        where=job.place_of(origin) or origin,
        fix="write that part with other operators, or keep it outside of the exported model",
    )


def _report(job: ExportJob, network: Network, found: Sequence[ReadOperator]) -> Written:
    kernels = []
    for operation, read in zip(network.operations, found, strict=True):
        nodes = (operation.node,) if operation.node else ()
        name = f"{read.code}{' (XNNPACK)' if read.delegated else ''}"
        kernels.append(TargetKernel(name, nodes, read.dtype, integer=read.is_integer))
    runtime = f"ai-edge-litert {metadata.version('ai-edge-litert')}"
    return Written(runtime, tuple(kernels), undelegated=tuple(_transposes(job, network)))


def _transposes(job: ExportJob, network: Network) -> Iterator[Reason]:
    for node in (each.node for each in network.transposes_inside()):
        yield Reason(
            node or "output",
            ReasonCode.NOT_DELEGATED,
            asked="no transpose inside",
            admitted="values are moved to another layout",
            place=job.place_of(node),
        )


def _unknown(job: ExportJob) -> Iterator[Reason]:
    program = decomposed(job.program)
    for node in unknown(program):
        yield Reason(
            program.origins.get(node.name, node.name),
            ReasonCode.NO_KERNEL,
            asked=_name(node.target),
            admitted="LiteRT has no operator for it, nor for what it is computed with",
            fix="write it with other operators, or keep it outside of the exported model",
        )


def _name(target: Any) -> str:
    return str(target).removeprefix("torch.ops.")


TARGET = LiteRTTarget()

# All rules, and the operators that are taken apart first because there is none for them.
RULES = Table(
    convolutions.TABLE | TABLE | arithmetic.TABLE | moves.TABLE | norms.TABLE | pools.TABLE
)
_PARTS = {**moves.PARTS, **norms.PARTS}
_OURS = ("quantized_decomposed", "backquant")
_ROUNDS = 4  # what a decomposition gives may have one itself


def _taken(call: Call) -> Value:
    """An item of what gives several results."""
    source, index = call.node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source.target not in _PARTS:
        raise UnsupportedError("LiteRT has no operator for it")
    call.args = arguments(source)
    return _PARTS[source.target](call, source, index)


def _moves(call: Call) -> bool:
    source = call.node.args[0]
    return isinstance(source, fx.Node) and source.target in moves.PARTS


RULES[operator.getitem] = Rule(_taken, _moves, keeps=True, moves=True)


def decomposed(program: Program) -> Program:
    """``program`` with operators that have no rule written as those that torch computes them with."""
    known: dict[Any, Any] = {**decomposition_table, **torch.export.default_decompositions()}
    for _ in range(_ROUNDS):
        targets = {node.target for node in unknown(program)}
        table = {target: known[target] for target in targets if target in known}
        if not table:
            return program
        with quiet(), torch.no_grad():
            exported = program.exported.run_decompositions(table)
        program = replace(program, exported=exported, origins=origins_of_stacks(exported.graph))
    return program


def unknown(program: Program) -> list[fx.Node]:
    """The calls without a rule that depend on an input."""
    depends: set[fx.Node] = set()
    inputs = set(program.exported.graph_signature.user_inputs)
    found = []
    for node in program.exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in inputs:
                depends.add(node)
        elif depends.intersection(node.all_input_nodes):
            depends.add(node)
            if node.op == "call_function" and _lacks_rule(node):
                found.append(node)
    return found


def _lacks_rule(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target.namespace in _OURS or target in RULES or target in FILLED:
        return False
    if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
        return False  # a number
    return target not in _PARTS
