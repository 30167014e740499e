"""The reference model in the form that targets read, after the rules of its backend."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.backend_config import QDQRules
from backquant.deploy.exported import TargetKernel
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.deploy.roundings import state_half_even
from backquant.dtypes import is_scaled_float
from backquant.graph import register_quantized_decomposed
from backquant.lower.padded import pad_before
from backquant.lower.qdq import is_dequantize, is_quantize, is_weight_dequantize
from backquant.match.plan import Reason
from backquant.nn.quantized import reference
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.reason_codes import ReasonCode


def portable(reference: fx.GraphModule, rules: QDQRules) -> fx.GraphModule:
    """A copy of ``reference`` with weights as integers and dequantize nodes; names of nodes are kept.

    >>> import backquant, torch
    >>> x, mapping = torch.ones(1, 3), backquant.get_default_qconfig_mapping("x86")
    >>> prepared = backquant.prepare_fx(torch.nn.Sequential(torch.nn.Linear(3, 2)).eval(), mapping, (x,))
    >>> _ = prepared(x)
    >>> reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    >>> made = portable(reference, QDQRules(weights="quantized_float"))
    >>> made.state_dict().keys() - reference.state_dict().keys()
    {'0.weight_float'}
    """
    made = with_weight_nodes(reference, rules.weights)
    assert isinstance(made, fx.GraphModule)
    state_half_even(made)
    pad_before(made)
    if rules.epilogues:
        fuse_epilogues(made, rules.epilogues)
    if rules.dequantize_per_user:
        dequantize_per_user(made)
    return made


def dequantize_per_user(module: fx.GraphModule) -> None:
    """Give every reader of a quantized value a dequantize node of its own, in place.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    >>> x = graph.call_function(op, (q, 0.1, 0, 0, 255, torch.uint8))
    >>> _ = graph.output((graph.call_function(torch.relu, (x,)), graph.call_function(torch.neg, (x,))))
    >>> module = fx.GraphModule({}, graph)
    >>> dequantize_per_user(module)
    >>> sum(node.target is op for node in module.graph.nodes)
    2
    """
    for node in list(module.graph.nodes):
        if not (is_dequantize(node) or is_weight_dequantize(node)):
            continue
        for user in sorted(node.users, key=lambda user: user.op != "output")[1:]:
            with module.graph.inserting_before(user):
                own = module.graph.call_function(node.target, node.args, node.kwargs)
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)
    module.recompile()


# Removes quantize/dequantize pairs between a weighted operator and the epilogue that its kernel computes.
#
# Rule 7 of ``QDQRules``. A pair is taken out where all of this holds:
#
# 1. the value is that of a convolution or linear layer with a quantized weight, or of an epilogue that is
# already joined to one;
# 2. only the pair reads it, and only the epilogue reads the pair;
# 3. the epilogue's other inputs are dequantized values or constants.
#
# The result is the reference model's with one rounding less.
_WEIGHTED = (
    reference.Conv1d,
    reference.Conv2d,
    reference.Conv3d,
    reference.ConvTranspose1d,
    reference.ConvTranspose2d,
    reference.ConvTranspose3d,
    reference.Linear,
)


def fuse_epilogues(module: fx.GraphModule, operators: tuple[Any, ...]) -> int:
    """Take out the pairs in place; returns how many.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> root = nn.Module()
    >>> root.fc = reference.Linear.from_float(nn.Linear(2, 2), {"qscheme": torch.per_tensor_affine,
    ...     "dtype": torch.qint8, "scale": 0.5, "zero_point": 0})
    >>> graph, ops = fx.Graph(), torch.ops.quantized_decomposed
    >>> value, qparams = graph.call_module("fc", (graph.placeholder("x"),)), (
    ...     0.5, 0, -128, 127, torch.int8)
    >>> for op in (ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default):
    ...     value = graph.call_function(op, (value, *qparams))
    >>> _ = graph.output(graph.call_function(torch.relu, (value,)))
    >>> made = fx.GraphModule(root, graph)
    >>> fuse_epilogues(made, (torch.relu,)), [node.name for node in made.graph.nodes]
    (1, ['x', 'fc', 'relu', 'output'])
    """
    modules, listed = dict(module.named_modules()), set(operators)
    kernels: set[fx.Node] = set()
    joined = 0
    for node in list(module.graph.nodes):
        if _is_weighted(node, modules):
            kernels.add(node)
        elif _operator(node, modules) in listed:
            joined += _join(node, kernels)
    module.graph.lint()
    module.recompile()
    return joined


def _operator(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    return type(modules[str(node.target)]) if node.op == "call_module" else node.target


def _is_weighted(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return any(isinstance(part, _WEIGHTED) for part in modules[str(node.target)].modules())
    return node.op == "call_function" and any(map(_is_weight, node.all_input_nodes[1:]))


def _is_weight(value: Any) -> bool:
    return _dequantizes(value) and value.args[0].op == "get_attr"


def _dequantizes(node: fx.Node) -> bool:
    return _ends_pair(node) or is_weight_dequantize(node)


def _ends_pair(node: fx.Node) -> bool:
    return is_dequantize(node) or str(node.target) == "backquant.dequantize_float8.default"


def _join(node: fx.Node, kernels: set[fx.Node]) -> int:
    """Take out the first pair before ``node`` that may go; ``node`` then belongs to the kernel."""
    values = node.all_input_nodes
    if any(value in kernels and len(value.users) == 1 for value in values):
        kernels.add(node)
        return 0
    if not all(_dequantizes(value) or value.op == "get_attr" for value in values):
        return 0
    for value in values:
        source = _single_source(value)
        if source is None or source not in kernels:
            continue
        quantize: Any = value.args[0]
        node.replace_input_with(value, source)
        for done in (value, quantize):
            done.graph.erase_node(done)
        kernels.add(node)
        return 1
    return 0


def _starts_pair(node: fx.Node) -> bool:
    return is_quantize(node) or str(node.target) == "backquant.quantize_float8.default"


def _single_source(value: fx.Node) -> fx.Node | None:
    """What the pair that ends in ``value`` reads, if nothing else reads it or the pair."""
    quantize = value.args[0] if _ends_pair(value) else None
    if not isinstance(quantize, fx.Node) or not _starts_pair(quantize):
        return None
    source = quantize.args[0]
    assert isinstance(source, fx.Node)
    alone = all(len(part.users) == 1 for part in (value, quantize, source))
    return source if alone else None


# Weights of reference modules as nodes: integers and a dequantize node, which every target reads.
#
# A reference module dequantizes its weight by arithmetic; here a copy of it does so by
# ``quantized_decomposed`` operators. Float16 weights, those whose zero points are floats, and narrow floats
# with several scales have no such operator and stay arithmetic.
class _Emitter:
    """Stands in for ``IntegerWeights._dequantized`` of one module; ``weights`` as in ``QDQRules``."""

    def __init__(self, module: IntegerWeights, weights: str) -> None:
        self._module = module
        self._from_float = weights == "quantized_float"

    def __call__(self, name: str) -> torch.Tensor:
        module: Any = self._module
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale")
        zero_point = getattr(module, f"{name}_zero_point")
        scheme = getattr(module, f"{name}_qscheme")
        if scheme is not None and is_scaled_float(weight.dtype) and scale.dim() == 0:
            [literal, _] = module.__dict__[f"_{name}_literals"]
            return torch.ops.backquant.dequantize_float8(weight, literal)  # type: ignore[no-any-return]
        if scheme is None or weight.is_floating_point() or zero_point.is_floating_point():
            return type(module)._dequantized(module, name)  # type: ignore[no-any-return]
        bounds = (
            getattr(module, f"{name}_quant_min"),
            getattr(module, f"{name}_quant_max"),
            weight.dtype,
        )
        if scale.dim() > 1:
            return torch.ops.backquant.dequantize_blocks(weight, scale, zero_point)  # type: ignore[no-any-return]
        ops = torch.ops.quantized_decomposed
        if scale.dim() == 0:
            qparams = (*module.__dict__[f"_{name}_literals"], *bounds)
            quantize, dequantize = ops.quantize_per_tensor, ops.dequantize_per_tensor
        else:
            qparams = (scale, zero_point, getattr(module, f"{name}_axis"), *bounds)
            quantize, dequantize = ops.quantize_per_channel, ops.dequantize_per_channel
        if self._from_float:
            weight = quantize.default(getattr(module, f"{name}_float"), *qparams)
        return dequantize.default(weight, *qparams)  # type: ignore[no-any-return]


def with_weight_nodes(module: nn.Module, weights: str = "integer") -> nn.Module:
    """A copy of ``module`` and its children that dequantizes weights by operators; tensors are shared.

    ``weights``: ``"integer"``, or ``"quantized_float"``: from floats, which are quantized by a node.
    Graph modules inside become copies over their copied children.

    >>> from backquant.nn.quantized.reference import Linear
    >>> linear = Linear.from_float(nn.Linear(2, 2), {"qscheme": torch.per_tensor_affine,
    ...     "dtype": torch.qint8, "scale": 0.5, "zero_point": 0})
    >>> torch.equal(with_weight_nodes(linear)(torch.ones(1, 2)), linear(torch.ones(1, 2)))
    True
    """
    register_quantized_decomposed()
    children = {
        name: None if child is None else with_weight_nodes(child, weights)
        for name, child in module._modules.items()
    }
    if isinstance(module, fx.GraphModule):
        return _same_graph(module, children)
    made = copy.copy(module)
    made._modules = children
    if isinstance(made, IntegerWeights):
        _prepare(made, weights)
    return made


def _same_graph(module: fx.GraphModule, children: dict[str, nn.Module | None]) -> fx.GraphModule:
    """A graph module over ``children``, whose graph is a copy with the same names."""
    root = nn.Module()
    root.__dict__.update({k: v for k, v in module.__dict__.items() if not k.startswith("_graph")})
    root._modules = children
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    made = fx.GraphModule(root, graph)
    made.training = module.training
    return made


def _prepare(module: Any, weights: str) -> None:
    module._buffers = dict(module._buffers)
    for name in module.weight_names:
        scale, zero_point = module._buffers[f"{name}_scale"], module._buffers[f"{name}_zero_point"]
        if scale.dim() == 0:
            module.__dict__[f"_{name}_literals"] = (float(scale), int(zero_point))
        if weights == "quantized_float":
            module._buffers[f"{name}_float"] = type(module)._dequantized(module, name).detach()
    module.__dict__["_dequantized"] = _Emitter(module, weights)


# Reads from an exported file which operators stand between dequantize and quantize nodes, for targets
# without a runtime here.
#
# A planned operator is written as planned where every value that its nodes compute with is dequantized, a
# constant that needs no scale (a bias), or computed inside of it. One whose activations stay float has a
# dequantized weight.


#: How an export counts what it finds so.
BETWEEN = "between quantize and dequantize nodes"


@dataclass(frozen=True)
class Read:
    """A value that an operator of the file reads.

    ``source``: the reference graph's node that it comes from; ``dtype``: of the integers that it is
    dequantized from, empty where it is not; ``is_free``: whether it needs no scale (integers, biases).
    """

    source: str = ""
    dtype: str = ""
    is_free: bool = False


@dataclass(frozen=True)
class Computed:
    """An operator of the file that is no quantization; ``origin``: the reference graph's node."""

    origin: str
    name: str
    reads: tuple[Read, ...]


def written_operators(
    job: ExportJob, computed: Iterable[Computed]
) -> tuple[tuple[TargetKernel, ...], tuple[Reason, ...]]:
    """A record for each operator of the plan that the file holds, and for each that it computes in float;
    and why planned ones are not written as planned.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from torch import fx
    >>> planned = (ExpectedOperator("fc", "Linear", "fc", ("fc",), 8),)
    >>> job = ExportJob(fx.GraphModule({}, fx.Graph()), (), {}, None, BackendConfig("b"), Plan("b"), {},
    ...                 planned)
    >>> reads = (Read("x", "int8"), Read(dtype="int8"))
    >>> [str(kernel) for kernel in written_operators(job, [Computed("fc", "Gemm", reads)])[0]]
    ['fc: Gemm (int8)']
    """
    by_origin: dict[str, list[Computed]] = {}
    for operator in computed:
        by_origin.setdefault(operator.origin, []).append(operator)
    kernels, left = [], []
    for expected in job.expected:
        parts = [part for node in expected.nodes for part in by_origin.pop(node, [])]
        if not parts:
            continue
        name = "+".join(dict.fromkeys(part.name for part in parts))
        float_part = _float_part(expected, parts)
        dtype = "float32" if float_part is not None else _dtype(parts)
        kernels.append(TargetKernel(name, expected.nodes, dtype, float_part is None))
        if float_part is not None:
            left.append(_reason(expected, float_part))
    kernels += _others(by_origin)
    return tuple(kernels), tuple(left)


def _float_part(expected: ExpectedOperator, parts: list[Computed]) -> Computed | None:
    if expected.has_float_activations:
        return None if any(read.dtype for part in parts for read in part.reads) else parts[0]
    for part in parts:
        for read in part.reads:
            if not (read.dtype or read.is_free or read.source in expected.nodes):
                return part
    return None


def _dtype(parts: list[Computed]) -> str:
    read = [read.dtype for part in parts for read in part.reads if read.dtype]
    return " × ".join(dict.fromkeys(read)) or "float32"


def _reason(expected: ExpectedOperator, part: Computed) -> Reason:
    return Reason(
        expected.node,
        ReasonCode.TARGET_FLOAT,
        asked=f"{expected.operator} {BETWEEN}",
        admitted=f"{part.name} reads a value that no node dequantizes",
        place=expected.module_path,
    )


def _others(by_origin: Mapping[str, list[Computed]]) -> Iterable[TargetKernel]:
    for origin, parts in by_origin.items():
        nodes = (origin,) if origin else ()
        for part in parts:
            yield TargetKernel(part.name, nodes, "float32", False)
