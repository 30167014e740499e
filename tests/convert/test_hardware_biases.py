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
    weight_dtype: {dtype: qint8, symmetric: true, granularity: per_channel}
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


def test_few_bits_are_refused_and_forty_are_enough(tmp_path) -> None:
    """Scales of weights leave room for a bias of many bits; for few, weights would be lost."""
    _, narrow, _ = quantized(tmp_path, "int8", "input_times_weight")
    [reason] = reference_state(narrow).plan.decisions["conv"].reasons
    assert reason.rule == "bias-range" and reason.admitted == "a bias of at most 127 steps"
    large = Mixed().eval()
    nn.init.constant_(large.conv.bias, 1e9)
    _, wide, _ = quantized(tmp_path, "int64", "input_times_weight", large)
    steps = wide.conv.bias / steps_of(wide, "conv", "input_times_weight")
    assert float(steps.detach().max()) == pytest.approx(2**38, rel=1e-6)
    assert torch.allclose(wide.conv.bias, large.conv.bias)


def on_grid(bias: torch.Tensor, steps: torch.Tensor) -> bool:
    return torch.allclose(bias.double() / steps, (bias.double() / steps).round(), atol=2e-3)


class Transposed(nn.Module):
    """A transposed convolution as a function."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(6, 2, 2, 2)),
            nn.Parameter(torch.rand(2 * groups)),
        )
        self.groups = groups

    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, self.bias, 2, groups=self.groups)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("as_function", [False, True])
def test_transposed_convolutions(groups: int, as_function: bool, tmp_path) -> None:
    """Weights have a scale for each channel that comes out of a group, which all groups share."""
    import onnx
    import onnxruntime

    path = tmp_path / "npu.yaml"
    path.write_text(SPEC.replace("BIAS", "int32").replace("SCALE", "input_times_weight"))
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(6, 2 * groups, 2, 2, groups=groups)
    model = (Transposed(groups) if as_function else nn.Sequential(layer)).eval()
    x = torch.rand(1, 6, 4, 4)
    made = backquant.quantize(model, x, backend=path, calibration=[x])
    assert made.report.coverage == 1.0
    held = dict(made.graph_module.named_buffers()) | dict(made.graph_module.named_parameters())
    [bias] = (t for name, t in held.items() if "bias" in name or "rounded" in name)
    [scale] = (t for name, t in held.items() if "scale" in name)
    [given] = (s for s in reference_state(made.graph_module).sites.sites if s.role.value == "input")
    steps = reference_state(made.graph_module).qparams[given.name].scale.double() * scale
    assert scale.shape == (2,) and on_grid(bias, steps.repeat(groups))
    exported = backquant.export(made, tmp_path / "m.onnx", to="qdq-onnx", require=0.0)
    assert exported.integer == exported.expected == 1
    graph = onnx.load(tmp_path / "m.onnx").graph
    [product] = (node for node in graph.node if node.op_type == "ConvTranspose")
    producer = next(node for node in graph.node if product.input[2] in node.output)
    stored = {one.name: one.data_type for one in graph.initializer}
    assert stored[producer.input[0]] == onnx.TensorProto.INT32
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), made(x), atol=1e-6)


class Twice(nn.Module):
    """One layer, on values of two ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.layer(5 * self.layer(x))


def test_a_module_that_is_called_with_two_scales_has_two_biases(tmp_path) -> None:
    given, made, x = quantized(tmp_path, "int32", "input_times_weight", Twice().eval())
    first, second = made.layer, made.layer_bias_0
    assert first.weight is second.weight and not torch.equal(first.bias, second.bias)
    state = reference_state(made)
    for module, reader in ((first, "layer"), (second, "layer_1")):
        [site] = (s for s in state.sites.sites if reader in s.readers and s.role.value == "input")
        assert on_grid(module.bias, state.qparams[site.name].scale.double() * module.weight_scale)
        assert torch.allclose(module.bias, given.layer.bias, atol=0.01)
    saved = backquant.quantize(
        given, x, backend=tmp_path / "npu.yaml", calibration=[x], require=0.0
    )
    backquant.save(saved, tmp_path / "twice.bq")
    assert torch.equal(backquant.load(tmp_path / "twice.bq")(x), saved(x))


def test_weights_scaled_by_input_channel_have_no_step_of_their_sums(tmp_path, snapshot) -> None:
    """Of a transposed convolution, whose axis 0 is that of its input."""
    path = tmp_path / "npu.yaml"
    path.write_text(SPEC.replace("BIAS", "int32").replace("SCALE", "input_times_weight"))
    backend = backquant.BackendConfig.load(path)
    first_axis = backquant.get_default_qconfig_mapping(backend).global_qconfig
    mapping = backquant.QConfigMapping().set_global(first_axis)
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2)).eval()
    with pytest.warns(UserWarning, match="stays float"):
        prepared = backquant.prepare_fx(
            model, mapping, torch.rand(1, 3, 4, 4), backend_config=backend
        )
    made = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    snapshot("input_channels", str(reference_state(made).plan.decisions["_0"]))


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
