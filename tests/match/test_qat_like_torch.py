"""Training-time fusion and decisions equal PyTorch's, which decides after the swap of modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.ao.quantization as tq
from torch.ao.quantization.backend_config import (
    get_fbgemm_backend_config,
    get_qnnpack_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

from backquant.backend_config import get_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.qconfig import get_default_qat_qconfig_mapping

BACKENDS: dict[str, Any] = {
    "x86": get_x86_backend_config,
    "qnnpack": get_qnnpack_backend_config,
    "fbgemm": get_fbgemm_backend_config,
}


@pytest.mark.parametrize("backend_name", list(BACKENDS))
def test_decisions_equal(
    zoo_model: SimpleNamespace, backend_name: str, oracle: Any, key_of_pattern: Any
) -> None:
    model = zoo_model.model.train()
    expected = oracle(
        model,
        zoo_model.inputs,
        tq.get_default_qat_qconfig_mapping(backend_name),
        BACKENDS[backend_name](),
        True,
    )
    backend = get_backend_config(backend_name)
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend, is_qat=True)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=True
    )
    assert [n.name for n in fused.graph.nodes] == expected.fused_names
    modules = dict(fused.named_modules(remove_duplicate=False))
    assert {
        n.name: key_of_pattern(type(modules[n.target]))
        for n in fused.graph.nodes
        if n.op == "call_module"
    } == expected.fused_types
    decided = make_plan(fused, scopes, backend, get_default_qat_qconfig_mapping(backend_name))
    found = {name for name, decision in decided.decisions.items() if decision.quantized}
    assert found == expected.observed
