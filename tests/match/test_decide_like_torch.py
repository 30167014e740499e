"""Capture, fusion, matches, rules and verdicts equal PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.ao.quantization import get_default_qconfig_mapping as torch_mapping

from against_torch.torch_side import TORCH_BACKENDS
from backquant.backend_config import get_backend_config
from backquant.backend_config.pattern import to_reversed
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import Outcome, make_plan, plan_fusion
from backquant.qconfig import get_default_qconfig_mapping

ENGINES = {"native": "x86", "tensorrt": "x86", "executorch": "qnnpack"}


def ours(model: torch.nn.Module, backend_name: str, engine: str) -> SimpleNamespace:
    backend = get_backend_config(backend_name)
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, provenance, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    decided = make_plan(
        fused, scopes, backend, get_default_qconfig_mapping(engine), fusions=fusions
    )
    return SimpleNamespace(
        captured=captured, fused=fused, plan=decided, backend=backend, provenance=provenance
    )


@pytest.mark.parametrize("backend_name", list(TORCH_BACKENDS))
def test_decisions_equal(
    zoo_model: SimpleNamespace, backend_name: str, oracle: Any, key_of_pattern: Any
) -> None:
    engine = ENGINES.get(backend_name, backend_name)
    expected = oracle(
        zoo_model.model, zoo_model.inputs, torch_mapping(engine), TORCH_BACKENDS[backend_name]()
    )
    found = ours(zoo_model.model, backend_name, engine)
    assert [n.name for n in found.captured.module.graph.nodes] == expected.captured_names
    assert {
        name: (scope.path, scope.module_type) for name, scope in found.captured.scopes.items()
    } == expected.scopes
    assert [n.name for n in found.fused.graph.nodes] == expected.fused_names
    modules = dict(found.fused.named_modules(remove_duplicate=False))
    assert {
        n.name: key_of_pattern(type(modules[n.target]))
        for n in found.fused.graph.nodes
        if n.op == "call_module"
    } == expected.fused_types
    entries = list(found.backend.entries)
    assert {
        name: (match.anchor, key_of_pattern(to_reversed(entries[match.entry])))
        for match in found.plan.matches
        for name in match.nodes
    } == expected.matches
    quantized = {name for name, d in found.plan.decisions.items() if d.outcome is Outcome.QUANTIZED}
    assert quantized == expected.observed
