"""What a target is given: the reference model in the form that the target asks for, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from backquant.backend_config import BackendConfig, DTypeConfig, QDQRules
from backquant.deploy.decomposed import decomposed_for_runtimes
from backquant.deploy.masked_writes import choose_where_masked
from backquant.deploy.program import Program, export_program
from backquant.dtypes import Granularity, is_quantized
from backquant.match.plan import MatchKind, Plan

__all__ = ["ExpectedOperator", "ExportJob", "expected_operators"]


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

    @property
    def qdq(self) -> QDQRules:
        """The rules of the backend that the model was quantized for."""
        return self.config.qdq or QDQRules()

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
        dtypes = config.configs[match.entry].dtype_configs[decision.dtype_config]
        in_float = _computes_in_float(dtypes.input_dtype)
        if (in_float and not _in_groups(dtypes)) or decision.observation.endswith("NOT_OBSERVED"):
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


def _in_groups(dtypes: DTypeConfig) -> bool:
    """Whether the weight is one that a target has kernels for which read groups of few bits."""
    shared = dtypes.weight_dtype_with_constraints.granularity
    return shared is not None and Granularity.parse(shared).has_blocks


def _computes_in_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not is_quantized(dtype)
