"""The first half of every flow: capture, plan the fusions, fuse, plan the rest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from backquant.backend_config import BackendConfig, get_backend_config
from backquant.errors import UsageError
from backquant.fuse import Fused, apply_fusion
from backquant.graph import capture, check_inputs, shallow_copy
from backquant.match import CustomMatching, Fusion, Plan, make_plan, plan_fusion
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

__all__ = ["Backend", "Planned", "fused_graph", "planned", "resolve_backend"]

Backend = str | os.PathLike[str] | BackendConfig


def resolve_backend(backend: Backend) -> BackendConfig:
    """A description as it is, or by name or file.

    >>> resolve_backend("x86").name
    'x86'
    """
    return backend if isinstance(backend, BackendConfig) else get_backend_config(backend)


@dataclass(frozen=True)
class Planned:
    """A fused graph with the decision about each of its operators; nothing is observed yet."""

    fused: Fused
    plan: Plan

    @property
    def module(self) -> fx.GraphModule:
        return self.fused.module


def fused_graph(
    model: nn.Module,
    backend: BackendConfig,
    custom: PrepareCustomConfig | None = None,
    *,
    is_qat: bool = False,
) -> tuple[Fused, tuple[Fusion, ...]]:
    """Capture ``model`` and fuse what the backend fuses. The model is not changed."""
    apart = CustomMatching.of(custom)
    captured = capture(
        model,
        non_traceable_names=apart.untraced_names,
        non_traceable_classes=apart.untraced_classes,
        preserved_attributes=() if custom is None else custom.preserved_attributes,
    )
    fusions = plan_fusion(captured.module, backend, is_qat=is_qat)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat)
    return fused, fusions


def planned(
    model: nn.Module,
    backend: BackendConfig,
    mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
    *,
    is_qat: bool = False,
) -> Planned:
    """The fused graph of ``model`` and the plan for it; ``is_qat``: fused for training."""
    fused, fusions = fused_graph(model, backend, custom, is_qat=is_qat)
    decided = make_plan(
        fused.module,
        fused.scopes,
        backend,
        mapping,
        fusions=fusions,
        custom=CustomMatching.of(custom),
    )
    return Planned(fused, decided)


def evaluation_copy(model: Any) -> nn.Module:
    """A copy in evaluation mode that shares the tensors; the model keeps its training flags."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is {type(model).__name__}, not an nn.Module",
            fix="pass the module itself, e.g. backquant.quantize(MyModel(), ...)",
        )
    return shallow_copy(model).eval()


def example_of(model: nn.Module, inputs: Any) -> Any:
    """Example inputs that were checked by running the model on them once."""
    check_inputs(model, inputs)
    return inputs
