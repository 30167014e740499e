"""A lowered model with code compiled for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from backquant.errors import UsageError
from backquant.graph.example import as_arguments
from backquant.runtime.compiled.compiler import check_compiler
from backquant.runtime.compiled.graph import compilable
from backquant.runtime.compiled.narrow import check_float_dtype
from backquant.runtime.compiled.program import CompiledProgram, compile_graph
from backquant.runtime.quantized_model import QuantizedModel

__all__ = ["Compilation", "CompiledModel", "compiled"]


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


class CompiledModel(QuantizedModel):
    """``QuantizedModel.compile()`` makes it: the same model, called the same way.

    ``compilation`` says what was compiled. Inputs of other shapes or dtypes run on the lowered model.
    The code holds the weights as they were; modules are shared with the model it was made from.

    ``backquant.save``, ``pickle`` and ``torch.save`` store the lowered model: compiled code is for one CPU.
    ``backquant.load`` gives it back, to be compiled again.
    """

    compilation: Compilation
    _program: CompiledProgram

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's arguments and result."""
        return super().forward(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._program.takes(args, kwargs):
            return self._program(*args, **kwargs)
        return super()._run(args, kwargs)

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the weights are in the code. Raises UsageError."""
        raise UsageError(
            "the weights of a compiled model are in its code",
            where="CompiledModel.load_state_dict",
            fix="quantized.load_state_dict(state); quantized.compile()   # the lowered model",
        )

    def lowered(self) -> QuantizedModel:
        """The model without the code, over the same modules."""
        made = QuantizedModel.__new__(QuantizedModel)
        made.__dict__.update(_plain(self))
        made._begin_replays()
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return self.lowered().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        copied = _with_program(
            self.lowered().__deepcopy__(memo), self._program, self.compilation.float_dtype
        )
        memo[id(self)] = copied
        return copied

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.compilation.describe()}"


_OWN = ("compilation", "_program")


def _plain(model: QuantizedModel) -> dict[str, Any]:
    """What a model holds, with dictionaries of its own, without code."""
    held = {key: value for key, value in model.__dict__.items() if key not in _OWN}
    return {key: dict(value) if type(value) is dict else value for key, value in held.items()}


def _with_program(
    model: QuantizedModel, program: CompiledProgram, float_dtype: torch.dtype
) -> CompiledModel:
    made = CompiledModel.__new__(CompiledModel)
    made.__dict__.update(_plain(model))
    made._begin_replays()
    made._program = program
    made.compilation = Compilation(
        tuple(str(kind) for kind in program.inputs),
        program.kernels,
        program.seconds,
        program.threads,
        torch.__version__.split("+")[0],
        float_dtype,
    )
    return made


def compiled(
    model: QuantizedModel, example_inputs: Any, dynamic_shapes: Any, float_dtype: torch.dtype
) -> CompiledModel:
    """See ``QuantizedModel.compile``."""
    check_float_dtype(float_dtype)
    if model.engine is None:
        raise UsageError(
            "a reference model computes in floats, and is not what is compiled",
            where="QuantizedModel.compile",
            fix='quantize(..., backend="x86").compile(), or backquant.export(quantized, "model.pt2")',
        )
    check_compiler()
    arguments = _arguments(model, example_inputs)
    if dynamic_shapes is not None:
        arguments = tree_map_only(torch.Tensor, _more_than_one, arguments)
    graph_module = compilable(model.graph_module, float_dtype)
    program = compile_graph(graph_module, arguments, dynamic_shapes, {})
    return _with_program(model, program, float_dtype)


def _arguments(model: QuantizedModel, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if given is not None:
        args, kwargs = as_arguments(given)
        return tuple(args), dict(kwargs)
    if model.example is None:
        raise UsageError(
            "it is not known what inputs the model takes",
            where="QuantizedModel.compile",
            fix="quantized.compile(example_inputs)   # a tensor, a tuple, or a dict",
        )
    return model.example.arguments()


def _more_than_one(tensor: torch.Tensor) -> torch.Tensor:
    """With a first size above 1, which an export takes for a size of its own kind."""
    return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == 1 else tensor
