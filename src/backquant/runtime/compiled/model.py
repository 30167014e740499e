"""A lowered graph compiled for the arguments that its model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from backquant.errors import UsageError
from backquant.graph.example import as_arguments
from backquant.graph.plain_arguments import arguments_of, by_position
from backquant.runtime.compiled.inductor import check_compiler
from backquant.runtime.compiled.modules import compilable
from backquant.runtime.compiled.operators import check_float_dtype
from backquant.runtime.compiled.program import CompiledProgram, compile_graph
from backquant.runtime.record import LoweredRecord


@dataclass(frozen=True)
class Compilation:
    """What was compiled: ``inputs``, the arguments that the code takes (a name stands for any size);
    ``kernels``, what the code calls, by name, and how often; ``seconds``, how long it took; ``threads``, how
    many torch had; ``version``, that of torch; ``float_dtype``, in which attention and products of two
    activations are computed."""

    inputs: tuple[str, ...]
    kernels: Mapping[str, int]
    seconds: float
    threads: int
    version: str
    float_dtype: torch.dtype

    @property
    def integer_kernels(self) -> int:
        """How many calls are of kernels that multiply integers."""
        names = ("backquant.convolution", "backquant.depthwise", "onednn.")
        return sum(count for name, count in self.kernels.items() if name.startswith(names))

    def describe(self) -> str:
        """In one line."""
        kernels = ", ".join(f"{count} {name}" for name, count in sorted(self.kernels.items()))
        return f"compiled for ({', '.join(self.inputs)}) by torch {self.version}: {kernels}"


def compile_lowered(
    graph_module: fx.GraphModule,
    record: LoweredRecord,
    example_inputs: Any,
    dynamic_shapes: Any,
    float_dtype: torch.dtype,
) -> tuple[CompiledProgram, Compilation]:
    """The code of a lowered graph, and what was compiled. See ``QuantizedModel.compile``."""
    check_float_dtype(float_dtype)
    if record.engine is None:
        raise UsageError(
            "a reference model computes in floats, and is not what is compiled",
            where="QuantizedModel.compile",
            fix='quantize(..., backend="x86").compile(), or backquant.export(quantized, "model.pt2")',
        )
    check_compiler()
    made = compilable(graph_module, float_dtype)
    arguments = _arguments(made.graph, record, example_inputs)
    if dynamic_shapes is not None:
        arguments = tree_map_only(torch.Tensor, _more_than_one, arguments)
        if isinstance(dynamic_shapes, Mapping):  # torch.export expects an entry for every argument
            names = [name for name, _ in arguments_of(made.graph)][: len(arguments)]
            dynamic_shapes = {**dict.fromkeys(names), **dynamic_shapes}
    program = compile_graph(made, arguments, dynamic_shapes, {})
    compilation = Compilation(
        tuple(str(kind) for kind in program.inputs),
        program.kernels,
        program.seconds,
        program.threads,
        torch.__version__.split("+")[0],
        float_dtype,
    )
    return program, compilation


def _arguments(graph: fx.Graph, record: LoweredRecord, given: Any) -> tuple[Any, ...]:
    args, kwargs = _example(record) if given is None else as_arguments(given)
    try:
        return by_position(arguments_of(graph), tuple(args), kwargs)
    except TypeError as error:
        raise UsageError(
            f"the model does not take these example inputs: {error}",
            where="QuantizedModel.compile",
            fix="quantized.compile(example_inputs)   # as the model is called",
        ) from error


def _example(record: LoweredRecord) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if record.example is None:
        raise UsageError(
            "it is not known what inputs the model takes",
            where="QuantizedModel.compile",
            fix="quantized.compile(example_inputs)   # a tensor, a tuple, or a dict",
        )
    return record.example.arguments()


def _more_than_one(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a first size above 1: an export takes 1 for a fixed size."""
    return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == 1 else tensor
