"""Random graphs: names, fused types, matches and observed nodes equal PyTorch's."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping as torch_mapping
from torch.ao.quantization.backend_config import (
    get_fbgemm_backend_config,
    get_native_backend_config,
    get_onednn_backend_config,
    get_qnnpack_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

from backquant.backend_config import get_backend_config
from backquant.backend_config.pattern import to_reversed
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.qconfig import get_default_qconfig_mapping

BACKENDS: dict[str, Any] = {
    "native": get_native_backend_config,
    "fbgemm": get_fbgemm_backend_config,
    "qnnpack": get_qnnpack_backend_config,
    "x86": get_x86_backend_config,
    "onednn": get_onednn_backend_config,
}
GRAPHS = int(os.environ.get("BACKQUANT_RANDOM_GRAPHS", "40"))

MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv2d(4, 4, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    lambda: nn.BatchNorm2d(4),
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.ReLU6,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Dropout,
    nn.Identity,
    nn.GELU,
    lambda: nn.MaxPool2d(3, 1, 1),
    lambda: nn.AvgPool2d(3, 1, 1),
    lambda: nn.Linear(8, 8),
    lambda: nn.InstanceNorm2d(4, affine=True),
]
UNARY: list[Callable[[Any], Any]] = [
    F.relu,
    lambda x: F.relu(x, inplace=True),
    torch.relu,
    lambda x: x.relu(),
    F.hardtanh,
    torch.sigmoid,
    lambda x: x.tanh(),
    F.gelu,
    lambda x: F.max_pool2d(x, 3, 1, 1),
    lambda x: F.avg_pool2d(x, 3, 1, 1),
    lambda x: x + 1,
    lambda x: torch.mul(x, 0.5),
    lambda x: x.permute(0, 1, 3, 2).contiguous(),
    lambda x: x.reshape(x.size(0), -1).reshape(x.shape),
    lambda x: x.transpose(2, 3).clone(),
    torch.sin,
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: torch.chunk(x, 2, 1)[0].repeat(1, 2, 1, 1),
    lambda x: x.masked_fill(x > 0, 1.0),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    operator.add,
    torch.add,
    lambda x, y: x.add(y),
    operator.mul,
    torch.mul,
    lambda x, y: torch.cat([x, y], 1).narrow(1, 0, 4),
    lambda x, y: torch.cat((x, y), dim=1)[:, :4],
    torch.matmul,
    operator.sub,
    lambda x, y: x * y.size(0),
]


class Random(nn.Module):
    """A DAG over feature maps of one shape, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.parts = nn.ModuleList(make() for make in pick.choices(MODULES, k=16))
        self.chains = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()]) for _ in range(16)
        )
        self.steps: list[tuple[Any, ...]] = []
        for step in range(pick.randrange(4, 16)):
            source = step if pick.random() < 0.7 else pick.randrange(step + 1)
            used = pick.randrange(step + 1) if pick.random() < 0.1 else step  # modules used again
            kind = pick.choice(["module", "module", "chain", "unary", "binary"])
            details = {
                "module": (used,),
                "chain": (used, pick.randrange(1, 4)),
                "unary": (pick.randrange(len(UNARY)),),
                "binary": (pick.randrange(len(BINARY)), pick.randrange(step + 1)),
            }[kind]
            self.steps.append((kind, source, *details))

    def forward(self, x):
        values = [x]
        for kind, source, number, *other in self.steps:
            value = values[source]
            if kind == "module":
                value = self.parts[number](value)
            elif kind == "chain":
                for part in list(self.chains[number])[: other[0]]:
                    value = part(value)
            elif kind == "unary":
                value = UNARY[number](value)
            else:
                value = BINARY[number](value, values[other[0]])
            values.append(value)
        return values[-1], values[len(values) // 2]


def conflicting_fusions(model: nn.Module, fusions: Any, module: Any) -> bool:
    """Calls of one module that are fused differently: PyTorch lets the last one win."""
    targets = {node.name: node.target for node in module.graph.nodes}
    calls: dict[Any, int] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            calls[node.target] = calls.get(node.target, 0) + 1
    kinds: dict[Any, set[Any]] = {}
    fused: dict[Any, int] = {}
    for fusion in fusions:
        root = targets[fusion.root]
        parts = tuple(targets[name] for name in fusion.nodes)
        kinds.setdefault(root, set()).add((fusion.entry, parts))
        fused[root] = fused.get(root, 0) + 1
    return any(len(kinds[root]) > 1 or fused[root] < calls[root] for root in kinds)


def fuses_wrongly(module: Any) -> bool:
    """``y + y`` and ``y + 1`` behind a convolution: PyTorch's onednn patterns fail or fuse a constant."""
    modules = dict(module.named_modules())
    for node in module.graph.nodes:
        if node.target not in (operator.add, torch.add):
            continue
        one, two = node.args
        if one is two:
            return True
        if not isinstance(two, torch.fx.Node) and isinstance(
            modules.get(one.target), (nn.Conv2d, nn.BatchNorm2d)
        ):
            return True
    return False


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_random_graph(seed: int, oracle: Any, key_of_pattern: Any) -> None:
    torch.manual_seed(seed)
    model = Random(seed).eval()
    backend_name = list(BACKENDS)[seed % len(BACKENDS)]
    engine = "x86" if backend_name == "native" else backend_name
    backend = get_backend_config(backend_name)
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, _ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    x = torch.randn(1, 4, 8, 8)
    for ours, theirs in zip(fused(x.clone()), model(x.clone()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    if conflicting_fusions(model, fusions, captured.module):
        return  # PyTorch computes something else here; ours was compared with the model
    if backend_name == "onednn" and fuses_wrongly(captured.module):
        return
    decided = make_plan(fused, scopes, backend, get_default_qconfig_mapping(engine), fusions=fusions)
    expected = oracle(model, (x,), torch_mapping(engine), BACKENDS[backend_name]())
    assert [n.name for n in captured.module.graph.nodes] == expected.captured_names
    assert [n.name for n in fused.graph.nodes] == expected.fused_names
    modules = dict(fused.named_modules(remove_duplicate=False))
    assert {
        n.name: key_of_pattern(type(modules[n.target]))
        for n in fused.graph.nodes
        if n.op == "call_module"
    } == expected.fused_types
    entries = list(backend.entries)
    assert {
        name: (match.anchor, key_of_pattern(to_reversed(entries[match.entry])))
        for match in decided.matches
        for name in match.nodes
    } == expected.matches
    quantized = {name for name, decision in decided.decisions.items() if decision.quantized}
    assert quantized == expected.observed
