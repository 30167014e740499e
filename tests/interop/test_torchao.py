from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import backquant
from backquant import (
    MinMaxObserver,
    MissingExtraError,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    UsageError,
    get_backend_config,
    get_default_qconfig_mapping,
)

_ops = torch.ops.quantized_decomposed
_int8 = QConfig(
    MinMaxObserver.with_args(dtype=torch.quint8),
    PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
)
_per_tensor = QConfig(
    MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=127),
    MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.fc = nn.Linear(2 * 8 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv1(x)))
        y = self.relu(self.conv2(x) + x)
        z = torch.cat([y, self.up(self.pool(y))], 1)
        return torch.sin(torch.sigmoid(self.fc(torch.flatten(z, 1))))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


_MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (Residual, (4, 3, 8, 8)),
    "mlp": (_mlp, (16, 8)),
}
_MAPPINGS: dict[str, QConfigMapping] = {
    "global": QConfigMapping().set_global(_int8).set_object_type(nn.ConvTranspose2d, _per_tensor),
    "by type": QConfigMapping().set_global(_per_tensor).set_object_type(nn.Linear, _int8),
    "but one": QConfigMapping().set_global(_per_tensor).set_module_name("fc", None),
    "default": get_default_qconfig_mapping("x86"),
}


def _case(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = _MODELS[name]
    return make().eval(), torch.randn(shape)


def _with_torchao(model: nn.Module, x: torch.Tensor, quantizer: Any) -> torch.fx.GraphModule:
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    return convert_pt2e(prepared)


def _with_ours(
    model: nn.Module, x: torch.Tensor, backend: Any, mapping: QConfigMapping
) -> torch.fx.GraphModule:
    prepared = backquant.prepare_fx(model, mapping, (x,), backend_config=backend)
    prepared(x)
    return backquant.convert_to_reference_fx(prepared, dialect="decomposed")


def _activations(graph_module: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    target = _ops.quantize_per_tensor.default
    nodes = (node for node in graph_module.graph.nodes if node.target is target)
    return sorted(node.args[1:5] for node in nodes)


def _weights(graph_module: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    """Integer weights with scales and zero points, of a model from torchao."""
    found = []
    for node in graph_module.graph.nodes:
        if "dequantize_per" in str(node.target) and node.args[0].op == "get_attr":
            values = [
                getattr(graph_module, v.target).flatten().tolist()
                if isinstance(v, torch.fx.Node)
                else [v]
                for v in node.args[:3]
            ]
            found.append(tuple(values))
    return found


def _our_weights(graph_module: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    return [
        tuple(getattr(module, name).flatten().tolist() for name in names)
        for module in graph_module.modules()
        for names in [("weight", "weight_scale", "weight_zero_point")]
        if isinstance(getattr(module, "weight_scale", None), torch.Tensor)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # what prepare_fx skips
@pytest.mark.parametrize("backend_name", ["x86", "onednn"])
@pytest.mark.parametrize("mapping", _MAPPINGS.values(), ids=_MAPPINGS)
@pytest.mark.parametrize("name", _MODELS)
def test_torchao_gives_the_qparams_and_outputs_of_our_reference_model(
    name: str, mapping: QConfigMapping, backend_name: str
) -> None:
    model, x = _case(name)
    backend = get_backend_config(backend_name)
    theirs = _with_torchao(model, x, backquant.as_quantizer(backend, mapping))
    ours = _with_ours(model, x, backend, mapping)
    assert _activations(theirs)
    assert _activations(theirs) == _activations(ours)
    assert _weights(theirs)
    assert sorted(map(str, _weights(theirs))) == sorted(map(str, _our_weights(ours)))
    torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=1e-6)


def test_what_stays_in_float_is_not_annotated() -> None:
    model, x = _case("residual")
    backend, mapping = get_backend_config("x86"), _MAPPINGS["but one"]
    quantizer = backquant.as_quantizer(backend, mapping)
    graph_module = torch.export.export(model, (x,)).module()
    nodes = {node.name: node for node in quantizer.annotate(graph_module).graph.nodes}
    assert quantizer.plan is not None
    left = [name for name, d in quantizer.plan.decisions.items() if not d.quantized]
    assert {"linear", "sin"} <= set(left)
    assert not any("quantization_annotation" in nodes[name].meta for name in left)
    assert all(quantizer.plan.decisions[name].reasons for name in left)
    assert "quantization_annotation" in nodes["conv2d"].meta


def test_what_the_backend_refuses_is_not_annotated() -> None:
    model, x = _case("residual")
    quantizer = backquant.as_quantizer(get_backend_config("xnnpack"), _MAPPINGS["global"])
    graph_module = quantizer.annotate(torch.export.export(model, (x,)).module())
    assert not any("quantization_annotation" in node.meta for node in graph_module.graph.nodes)
    assert quantizer.plan is not None
    assert not any(decision.quantized for decision in quantizer.plan.decisions.values())


class FlatSine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.conv(x)).reshape(-1)


def test_an_operator_without_an_observer_to_share_is_not_annotated() -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("conv", None)
    quantizer = backquant.as_quantizer(get_backend_config("x86"), mapping)
    program = torch.export.export(FlatSine().eval(), (torch.randn(1, 3, 4, 4),))
    graph_module = quantizer.annotate(program.module())
    assert quantizer.plan is not None
    assert not any(decision.quantized for decision in quantizer.plan.decisions.values())
    assert all(decision.reasons for decision in quantizer.plan.decisions.values())
    annotated = [n.name for n in graph_module.graph.nodes if "quantization_annotation" in n.meta]
    assert annotated == []


def test_dynamic_quantization_chooses_qparams_at_run_time() -> None:
    model, x = _case("mlp")
    mapping = QConfigMapping().set_global(backquant.default_dynamic_qconfig)
    backend = get_backend_config("x86")
    theirs = _with_torchao(model, x, backquant.as_quantizer(backend, mapping))
    targets = [str(node.target) for node in theirs.graph.nodes]
    assert sum("choose_qparams" in target for target in targets) == 2
    torch.testing.assert_close(theirs(x), model(x), rtol=0.1, atol=0.1)


def test_bad_arguments() -> None:
    backend = get_backend_config("x86")
    with pytest.raises(UsageError, match="qconfig_mapping is a dict"):
        backquant.as_quantizer(backend, {})  # type: ignore[arg-type]
    ordered = QConfigMapping().set_module_name_object_type_order("", nn.Linear, 0, _int8)
    with pytest.raises(UsageError, match="set_module_name_object_type_order"):
        backquant.as_quantizer(backend, ordered)


def test_without_torchao_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\.\[torchao\]"):
        backquant.as_quantizer(get_backend_config("x86"), QConfigMapping())
