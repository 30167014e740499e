"""TFLite files of one operator: what Vela reads. Needs ``flatbuffers`` and the tables of ``ethosu.vela``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np
from tools.vela.cases import Call, Operand

__all__ = ["written"]

_DTYPES = {"int8": 9, "uint8": 3, "int16": 7, "int32": 2, "int64": 4, "float32": 0}


def _table(name: str) -> Any:
    return importlib.import_module(f"ethosu.vela.tflite.{name}")


def written(call: Call) -> bytes:
    """The file."""
    builder = flatbuffers.Builder(1024)
    operands = [each for each in (*call.inputs, call.output) if each is not None]
    buffers = [_buffer(builder, None)] + [_buffer(builder, each.values) for each in operands]
    tensors = [_tensor(builder, each, at) for at, each in enumerate(operands)]
    places = {id(each): at for at, each in enumerate(operands)}
    read = [-1 if each is None else places[id(each)] for each in call.inputs]
    given = [places[id(call.output)]]
    free = [at for at, each in enumerate(operands[:-1]) if each.values is None]
    operator = _operator(builder, call, read, given)
    subgraph = _subgraph(builder, tensors, operator, free, given)
    model = _model(builder, _code(builder, call.name), subgraph, buffers)
    builder.Finish(model, b"TFL3")
    return bytes(builder.Output())


def _vector(builder: Any, start: Any, offsets: Sequence[int]) -> int:
    start(builder, len(offsets))
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _numbers(builder: Any, values: Any, dtype: Any) -> int:
    return int(builder.CreateNumpyVector(np.asarray(values, dtype=dtype)))


def _buffer(builder: Any, values: Any) -> int:
    table = _table("Buffer")
    data = None
    if values is not None:
        data = builder.CreateNumpyVector(
            np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        )
    table.BufferStart(builder)
    if data is not None:
        table.BufferAddData(builder, data)
    return int(table.BufferEnd(builder))


def _tensor(builder: Any, operand: Operand, at: int) -> int:
    table = _table("Tensor")
    name = builder.CreateString(f"t{at}")
    shape = _numbers(builder, operand.shape, np.int32)
    quantization = _quantization(builder, operand) if operand.scales else None
    table.TensorStart(builder)
    table.TensorAddShape(builder, shape)
    table.TensorAddType(builder, _DTYPES[operand.dtype])
    table.TensorAddBuffer(builder, at + 1)
    table.TensorAddName(builder, name)
    if quantization is not None:
        table.TensorAddQuantization(builder, quantization)
    return int(table.TensorEnd(builder))


def _quantization(builder: Any, operand: Operand) -> int:
    table = _table("QuantizationParameters")
    scale = _numbers(builder, operand.scales, np.float32)
    zero = _numbers(builder, [0] * len(operand.scales), np.int64)
    table.QuantizationParametersStart(builder)
    table.QuantizationParametersAddScale(builder, scale)
    table.QuantizationParametersAddZeroPoint(builder, zero)
    table.QuantizationParametersAddQuantizedDimension(builder, operand.axis)
    return int(table.QuantizationParametersEnd(builder))


def _operator(builder: Any, call: Call, read: list[int], given: list[int]) -> int:
    table = _table("Operator")
    options = _options(builder, call) if call.options else None
    inputs, outputs = (_numbers(builder, each, np.int32) for each in (read, given))
    table.OperatorStart(builder)
    table.OperatorAddOpcodeIndex(builder, 0)
    table.OperatorAddInputs(builder, inputs)
    table.OperatorAddOutputs(builder, outputs)
    if options is not None:
        kind = getattr(_table("BuiltinOptions").BuiltinOptions, call.options)
        table.OperatorAddBuiltinOptionsType(builder, kind)
        table.OperatorAddBuiltinOptions(builder, options)
    return int(table.OperatorEnd(builder))


def _options(builder: Any, call: Call) -> int:
    table = _table(call.options)
    vectors = {
        key: _numbers(builder, value, np.int32)
        for key, value in call.fields.items()
        if isinstance(value, (list, tuple))
    }
    getattr(table, f"{call.options}Start")(builder)
    for key, value in call.fields.items():
        getattr(table, f"{call.options}Add{key}")(builder, vectors.get(key, value))
    return int(getattr(table, f"{call.options}End")(builder))


def _subgraph(
    builder: Any, tensors: list[int], operator: int, free: list[int], given: list[int]
) -> int:
    table = _table("SubGraph")
    all_tensors = _vector(builder, table.SubGraphStartTensorsVector, tensors)
    operators = _vector(builder, table.SubGraphStartOperatorsVector, [operator])
    inputs, outputs = (_numbers(builder, each, np.int32) for each in (free, given))
    table.SubGraphStart(builder)
    table.SubGraphAddTensors(builder, all_tensors)
    table.SubGraphAddInputs(builder, inputs)
    table.SubGraphAddOutputs(builder, outputs)
    table.SubGraphAddOperators(builder, operators)
    return int(table.SubGraphEnd(builder))


def _code(builder: Any, name: str) -> int:
    table = _table("OperatorCode")
    code = getattr(_table("BuiltinOperator").BuiltinOperator, name)
    table.OperatorCodeStart(builder)
    table.OperatorCodeAddDeprecatedBuiltinCode(builder, min(code, 127))
    table.OperatorCodeAddBuiltinCode(builder, code)
    table.OperatorCodeAddVersion(builder, 1)
    return int(table.OperatorCodeEnd(builder))


def _model(builder: Any, code: int, subgraph: int, buffers: list[int]) -> int:
    table = _table("Model")
    codes = _vector(builder, table.ModelStartOperatorCodesVector, [code])
    subgraphs = _vector(builder, table.ModelStartSubgraphsVector, [subgraph])
    all_buffers = _vector(builder, table.ModelStartBuffersVector, buffers)
    table.ModelStart(builder)
    table.ModelAddVersion(builder, 3)
    table.ModelAddOperatorCodes(builder, codes)
    table.ModelAddSubgraphs(builder, subgraphs)
    table.ModelAddBuffers(builder, all_buffers)
    return int(table.ModelEnd(builder))
