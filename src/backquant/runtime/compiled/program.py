"""Compiling a graph ahead of time, and running what came of it.

``torch.export`` captures the graph, AOTInductor writes and compiles C++ for it; a call involves no Python
between the operators, and no tracing. Weights, packed as the code reads them, lie beside it and go with the
model; the code itself stays mapped until the process ends, since PyTorch's libraries cannot be unloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map_only

from backquant.errors import EngineError, UsageError
from backquant.files import workspace
from backquant.graph.example import with_distinct_tensors
from backquant.graph.export.dims import as_dims
from backquant.graph.export.program import failure_of
from backquant.graph.plain_arguments import (
    arguments_of,
    by_position,
    plain,
    plain_shapes,
    with_plain_arguments,
)
from backquant.graph.quiet import quiet
from backquant.native.epilogue import has_kernels
from backquant.operators.windows import cut_windows
from backquant.runtime.compiled.as_run import AsItRuns, calls_as_they_run
from backquant.runtime.compiled.attention import join_attention
from backquant.runtime.compiled.inputs import InputKind, kinds_of
from backquant.runtime.compiled.readback import called_kernels, lacks_weights

#: Options for ``torch._inductor.config``: weights go to a file beside the code.
_BESIDE = {"aot_inductor.package_constants_on_disk_format": "binary_blob"}


@dataclass(frozen=True)
class CompiledProgram:
    """``signature``: the arguments of the graph, with defaults. ``inputs``: the tensors that it takes.
    ``kernels``: what its code calls, and how often. ``seconds``: how long compiling took. ``threads``: how
    many torch had then. ``kept``: what its code calls as it runs in the lowered model."""

    signature: Sequence[tuple[str, Any]]
    inputs: tuple[InputKind, ...]
    kernels: Mapping[str, int]
    seconds: float
    threads: int
    run: Callable[..., Any]
    kept: tuple[AsItRuns, ...] = ()

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What ``run`` is called with; None for arguments that the code was not made for."""
        try:
            given = plain(by_position(self.signature, args, kwargs))
        except TypeError:
            return None
        tensors = tree_flatten(tuple(given))[0]
        sizes: dict[str, int] = {}
        admitted = len(tensors) == len(self.inputs) and all(
            kind.admits(value, sizes) for kind, value in zip(self.inputs, tensors, strict=True)
        )
        return tuple(given) if admitted else None

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        """The model's result; memory formats are brought to that of the example."""
        return self.run(*tree_map_only(torch.Tensor, torch.Tensor.contiguous, arguments))


def compile_graph(
    graph_module: fx.GraphModule,
    arguments: tuple[Any, ...],
    dynamic_shapes: Any,
    configs: Mapping[str, Any],
) -> CompiledProgram:
    """Compile ``graph_module`` for arguments of these shapes, by position; it is changed to take objects
    among them as dicts.

    ``configs``: for ``torch._inductor.config``. Raises ``UsageError`` for dynamic shapes that the model
    does not take, and ``EngineError`` for what the compiler refuses.
    """
    from backquant.runtime.compiled.inductor import check_inductor

    check_inductor()
    from backquant.runtime.compiled.attention_lowering import register_attention
    from backquant.runtime.compiled.lowerings import register_lowerings

    register_lowerings()
    register_attention()
    start = time.perf_counter()
    signature = arguments_of(graph_module.graph)
    names = [name for name, _ in signature]
    dynamic_shapes = plain_shapes(dynamic_shapes, names, arguments, {})
    given, _ = with_plain_arguments(graph_module, arguments, {})
    given = tree_map_only(torch.Tensor, torch.Tensor.contiguous, given)
    exported = _exported(graph_module, given, dynamic_shapes)
    cut_windows(exported.graph)
    if has_kernels():
        join_attention(exported.graph)
    exported.graph_module.recompile()
    try:
        with workspace() as folder, quiet(), torch.no_grad():
            path = folder / "model.pt2"
            _package(exported, path, {**_BESIDE, **configs})
            if lacks_weights(path):  # PyTorch cannot load an empty file of weights
                _package(exported, path, configs)
            kernels = {**called_kernels(path), **calls_as_they_run(exported.graph)}
            run = torch._inductor.aoti_load_package(str(path))
    except Exception as error:
        raise EngineError(
            f"Inductor cannot compile the model: {_first_line(error)}",
            where=f"QuantizedModel.compile, torch {torch.__version__}",
            fix="call the model as it is; the exception above has the compiler's own words",
        ) from error
    seconds = time.perf_counter() - start
    inputs = kinds_of(exported)
    kept = tuple(module for module in graph_module.modules() if isinstance(module, AsItRuns))
    return CompiledProgram(signature, inputs, kernels, seconds, torch.get_num_threads(), run, kept)


def _package(
    exported: torch.export.ExportedProgram, path: Path, configs: Mapping[str, Any]
) -> None:
    torch._inductor.aoti_compile_and_package(
        exported, package_path=str(path), inductor_configs={"freezing": True, **configs}
    )


def _exported(
    graph_module: fx.GraphModule, args: tuple[Any, ...], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(
                graph_module,
                with_distinct_tensors(args, graph_module),
                dynamic_shapes=as_dims(dynamic_shapes),
                strict=False,
            )
    except Exception as error:
        if dynamic_shapes:
            raise UsageError(
                f"the model does not take these dynamic shapes: {_first_line(error)}",
                where=f"dynamic_shapes={dynamic_shapes!r}",
                fix="leave that axis out, or give example_inputs with a size above 1 on it",
            ) from error
        failure = failure_of(error, graph_module)
        place = (f"module {failure.path!r}" if failure.path else "", failure.line)
        raise EngineError(
            f"the lowered model cannot be exported: {failure.reason}",
            where=", ".join(filter(None, place)) or "QuantizedModel.compile",
            fix="call the model as it is: quantized(x)",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
