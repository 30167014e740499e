"""Tensors and operators of a ``.tflite`` file before it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backquant.errors import ExportError

Array = NDArray[Any]

#: torch's dtypes by the name that the format has for them.
DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Scales:
    """The qparams of a tensor: one scale, or one for each slice along ``axis``."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int = 0

    @classmethod
    def one(cls, scale: float, zero_point: int) -> Scales:
        """One scale for the tensor; float32, as the format stores it.

        >>> Scales.one(0.5, 3)
        Scales(scale=(0.5,), zero_point=(3,), axis=0)
        """
        return cls((float(np.float32(scale)),), (int(zero_point),))


#: The range of integers by dtype.
LIMITS = {"INT8": (-128, 127), "INT16": (-32768, 32767)}


class Free(int):
    """A size that is free, by that of the example inputs; sums and products with it are free, too.

    >>> has_free((2, 3)), has_free((Free(2) * 4, 3))
    (False, True)
    """

    def __add__(self, other: int) -> Free:
        return Free(int(self) + int(other))

    def __mul__(self, other: int) -> Free:
        return Free(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__


def has_free(sizes: Iterable[int]) -> bool:
    """Whether one of the sizes is free."""
    return any(isinstance(size, Free) for size in sizes)


@dataclass(eq=False)
class Tensor:
    """One tensor. Free sizes of ``shape`` are ``Free``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scales: Scales | None = None
    data: Array | None = None

    @property
    def signature(self) -> tuple[int, ...]:
        """The shape with -1 where a size is free."""
        return tuple(-1 if isinstance(size, Free) else size for size in self.shape)

    @property
    def is_integer(self) -> bool:
        """Whether it holds quantized values."""
        return self.scales is not None and self.dtype in ("INT8", "INT16", "INT4")


@dataclass(eq=False)
class Operation:
    """One operator; ``node``: the node of the reference graph that it computes."""

    code: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    node: str = ""


@dataclass(eq=False)
class Network:
    """Operators in order of execution; ``input_names`` and ``output_names`` are those of the signature."""

    operations: list[Operation] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Every tensor once, inputs first."""
        found: dict[int, Tensor] = {}
        for tensor in self.inputs:
            found[id(tensor)] = tensor
        for operation in self.operations:
            for each in (*operation.inputs, *operation.outputs):
                if each is not None:
                    found[id(each)] = each
        for tensor in self.outputs:
            found[id(tensor)] = tensor
        return list(found.values())

    def name_tensors(self) -> None:
        """Give each tensor a name of its own."""
        tensors = self.tensors()
        for tensor, name in zip(tensors, _unique([each.name for each in tensors]), strict=True):
            tensor.name = name

    def drop_unread(self) -> None:
        """Leave out operators whose results nobody reads."""
        read = {id(tensor) for tensor in self.outputs}
        kept = []
        for operation in reversed(self.operations):
            if read.intersection(map(id, operation.outputs)):
                kept.append(operation)
                read.update(id(each) for each in operation.inputs if each is not None)
        self.operations = kept[::-1]

    def transposes_inside(self) -> list[Operation]:
        """Operators that move values to another layout, but for those of inputs and of outputs, where
        these are only converted in between."""
        first = {id(tensor) for tensor in self.inputs}
        for operation in self.operations:
            if operation.code in _CONVERSIONS and id(operation.inputs[0]) in first:
                first.update(map(id, operation.outputs))
        last = {id(tensor) for tensor in self.outputs}
        for operation in reversed(self.operations):
            if operation.code in _CONVERSIONS and id(operation.outputs[0]) in last:
                last.add(id(operation.inputs[0]))
        return [
            each
            for each in self.operations
            if each.code == "TRANSPOSE"
            and id(each.inputs[0]) not in first
            and id(each.outputs[0]) not in last
        ]


_CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")


def _unique(names: Sequence[str]) -> list[str]:
    """``names``, with a number after those that are there already.

    >>> _unique(["a", "b", "a"])
    ['a', 'b', 'a_1']
    """
    made: list[str] = []
    taken: set[str] = set(names)
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for name in names:
        one = name
        while one in seen or (one != name and one in taken):
            counts[name] = counts.get(name, 0) + 1
            one = f"{name}_{counts[name]}"
        seen.add(one)
        made.append(one)
    return made


# A ``Network`` as the bytes of a ``.tflite`` file, through the schema's object API.
#
# 1. Each constant is one buffer; equal bytes are stored once. Buffers lie on 16 bytes, as the schema
#    demands, so that microcontrollers read them in place.
# 2. Operators carry the version from which on a runtime has their kernel for these dtypes.
# 3. One signature, ``serving_default``, names inputs and outputs.


#: A flatbuffer addresses its content by 32-bit signed offsets.
MOST_BYTES = (1 << 31) - (1 << 20)

#: The metadata of a file whose inputs and outputs of four axes have their channels last.
CHANNELS_LAST = "backquant.channels_last"
_SIGNATURE = "serving_default"

#: The operators that have options; their class in the schema is called as they are, but for these.
_WITH_OPTIONS = {
    *("ADD", "ARG_MAX", "ARG_MIN", "AVERAGE_POOL_2D", "BATCH_MATMUL", "CAST", "CONCATENATION"),
    *("CONV_2D", "CUMSUM", "DEPTHWISE_CONV_2D", "DEPTH_TO_SPACE", "DIV", "FULLY_CONNECTED"),
    *("GATHER", "GELU", "LEAKY_RELU", "MAX_POOL_2D", "MEAN", "MIRROR_PAD", "MUL", "PACK"),
    *("REDUCE_MAX", "REDUCE_MIN", "RESHAPE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
    *("SOFTMAX", "SPACE_TO_DEPTH", "STRIDED_SLICE", "SUB", "SUM", "TRANSPOSE_CONV"),
}
_CLASSES = {
    "BATCH_MATMUL": "BatchMatMul",
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), "Pool2D"),
    **dict.fromkeys(("MEAN", "REDUCE_MAX", "REDUCE_MIN", "SUM"), "Reducer"),
}

#: Rule 2: the versions of operators on float32, and on int8; what is not listed has 1 and 2.
_VERSIONS = {
    "BROADCAST_TO": (2, 2),
    "CONV_2D": (1, 3),
    "DEPTHWISE_CONV_2D": (2, 3),
    "FULLY_CONNECTED": (5, 5),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "TRANSPOSE_CONV"), (3, 3)),
    **dict.fromkeys(("DEPTH_TO_SPACE", "ELU", "PRELU", "QUANTIZE", "RESHAPE"), (1, 1)),
    **dict.fromkeys(("HARD_SWISH", "SELECT_V2"), (1, 1)),
}


def to_bytes(network: Network, *, channels_last: bool = False) -> bytes:
    """The file; ``channels_last``: its inputs and outputs are, and the file says so. Raises
    ``ExportError`` where it would be larger than the format allows."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    _check_size(network)
    writer = _Writer(schema)
    model = writer.model(network)
    if channels_last:
        note = schema.MetadataT()
        note.name, note.buffer = CHANNELS_LAST, 0
        model.metadata = [note]
    builder = _builder(flatbuffers)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _check_size(network: Network) -> None:
    size = sum(t.data.nbytes for t in network.tensors() if t.data is not None)
    if size > MOST_BYTES:
        raise ExportError(
            f"the weights take {size / 1e9:.1f} GB, and a .tflite file holds 2 GB",
            where="export",
            fix="quantize more of the model, or export its parts one by one",
        )


def _builder(flatbuffers: Any) -> Any:
    """Rule 1: vectors of bytes are the buffers."""

    class Aligned(flatbuffers.Builder):
        def CreateNumpyVector(self, x: Any) -> Any:  # noqa: N802 - the builder's name
            if x.dtype != np.uint8:
                return super().CreateNumpyVector(x)
            self.StartVector(1, x.size, 16)
            first = int(self.Head()) - x.size
            self.head = first
            self.Bytes[first : first + x.size] = x.tobytes()
            self.vectorNumElems = x.size
            return self.EndVector()

    return Aligned(1 << 20)


class _Writer:
    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.buffers: list[Any] = [schema.BufferT()]
        self.known: dict[bytes, int] = {}
        self.codes: dict[tuple[str, int], int] = {}

    def model(self, network: Network) -> Any:
        schema = self.schema
        tensors = network.tensors()
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        graph = schema.SubGraphT()
        graph.name = "main"
        graph.tensors = list(map(self.tensor, tensors))
        graph.inputs = [places[id(tensor)] for tensor in network.inputs]
        graph.outputs = [places[id(tensor)] for tensor in network.outputs]
        graph.operators = [self.operator(each, places) for each in network.operations]
        made = schema.ModelT()
        made.version = 3
        made.description = "backquant"
        made.subgraphs = [graph]
        made.operatorCodes = [self.code(*key) for key in self.codes]
        made.buffers = self.buffers
        made.signatureDefs = [self.signature(network, graph)]
        return made

    def tensor(self, tensor: Tensor) -> Any:
        made = self.schema.TensorT()
        made.name = tensor.name
        made.type = getattr(self.schema.TensorType, tensor.dtype)
        made.shape = [1 if isinstance(size, Free) else size for size in tensor.shape]
        made.hasRank = True
        if has_free(tensor.shape):
            made.shapeSignature = list(tensor.signature)
        made.quantization = self.scales(tensor.scales)
        made.buffer = 0 if tensor.data is None else self.buffer(tensor.data)
        return made

    def scales(self, scales: Scales | None) -> Any:
        made = self.schema.QuantizationParametersT()
        if scales is not None:
            made.scale = np.array(scales.scale, np.float32)
            made.zeroPoint = np.array(scales.zero_point, np.int64)
            made.quantizedDimension = scales.axis
        return made

    def buffer(self, data: Any) -> int:
        content = np.ascontiguousarray(data).tobytes()
        if content not in self.known:
            made = self.schema.BufferT()
            made.data = np.frombuffer(content, np.uint8)
            self.known[content] = len(self.buffers)
            self.buffers.append(made)
        return self.known[content]

    def code(self, name: str, version: int) -> Any:
        made = self.schema.OperatorCodeT()
        number = getattr(self.schema.BuiltinOperator, name)
        made.builtinCode = number
        made.deprecatedBuiltinCode = min(number, 127)
        made.version = version
        return made

    def operator(self, operation: Operation, places: dict[int, int]) -> Any:
        made = self.schema.OperatorT()
        key = (operation.code, _version(operation))
        made.opcodeIndex = self.codes.setdefault(key, len(self.codes))
        made.inputs = [-1 if each is None else places[id(each)] for each in operation.inputs]
        made.outputs = [places[id(each)] for each in operation.outputs]
        if operation.code in _WITH_OPTIONS:
            usual = operation.code.title().replace("_", "")
            name = f"{_CLASSES.get(operation.code, usual)}Options"
            options = getattr(self.schema, f"{name}T")()
            for key_, value in operation.options.items():
                setattr(options, key_, value)
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, name)
            made.builtinOptions = options
        return made

    def signature(self, network: Network, graph: Any) -> Any:
        made = self.schema.SignatureDefT()
        made.signatureKey = _SIGNATURE
        made.subgraphIndex = 0
        made.inputs = self.named(network.input_names, graph.inputs)
        made.outputs = self.named(network.output_names, graph.outputs)
        return made

    def named(self, names: Sequence[str], places: Sequence[int]) -> list[Any]:
        made = []
        for name, place in zip(names, places, strict=True):
            each = self.schema.TensorMapT()
            each.name, each.tensorIndex = name, place
            made.append(each)
        return made


def _version(operation: Operation) -> int:
    in_float, in_integers = _VERSIONS.get(operation.code, (1, 2))
    integer = any(each is not None and each.is_integer for each in operation.inputs)
    return in_integers if integer else in_float
