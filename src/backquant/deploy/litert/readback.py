"""What the interpreter runs of a ``.tflite`` file: each operator, its types, and whether XNNPACK takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backquant.deploy.litert.flatbuffer import CHANNELS_LAST
from backquant.deploy.litert.network import Array

__all__ = ["LoadedFile", "ReadOperator", "interpreter_of", "read_back", "run_file"]

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

    def __init__(
        self,
        content: bytes,
        *,
        reference: bool = False,
        delegates: bool = True,
        threads: int = 1,
    ) -> None:
        self.interpreter = interpreter_of(
            content, reference=reference, delegates=delegates, threads=threads
        )
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


def run_file(content: bytes, inputs: Sequence[Any], *, reference: bool = False) -> list[Array]:
    """The outputs of a file for arrays."""
    return LoadedFile(content, reference=reference).run(inputs)
