"""What a target is given: the reference model in the form that the target asks for, and what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true

from backquant.backend_config import BackendConfig, DTypeConfig, QDQRules
from backquant.deploy.edits import AtenCalls, arguments, replace
from backquant.deploy.program import (
    Program,
    decomposed_for_runtimes,
    export_program,
    origins_of_stacks,
)
from backquant.dtypes import Granularity, QParams, block_of, is_quantized
from backquant.lower.qdq import is_block_dequantize
from backquant.match.plan import MatchKind, Plan
from backquant.operators import overload

#: Before the label of an output in ``ExportJob.edges``.
OUTPUT = "output "


@dataclass(frozen=True)
class ExpectedOperator:
    """An operator that the plan has quantized, so that the target is expected to run it on integers.

    ``node``: the node of the reference graph that computes it (of a fused pattern the first).
    ``nodes``: all nodes of its pattern. ``is_dynamic``: its activation is quantized at each call.
    ``has_float_activations``: only its weight is quantized.
    """

    node: str
    operator: str
    module_path: str
    nodes: tuple[str, ...]
    multiply_adds: int
    is_dynamic: bool = False
    has_float_activations: bool = False


@dataclass(frozen=True)
class ExportJob:
    """One export under way.

    ``module``: the reference graph, with integer weights that ``quantized_decomposed`` nodes
    dequantize, after the rules ``config.qdq``. ``args`` and ``kwargs`` are example inputs for it.
    ``dynamic_shapes`` is that of ``torch.export``. ``multiply_adds`` holds those of each node of
    ``module`` that has any, on the example inputs; ``uncounted`` the nodes of which they are not known.
    ``edges``: what the integers of inputs and outputs stand for, by ``"x"`` and ``"output 0"``.
    """

    module: GraphModule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
    config: BackendConfig
    plan: Plan
    multiply_adds: Mapping[str, int]
    expected: tuple[ExpectedOperator, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    edges: Mapping[str, QParams] = field(default_factory=dict)

    @property
    def qdq(self) -> QDQRules:
        """The rules of the backend that the model was quantized for."""
        return self.config.qdq or QDQRules()

    def place_of(self, node: str) -> str:
        """The module that a node of the reference graph computes; empty where the plan does not say."""
        decision = self.plan.decisions.get(node)
        return "" if decision is None else decision.module_path

    @property
    def input_edges(self) -> dict[str, QParams]:
        """Those of ``edges`` that are inputs."""
        return {name: q for name, q in self.edges.items() if not name.startswith(OUTPUT)}

    @cached_property
    def program(self) -> Program:
        """``module`` as ``torch.export`` captures it, with the node of ``module`` behind each of its own.

        Made once. Raises ``CaptureError`` when it cannot be captured, or not with these dynamic shapes.
        """
        captured = export_program(self.module, self.args, dict(self.kwargs), self.dynamic_shapes)
        return choose_where_masked(decomposed_for_runtimes(captured))


def expected_operators(
    plan: Plan, config: BackendConfig, costs: Mapping[str, int]
) -> tuple[ExpectedOperator, ...]:
    """What ``plan`` has quantized statically or dynamically, or in groups, in graph order; other weights
    without activations count as float.

    ``costs``: multiply-adds by node.
    """
    found = []
    for match in plan.matches:
        decision = plan.decisions.get(match.anchor)
        if decision is None or not decision.quantized or match.kind is not MatchKind.PATTERN:
            continue
        if decision.dtype_config is None:
            continue
        dtypes = config.shared_configs[match.entry].dtype_configs[decision.dtype_config]
        in_float = dtypes.input_dtype is not None and not is_quantized(dtypes.input_dtype)
        if (in_float and not in_groups(dtypes)) or decision.observation.endswith("NOT_OBSERVED"):
            continue
        found.append(
            ExpectedOperator(
                node=match.root,
                operator=plan.decisions[match.root].operator,
                module_path=plan.decisions[match.root].module_path,
                nodes=match.nodes,
                multiply_adds=sum(costs.get(node, 0) for node in match.nodes),
                is_dynamic=bool(dtypes.is_dynamic),
                has_float_activations=in_float,
            )
        )
    return tuple(found)


def in_groups(dtypes: DTypeConfig) -> bool:
    """Whether the weight is one that a target has kernels for which read groups of few bits."""
    shared = dtypes.weight_dtype_with_constraints.granularity
    return shared is not None and Granularity.parse(shared).has_blocks


# Values that a model writes where a mask says so (``scores[:, mask] = -inf``), as a choice for each place.
#
# Few runtimes take ``index_put`` with a boolean mask, and ONNX has no form of it behind other axes. Where the
# value is the same for all places of the mask, ``torch.where`` gives the same; other writes stay as they are.
def choose_where_masked(program: Program) -> Program:
    """``program`` with such writes replaced; the same object where there is none.

    >>> from backquant.deploy.program import export_program
    >>> class Hidden(torch.nn.Module):
    ...     def forward(self, x, mask, value): return torch.ops.aten.index_put(x, [None, mask], value)
    >>> values = torch.ones(2, 3, 4), torch.ones(3, dtype=torch.bool), torch.zeros(())
    >>> made = export_program(torch.fx.symbolic_trace(Hidden()), values, {}, None)
    >>> [node.name for node in choose_where_masked(made).exported.graph.nodes if node.op == "call_function"]
    ['unsqueeze_default', 'where_self']
    """
    graph = program.exported.graph
    writes = graph.find_nodes(op="call_function", target=overload("index_put"))
    if not writes:
        return program
    for node in writes:
        _choose(node)
    program.exported.graph_module.recompile()
    return dataclasses.replace(program, origins=origins_of_stacks(graph))


def _choose(node: fx.Node) -> None:
    source, indices, value, accumulate = arguments(node).values()
    mask = _mask(indices)
    if mask is None or accumulate or value.meta["val"].dtype != node.meta["val"].dtype:
        return
    shape, covered = source.meta["val"].shape, mask.meta["val"].shape
    first = len(indices) - 1  # whole axes before those of the mask
    inner = shape[first + len(covered) :]
    if not same_sizes(shape[first : first + len(covered)], covered):
        return
    value_shape = value.meta["val"].shape
    more = max(len(value_shape) - len(inner), 0)
    if not _fits(value_shape, (*[1] * more, *inner)):
        return
    write = AtenCalls(node)
    for _ in inner:
        mask = write.unsqueeze(mask, -1)
    for _ in range(more):
        value = write.squeeze(value, 0)
    replace(node, write.call(overload("where", "self"), mask, value, source))


def _mask(indices: Any) -> Any:
    """The mask, where it is the only index, behind whole axes."""
    *whole, last = indices
    if any(index is not None for index in whole) or last is None:
        return None
    return last if last.meta["val"].dtype is torch.bool else None


def same_sizes(found: Any, wanted: Any) -> bool:
    """Whether shapes are equal, without a guard on free sizes."""
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(statically_known_true(a == b) for a, b in pairs)


def _fits(given: Any, shape: Any) -> bool:
    """Whether values of the sizes ``given`` are written to each place alike."""
    last = shape[len(shape) - len(given) :]
    return all(
        statically_known_true(size == 1) or (statically_known_true(size == room))
        for size, room in zip(given, last, strict=True)
    )


# Weights in groups of a row, as ``quantized_decomposed`` spells them.


def spell_groups(exported: ExportedProgram) -> None:
    """``dequantize_blocks`` of a matrix in groups of a row as ``dequantize_per_channel_group``, in place."""
    ops = torch.ops.quantized_decomposed
    for node in exported.graph.nodes:
        if not is_block_dequantize(node):
            continue
        weight, scale, zero_point = node.args
        block = block_of(weight.meta["val"].shape, scale.meta["val"].shape) or ()
        dtype = weight.meta["val"].dtype
        bounds = (-8, 7) if dtype == torch.int8 else (0, 15)
        if len(block) == 2 and block[0] == 1 and block[1] > 1:
            node.target = ops.dequantize_per_channel_group.default
            node.args = (weight, scale, zero_point, *bounds, dtype, block[1], torch.float32)
    exported.graph_module.recompile()
