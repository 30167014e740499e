"""Compiling a graph ahead of time, and running what came of it.

``torch.export`` captures the graph, AOTInductor writes and compiles C++ for it; a call involves no Python
between the operators, and no tracing. Weights, packed as the code reads them, lie beside it and go with the
model; the code itself stays mapped until the process ends, since PyTorch's libraries cannot be unloaded.
"""

from __future__ import annotations

import re
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as Kind
from torch.export.graph_signature import TensorArgument
from torch.utils._pytree import tree_flatten, tree_map_only

from backquant.errors import EngineError, UsageError
from backquant.files import workspace
from backquant.graph.example import with_distinct_tensors
from backquant.graph.export.program import as_dims, failure_of
from backquant.graph.plain_arguments import (
    arguments_of,
    by_position,
    plain,
    plain_shapes,
    with_plain_arguments,
)
from backquant.graph.silence import quiet
from backquant.native.plan import has_kernels
from backquant.operators.aten import cut_windows
from backquant.runtime.compiled.as_run import AsItRuns, calls_as_they_run
from backquant.runtime.compiled.attention import attention, join_attention
from backquant.runtime.compiled.inductor import ir, register_lowering
from backquant.runtime.compiled.lowerings import ATTENTION, KernelCall, kernel_node

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


# What a compiled package holds: the kernels that its code calls, read in the code, and weights.

_DEFINED = re.compile(r'extern "C"\s+void\s+(cpp_fused_\w+)\([^;{]*\{')
_CALLED = re.compile(
    r"^\s+(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(cpp_fused_\w+|aoti_torch_cpu_\w+)\(", re.M
)
_OURS = re.compile(
    r"backquant::(convolution|tiled_convolution|grouped|Depthwise|quantize3|join|gate|average|in_turns|attend)[<(]"
)
_NAMES = {
    "convolution": "backquant.convolution",
    "tiled_convolution": "backquant.convolution",
    "grouped": "backquant.convolution",
    "Depthwise": "backquant.depthwise",
    "quantize3": "backquant.image",
    "join": "backquant.join",
    "gate": "backquant.gate",
    "average": "backquant.average",
    "in_turns": "backquant.shuffle",
    "attend": "backquant.attention",
}


def lacks_weights(package: Path) -> bool:
    """Whether the file of a package's weights is empty: its layers have none, or hold them elsewhere."""
    with zipfile.ZipFile(package) as files:
        return any(i.filename.endswith(".blob") and not i.file_size for i in files.infolist())


def called_kernels(package: Path) -> dict[str, int]:
    """How often a package's code calls each kernel, by name: ``backquant.…``, ``onednn.…``, another
    operator of torch's, or ``generated``."""
    with zipfile.ZipFile(package) as files:
        texts = [files.read(name).decode() for name in files.namelist() if name.endswith(".cpp")]
    own: dict[str, str] = {}
    for text in texts:
        starts = list(_DEFINED.finditer(text))
        ends = [match.start() for match in starts[1:]]
        for match, end in zip(starts, [*ends, len(text)], strict=False):
            found = _OURS.search(text, match.end(), end)
            own.setdefault(match[1], _NAMES[found[1]] if found else "generated")
    counts: Counter[str] = Counter()
    for text in texts:
        for name in _CALLED.findall(text):
            counts[own.get(name) or _operator(name)] += 1
    return dict(counts)


def _operator(name: str) -> str:
    """``aoti_torch_cpu__qconv_pointwise_tensor`` as ``onednn.qconv_pointwise``.

    >>> _operator("aoti_torch_cpu__qconv_pointwise_tensor"), _operator("aoti_torch_cpu_bmm_out")
    ('onednn.qconv_pointwise', 'aten.bmm')
    """
    plain = name.removeprefix("aoti_torch_cpu_").removesuffix("_tensor").removesuffix("_out")
    return f"onednn.{plain[1:]}" if plain.startswith(("_qconv", "_qlinear")) else f"aten.{plain}"


# What Inductor makes of ``backquant::attention``: a call of the kernel of ``attention.h``.
#
# Queries, keys and values are read where they lie, heads and all: only channels have to lie side by side.

_CONTIGUOUS = (3, 2, 1, 0)


def _strided(x: Any) -> Any:
    """``x`` in memory, its last dimension without holes."""
    x = ir.ExternKernel.realize_input(x)
    if isinstance(x, ir.StorageBox):
        x = ir.ExternKernel.require_stride_order(x, _CONTIGUOUS)
    if x.get_stride()[-1] == 1 or x.get_size()[-1] == 1:
        return x
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.copy_input(x), _CONTIGUOUS)


def _strides(x: Any, repeated: bool = False) -> str:
    """Strides of all dimensions but the last; ``repeated``: of those with one element 0."""
    pairs = zip(x.get_size()[:3], x.get_stride()[:3], strict=True)
    return ", ".join("0" if repeated and size == 1 else str(stride) for size, stride in pairs)


def _lower(
    q: Any,
    k: Any,
    v: Any,
    added: Sequence[Any],
    scale: float,
    score_scale: float,
    score_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> Any:
    tensors = {name: _strided(x) for name, x in (("q", q), ("k", k), ("v", v))}
    terms = {f"added{i}": _strided(x) for i, x in enumerate(added)}
    batch, heads, queries, deep = tensors["q"].get_size()
    keys, wide = tensors["v"].get_size()[2:]
    lines = [
        f"const backquant::Heads {name}_{{{name} + {x.get_layout().offset}, {_strides(x)}}};"
        for name, x in tensors.items()
    ]
    listed = ", ".join(
        f"{{{name} + {x.get_layout().offset}, {x.get_size()[0]}, {_strides(x, repeated=True)}}}"
        for name, x in terms.items()
    )
    if terms:
        lines.append(f"const backquant::Added added[] = {{{listed}}};")
    bounds = f"{score_scale!r}f, {-float(score_zero_point)}f, {255.0 - score_zero_point}f"
    lines += [
        f"const backquant::Attention a{{count, {heads}, {queries}, {keys}, {deep}, {wide}, "
        f"{scale!r}f, {bounds}, {1.0 / out_scale!r}f, {float(out_zero_point)}f}};",
        f"backquant::attend<{len(terms)}>(a, q_, k_, v_, {'added' if terms else 'nullptr'}, out);",
    ]
    size = (batch, heads, queries, wide)
    stride = (heads * queries * wide, wide, heads * wide, 1)
    body = "\n  ".join(lines)
    call = KernelCall(
        "attention", {**tensors, **terms}, body, size, stride, torch.uint8, batch, ATTENTION
    )
    return kernel_node(call)


def register_attention() -> None:
    """Tell Inductor; once is enough."""
    register_lowering(attention, type_promotion_kind=None)(_lower)


# Which inputs compiled code was made for.

_ANY = 1 << 62


@dataclass(frozen=True)
class InputKind:
    """A tensor of ``dtype`` and ``shape``, in which a name stands for a dynamic size within ``bounds``; or,
    without a dtype, the very ``value``.

    >>> kind = InputKind(torch.float32, ("batch", 3), {"batch": (1, 8)})
    >>> [kind.admits(torch.zeros(n, 3), {}) for n in (1, 8, 9)]
    [True, True, False]
    >>> kind.admits(torch._neg_view(torch.zeros(1, 3)), {})
    False
    >>> print(kind)
    float32[batch, 3]
    """

    dtype: torch.dtype | None
    shape: tuple[int | str, ...] = ()
    bounds: dict[str, tuple[int, int]] | None = None
    value: Any = None

    def admits(self, value: Any, sizes: dict[str, int]) -> bool:
        """Whether ``value`` is such an input; ``sizes`` holds what names stood for in other inputs."""
        if self.dtype is None:
            return type(value) is type(self.value) and bool(value == self.value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.dtype != self.dtype:
            return False
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            return False
        if value.is_neg() or value.is_conj() or len(value.shape) != len(self.shape):
            return False  # lazy negation or conjugation: memory holds other values than the tensor
        return all(
            size == wanted if isinstance(wanted, int) else self._fits(wanted, size, sizes)
            for size, wanted in zip(value.shape, self.shape, strict=True)
        )

    def _fits(self, name: str, size: int, sizes: dict[str, int]) -> bool:
        low, high = (self.bounds or {}).get(name, (1, _ANY))
        return low <= size <= high and sizes.setdefault(name, size) == size

    def __str__(self) -> str:
        if self.dtype is None:
            return repr(self.value)
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


def kinds_of(exported: ExportedProgram) -> tuple[InputKind, ...]:
    """The inputs of an exported program, in the order of the flattened arguments."""
    values = {
        node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")
    }
    bounds = {str(name): _bounds(found) for name, found in exported.range_constraints.items()}
    kinds = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not Kind.USER_INPUT:
            continue
        if not isinstance(spec.arg, TensorArgument):
            kinds.append(InputKind(None, value=getattr(spec.arg, "value", None)))
            continue
        tensor = values[spec.arg.name]
        shape = tuple(n if isinstance(n, int) else str(n) for n in tensor.shape)
        own = {n: bounds[n] for n in shape if isinstance(n, str) and n in bounds}
        kinds.append(InputKind(tensor.dtype, shape, own))
    return tuple(kinds)


def _bounds(found: Any) -> tuple[int, int]:
    """Exports take no size below 2 for dynamic; the code takes 1 like any other."""
    low, high = (int(n) if abs(n) < _ANY else _ANY for n in (found.lower, found.upper))
    return (1 if low == 2 else low), high
