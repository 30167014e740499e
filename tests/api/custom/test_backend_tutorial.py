"""The documented flow of a custom BackendConfig, as a user writes it, with PyTorch's imports and ours.

The text is executed twice; only the import lines differ.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import fx

import backquant as bq
from backquant.match import Outcome

TORCH_IMPORTS = """
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
from torch.ao.quantization import (
    MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping, default_weight_observer,
)
from torch.ao.quantization.backend_config import (
    BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints, ObservationType,
)
from torch.ao.quantization.quantize_fx import (
    convert_fx, convert_to_reference_fx, prepare_fx, prepare_qat_fx,
)
"""
OUR_IMPORTS = """
import backquant.nn.intrinsic as nni
import backquant.nn.intrinsic.qat as nniqat
import backquant.nn.qat as nnqat
import backquant.nn.quantized.reference as nnqr
from backquant import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping
from backquant.observe import default_weight_observer
from backquant import (
    BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints, ObservationType,
)
from backquant import (
    convert_fx, convert_to_reference_fx, prepare_fx, prepare_qat_fx,
)
"""
FLOW = '''
import torch
from torch import nn

# 1. What the backend does: 8-bit linear layers and convolutions, alone and with a ReLU behind them.
activation_dtype = DTypeWithConstraints(
    dtype=torch.quint8,
    quant_min_lower_bound=0,
    quant_max_upper_bound=255,
    scale_min_lower_bound=2 ** -12,
)
int8 = DTypeConfig(
    input_dtype=activation_dtype,
    output_dtype=activation_dtype,
    weight_dtype=torch.qint8,
    bias_dtype=torch.float,
)


def fuse_linear_relu(is_qat, linear, relu):
    """One module in place of two."""
    return nni.LinearReLU(linear, relu)


def fuse_conv2d_relu(is_qat, conv, relu):
    return nni.ConvReLU2d(conv, relu)


linear = (
    BackendPatternConfig(nn.Linear)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_root_module(nn.Linear)
    .set_qat_module(nnqat.Linear)
    .set_reference_quantized_module(nnqr.Linear)
)
linear_relu = (
    BackendPatternConfig((nn.Linear, nn.ReLU))
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_fuser_method(fuse_linear_relu)
    .set_fused_module(nni.LinearReLU)
)
fused_linear_relu = (
    BackendPatternConfig(nni.LinearReLU)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_root_module(nn.Linear)
    .set_qat_module(nniqat.LinearReLU)
    .set_reference_quantized_module(nnqr.Linear)
)
conv2d = (
    BackendPatternConfig(nn.Conv2d)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_root_module(nn.Conv2d)
    .set_qat_module(nnqat.Conv2d)
    .set_reference_quantized_module(nnqr.Conv2d)
)
conv2d_relu = (
    BackendPatternConfig((nn.Conv2d, nn.ReLU))
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_fused_module(nni.ConvReLU2d)
    .set_fuser_method(fuse_conv2d_relu)
)
fused_conv2d_relu = (
    BackendPatternConfig(nni.ConvReLU2d)
    .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    .add_dtype_config(int8)
    .set_root_module(nn.Conv2d)
    .set_qat_module(nniqat.ConvReLU2d)
    .set_reference_quantized_module(nnqr.Conv2d)
)
backend_config = (
    BackendConfig("my_backend")
    .set_backend_pattern_config(linear)
    .set_backend_pattern_config(linear_relu)
    .set_backend_pattern_config(fused_linear_relu)
    .set_backend_pattern_configs([conv2d, conv2d_relu, fused_conv2d_relu])
)


# 2. What is asked for.
class MyModel(nn.Module):
    def __init__(self, use_bn):
        super().__init__()
        self.linear = nn.Linear(10, 3)
        self.conv = nn.Conv2d(3, 3, kernel_size=3)
        self.relu = nn.ReLU()
        self.sigmoid = nn.Sigmoid()
        self.use_bn = use_bn
        self.bn = nn.BatchNorm2d(3) if use_bn else nn.Identity()

    def forward(self, x):
        x = self.linear(x)
        x = self.relu(x)
        x = self.conv(x)
        x = self.bn(x)
        x = self.sigmoid(x)
        return x


def prepared_with(activation, weight=default_weight_observer, use_bn=False):
    torch.manual_seed(0)
    qconfig_mapping = QConfigMapping().set_global(QConfig(activation=activation, weight=weight))
    example_inputs = (torch.rand(1, 3, 10, 10, dtype=torch.float),)
    model = MyModel(use_bn).eval()
    prepared = prepare_fx(model, qconfig_mapping, example_inputs, backend_config=backend_config)
    prepared(*example_inputs)  # calibrate
    return prepared, example_inputs


narrow = MinMaxObserver.with_args(quant_min=0, quant_max=127, dtype=torch.quint8, eps=2 ** -12)
wide = MinMaxObserver.with_args(quant_min=0, quant_max=255, dtype=torch.quint8, eps=2 ** -12)
too_wide = MinMaxObserver.with_args(quant_min=0, quant_max=511, dtype=torch.qint32, eps=2 ** -12)
without_eps = MinMaxObserver.with_args(quant_min=0, quant_max=127, dtype=torch.quint8)
per_channel = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric
)
'''


@pytest.fixture(scope="module")
def users() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the text defines, with our imports and with PyTorch's."""
    made: list[dict[str, Any]] = []
    for imports in (OUR_IMPORTS, TORCH_IMPORTS):
        names: dict[str, Any] = {"__name__": "user_code"}
        exec(imports + FLOW, names)
        made.append(names)
    return made[0], made[1]


def call(names: dict[str, Any], source: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(source, names)


def shape(module: Any) -> list[Any]:
    number = {node: f"%{position}" for position, node in enumerate(module.graph.nodes)}
    return [
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), number.__getitem__)))
        for n in module.graph.nodes
    ]


@pytest.mark.parametrize(
    "asked",
    ["narrow", "wide", "narrow, per_channel", "narrow, use_bn=True", "too_wide", "without_eps"],
)
def test_same_graphs_and_same_numbers(users: Any, asked: str) -> None:
    results = []
    for names in users:
        prepared, inputs = call(names, f"prepared_with({asked})")
        observed = shape(prepared)  # PyTorch converts in place
        names["prepared"] = prepared
        reference = call(names, "convert_to_reference_fx(prepared, backend_config=backend_config)")
        results.append((observed, reference, reference(*inputs)))
    (ours, reference, output), (theirs, torch_reference, expected) = results
    assert ours == theirs
    assert shape(reference) == shape(torch_reference)
    assert torch.equal(output, expected)


def test_what_is_refused_is_said(users: Any) -> None:
    """PyTorch's prepare drops both silently or with a line per tensor."""
    ours, _ = users
    for asked, rules in (("too_wide", {"dtype"}), ("without_eps", {"scale-min"})):
        with pytest.warns(UserWarning, match="operators stay float on my_backend") as caught:
            prepared, _ = eval(f"prepared_with({asked})", ours)
        assert len(caught) == 1
        plan = prepared.meta["backquant"].plan
        refused = [d for d in plan.decisions.values() if d.match is not None]
        assert [d.operator for d in refused] == ["LinearReLU", "Conv2d"]
        assert all(d.outcome is Outcome.FLOAT for d in refused)
        assert {d.reasons[0].rule for d in refused} == rules
        assert all("eps=2**-12" in d.reasons[0].fix for d in refused)


def test_what_is_quantized(users: Any) -> None:
    """A backend without an engine gives the reference model; the sigmoid has no entry."""
    ours, _ = users
    prepared, inputs = call(ours, "prepared_with(narrow)")
    model = bq.convert_fx(prepared)
    assert model.engine is None
    assert "no-entry" in [r.rule for r in model.plan.decisions["sigmoid"].reasons]
    quantized = [name for name, d in model.plan.decisions.items() if d.quantized]
    assert quantized == ["linear", "conv"]
    assert type(model.graph_module.linear[0]).__module__.startswith("backquant.nn.quantized")
    float_output = call(ours, "prepared_with(narrow)")[0](*inputs)
    assert (model(*inputs) - float_output).abs().max() < 0.05


def test_an_engine_for_the_same_description(users: Any) -> None:
    """*Beyond PyTorch*, where the engine is one for the process: the description names its own."""
    ours, _ = users
    prepared, inputs = call(ours, "prepared_with(narrow)")
    reference = bq.convert_fx(prepared)(*inputs)
    twin = bq.BackendConfig.from_dict(ours["backend_config"].to_dict()).set_engine("fbgemm")
    lowered = bq.convert_fx(prepared, backend_config=twin)
    assert [use.nodes for use in lowered.kernels] == [("linear",), ("conv",)]
    assert (lowered(*inputs) - reference).abs().max() < 0.02


def test_training_for_it(users: Any) -> None:
    ours, _ = users
    fake = bq.FakeQuantize.with_args(
        observer=bq.MovingAverageMinMaxObserver, quant_min=0, quant_max=127, eps=2**-12
    )
    mapping = bq.QConfigMapping().set_global(bq.QConfig(fake, bq.observe.default_weight_fake_quant))
    model, x = ours["MyModel"](use_bn=False).train(), torch.rand(1, 3, 10, 10)
    prepared = bq.prepare_qat_fx(model, mapping, (x,), backend_config=ours["backend_config"])
    assert type(prepared.linear).__module__.startswith("backquant.nn.intrinsic.qat")
    prepared(x).sum().backward()
    assert prepared.linear.weight.grad is not None
    assert (bq.convert_fx(prepared.eval())(x) - prepared(x)).abs().max() < 0.02
