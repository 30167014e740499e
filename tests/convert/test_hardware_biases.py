"""Integer biases of modules and functions, with the scale that the description says, down to ONNX."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.convert import reference_state

SPEC = """
schema_version: 1
name: npu
dtype_configs:
  int8:
    input_dtype: qint8
    output_dtype: qint8
    weight_dtype: {dtype: qint8, symmetric: true, granularity: per_channel, ch_axis: 0}
    bias_dtype: BIAS
    bias_scale: SCALE
entries:
- {operators: [conv2d, conv_transpose2d, linear], dtype_configs: [int8]}
"""


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 100)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return F.linear(self.conv(x).flatten(1), self.weight, self.bias)


def quantized(tmp_path, bias: str, scale: str, model: nn.Module | None = None):
    path = tmp_path / "npu.yaml"
    path.write_text(SPEC.replace("BIAS", bias).replace("SCALE", scale))
    torch.manual_seed(0)
    model, x = Mixed().eval() if model is None else model, torch.rand(2, 3, 7, 7)
    backend = backquant.BackendConfig.load(path)
    mapping = backquant.get_default_qconfig_mapping(backend)
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=backend)
    prepared(x)
    return model, backquant.convert_to_reference_fx(prepared, dialect="decomposed"), x


def steps_of(made, name: str, scale: str) -> torch.Tensor:
    """The scale that the bias of ``name`` has to have."""
    state = reference_state(made)
    if scale == "output":
        [site] = (site for site in state.sites.sites if site.producer == name)
        return state.qparams[site.name].scale.double()
    [site] = (s for s in state.sites.sites if name in s.readers and s.role.value == "input")
    scales = {"conv": "conv.weight_scale", "linear": "weight_scale_0"}[name]
    weights = dict(made.named_buffers())[scales]
    return state.qparams[site.name].scale.double() * weights


@pytest.mark.parametrize("scale", ["input_times_weight", "output"])
def test_biases_are_integers_of_their_scale(scale: str, tmp_path) -> None:
    model, made, _ = quantized(tmp_path, "int32", scale)
    decided = reference_state(made).plan.decisions
    assert decided["conv"].quantized and decided["linear"].quantized
    rounded = {"conv": made.conv.bias, "linear": made.bias_rounded_0}
    floats = {"conv": model.conv.bias, "linear": model.bias}
    for name, bias in rounded.items():
        steps = bias.detach().double() / steps_of(made, name, scale)
        assert torch.allclose(steps, steps.round(), atol=2e-3)
        off = (bias - floats[name]).detach().abs() / steps_of(made, name, scale)
        assert 0 < off.max() <= 0.5001


def test_few_bits_saturate_and_forty_are_enough(tmp_path) -> None:
    _, narrow, _ = quantized(tmp_path, "int8", "input_times_weight")
    steps = narrow.conv.bias / steps_of(narrow, "conv", "input_times_weight")
    assert steps.min() >= -128.001 and steps.max() <= 127.001
    large = Mixed().eval()
    nn.init.constant_(large.conv.bias, 1e9)
    _, wide, _ = quantized(tmp_path, "int64", "input_times_weight", large)
    steps = wide.conv.bias / steps_of(wide, "conv", "input_times_weight")
    assert float(steps.detach().min()) == pytest.approx(2**39, rel=1e-6)


def test_weights_scaled_by_input_channel_have_no_step_of_their_sums(tmp_path) -> None:
    """Of a transposed convolution, whose axis 0 is that of its input."""
    for outputs in (3, 5):
        model = nn.Sequential(nn.ConvTranspose2d(3, outputs, 2)).eval()
        given, made, _ = quantized(tmp_path, "int32", "input_times_weight", model)
        assert reference_state(made).plan.decisions["_0"].quantized
        assert torch.equal(made.get_submodule("0").bias, given[0].bias)


class Computed(Mixed):
    def forward(self, x):
        return F.linear(x.flatten(1)[:, :100], self.weight, x.flatten(1)[0, :5])


def test_a_bias_that_is_computed_stays_float(tmp_path, snapshot) -> None:
    with pytest.warns(UserWarning, match="stays float"):
        _, made, _ = quantized(tmp_path, "int32", "input_times_weight", Computed().eval())
    snapshot("computed_bias", str(reference_state(made).plan.decisions["linear"]))


def test_onnx_holds_int32_biases_with_their_scale(tmp_path) -> None:
    import numpy as np
    import onnx
    import onnxruntime

    _, made, x = quantized(tmp_path, "int32", "input_times_weight")
    file = tmp_path / "m.onnx"
    backquant.export(made, file, example_inputs=x, require=0.0)
    model = onnx.load(file)
    held = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    products = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    assert len(products) == 2
    for product in products:
        bias = producers[product.input[2]]
        integers, scale, zero = (held[name] for name in bias.input)
        assert integers.dtype == zero.dtype == np.int32 and not zero.any() and integers.any()
        first, second = (held_of(producers[name], held) for name in product.input[:2])
        assert np.allclose(scale, first * second, rtol=1e-6)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    step = float(reference_state(made).qparams[last_site(made)].scale)
    assert np.abs(found - made(x).detach().numpy()).max() <= 1.01 * step


class Product(Mixed):
    """A linear layer, written as a product with a constant matrix and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 5))

    def forward(self, x):
        return self.conv(x).flatten(1) @ self.weight + self.bias


def test_the_addition_behind_a_product_is_an_int32_bias(tmp_path) -> None:
    import onnx

    path = tmp_path / "npu.yaml"
    path.write_text(SPEC.replace("BIAS", "int32").replace("SCALE", "input_times_weight"))
    torch.manual_seed(0)
    model, x = Product().eval(), torch.rand(2, 3, 7, 7)
    made = backquant.quantize(model, x, backend=path, calibration=[x])
    assert made.report.coverage == 1.0
    backquant.export(made, tmp_path / "m.onnx", example_inputs=x, require=0.0)
    graph = onnx.load(tmp_path / "m.onnx").graph
    held = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    [product] = [n for n in graph.node if n.op_type in ("Gemm", "MatMul")]
    bias = product.input[2] if product.op_type == "Gemm" else None
    assert bias is not None and held[producers[bias].input[0]].dtype.name == "int32"


def held_of(node, held):
    return held[node.input[1]]


def last_site(made) -> str:
    return reference_state(made).sites.sites[-1].name
