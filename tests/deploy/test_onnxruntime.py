"""ONNX files: what ONNX Runtime makes of them, by the node types of its optimised graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.deploy import Exported
from backquant.deploy.onnx.exporter import origin_of
from backquant.observe import PerChannelMinMaxObserver, PlaceholderObserver
from backquant.qconfig import QConfig, QConfigMapping, per_channel_dynamic_qconfig
from backquant.runtime import QuantizedModel


def run(path: Path, *inputs: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def kernels(exported: Exported) -> Counter[str]:
    return Counter(use.kernel for use in exported.kernels)


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()))


def export(
    model: nn.Module, batch: torch.Tensor, path: Path, backend: Any = "onnxruntime", **more: Any
) -> tuple[Any, Exported]:
    torch.manual_seed(0)
    quantized = backquant.quantize(model.eval(), backend=backend, calibration=[batch])
    return quantized, backquant.export(quantized, path, **more)


def test_residual_network_runs_whole_on_integer_kernels(residual, tmp_path) -> None:
    model: QuantizedModel = residual("onnxruntime")
    path = tmp_path / "m.onnx"
    exported = backquant.export(model, path, dynamic_shapes={"x": {0: "batch"}})
    assert exported.integer == exported.expected == 7
    assert exported.integer_share == 1.0
    assert exported.left_in_float == ()
    found = kernels(exported)
    for kernel in ("QLinearAdd", "NhwcMaxPool", "QLinearGlobalAveragePool", "QLinearConv"):
        assert found[kernel] >= 1, found
    assert found["QLinearConv"] == 2
    assert found["QGemm"] + found["MatMulIntegerToFloat"] == 1
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        assert torch.allclose(run(path, x), model(x), atol=2e-2)


def test_file_is_clean_and_declares_what_it_is(residual, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    backquant.export(residual("onnxruntime"), path, options={"opset": 19})
    model = onnx.load(str(path))
    onnx.checker.check_model(model, full_check=True)
    assert {o.domain: o.version for o in model.opset_import}[""] == 19
    constants = {t.name: t for t in model.graph.initializer}
    weights = [
        n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants
    ]
    integers = [constants[node.input[0]].data_type for node in weights]
    assert sorted(integers) == 3 * [onnx.TensorProto.INT8] + 3 * [onnx.TensorProto.INT32]  # biases
    for node in weights:
        assert constants[node.input[2]].data_type == constants[node.input[0]].data_type
        assert "axis" in {a.name for a in node.attribute}
    per_tensor = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert per_tensor
    assert all(list(constants[n.input[1]].dims) == [] for n in per_tensor)
    used = {name for node in model.graph.node for name in node.input}
    assert set(constants) <= used
    assert str(Path.cwd()) not in str(model)
    assert not any(
        p.key.startswith("pkg.torch") for n in model.graph.node for p in n.metadata_props
    )


class Mixed(nn.Module):
    """Operators with integer kernels beside those without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.mean, self.middle = nn.AvgPool2d(2), nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.silu = nn.SiLU()
        self.last = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(torch.relu(self.conv(x)))
        x = torch.cat([self.left(x), self.right(x)], 1)
        return self.last(self.silu(self.up(self.middle(self.mean(x)))))


def test_mixed_operators(tmp_path) -> None:
    quantized, exported = export(Mixed(), torch.randn(2, 4, 8, 8), tmp_path / "m.onnx")
    found = kernels(exported)
    assert found["QLinearConv"] == 6
    assert found["QLinearAveragePool"] == 1
    assert found["QLinearConcat"] == 1
    assert found["ConvTranspose"] == 1
    [transposed] = [use for use in exported.kernels if use.kernel == "ConvTranspose"]
    assert (transposed.nodes, transposed.dtype, transposed.integer) == (("up",), "float32", False)
    assert exported.integer_share < 1
    floats = {row.node for row in quantized.report.float_rows}
    assert {"up", "silu"} <= floats


class Sequence(nn.Module):
    """1-d convolution, products of activations, softmax between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.softmax = nn.Softmax(-1)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x)).transpose(1, 2)
        scores = self.softmax(torch.matmul(self.q(x), self.k(x).transpose(1, 2)))
        return self.out(torch.matmul(scores, self.v(x)))


def test_attention_with_dynamic_batch_and_length(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    dynamic = {"x": {0: "batch", 2: "length"}}
    batch = torch.randn(2, 8, 6)
    _, exported = export(Sequence(), batch, tmp_path / "default.onnx", dynamic_shapes=dynamic)
    found = kernels(exported)
    assert found["Softmax"] == 1  # the default, which is faster
    assert found["QLinearMatMul"] + found["MatMulIntegerToFloat"] == 6
    everything = backquant.get_backend_config("onnxruntime")
    assert everything.defaults is not None
    everything.set_defaults(replace(everything.defaults, leave_float=()))
    quantized, exported = export(Sequence(), batch, path, everything, dynamic_shapes=dynamic)
    assert exported.integer == exported.expected
    found = kernels(exported)
    assert found["QLinearConv"] == 1
    assert found["QLinearSoftmax"] == 1
    assert found["QLinearMatMul"] + found["MatMulIntegerToFloat"] == 6
    x = torch.randn(3, 8, 11)
    assert sqnr(quantized(x), run(path, x)) > 35


class Attention(nn.Module):
    """One operator, with keys that are not seen where ``seen`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = seen.ne(0)[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 16))


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_products_of_attention_run_on_integers(tmp_path, capture) -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    seen = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batches = [(torch.randn(2, 6, 16), seen) for _ in range(8)]
    quantized = backquant.quantize(
        model, batches[0], backend="onnxruntime", calibration=batches, capture=capture
    )
    path = tmp_path / "m.onnx"
    dynamic = {name: {0: "batch", 1: "length"} for name in ("x", "seen")}
    exported = backquant.export(quantized, path, dynamic_shapes=dynamic)
    found = kernels(exported)
    assert found["QLinearMatMul"] + found["MatMulIntegerToFloat"] + found["QGemm"] == 4
    assert found["Softmax"] == 1
    assert exported.integer_share == 1.0
    longer = torch.randn(3, 9, 16), torch.arange(9).lt(7).long().repeat(3, 1)
    assert sqnr(quantized(*longer), run(path, *longer)) > 35
    with torch.no_grad():
        assert sqnr(model(*longer), run(path, *longer)) > 25


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.act, self.norm = nn.GELU(), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.b(self.act(self.a(x))))


def test_products_give_floats_where_nothing_quantized_reads_them(tmp_path) -> None:
    """No conversion stands between them and the GELU or the addition."""
    for name, shape in (("three.onnx", (2, 4, 16)), ("two.onnx", (4, 16))):
        quantized, exported = export(Feed(), torch.randn(*shape), tmp_path / name)
        found = kernels(exported)
        assert found["MatMulIntegerToFloat"] + found["QGemm"] == 2
        assert found["BiasGelu"] + found["Gelu"] == 1
        assert found["Sum"] == found["LayerNormalization"] == 1  # joined, they are slower
        x = torch.randn(*shape)
        assert sqnr(quantized(x), run(tmp_path / name, x)) > 50


class Wide(nn.Module):
    """A ReLU that is read beside a float value, as in recommenders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([torch.relu(self.first(x)), x.square()], -1))


def test_a_product_before_a_float_relu_runs_on_integers(tmp_path) -> None:
    quantized, exported = export(Wide(), torch.randn(4, 16), tmp_path / "m.onnx")
    assert kernels(exported)["QGemm"] == 2
    x = torch.randn(4, 16)
    assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 50


class Squared(nn.Module):
    """A squared ReLU behind a product without a bias, as in Nemotron."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)).square())


@pytest.mark.parametrize("shape", [(4, 16), (2, 4, 16)])
def test_a_product_without_bias_before_a_float_relu_runs_on_integers(tmp_path, shape) -> None:
    quantized, exported = export(Squared(), torch.randn(shape), tmp_path / "m.onnx")
    found = kernels(exported)
    assert found["QGemm"] + found["MatMulIntegerToFloat"] == 2, found
    x = torch.randn(shape)
    assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 50


def test_dynamic_quantization_is_written_as_integer_products(tmp_path) -> None:
    model, x = Feed().eval(), torch.randn(2, 4, 16)
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    quantized = backquant.quantize(model, x, backend="onnxruntime", qconfig_mapping=mapping)
    path = tmp_path / "m.onnx"
    exported = backquant.export(quantized, path, dynamic_shapes={"x": {0: "b", 1: "t"}})
    types = Counter(node.op_type for node in onnx.load(str(path)).graph.node)
    assert types["DynamicQuantizeLinear"] == types["MatMulInteger"] == 2
    assert types["DequantizeLinear"] == types["QuantizeLinear"] == 0
    assert kernels(exported)["DynamicQuantizeMatMul"] == 2
    assert exported.integer == exported.expected == 2
    longer = torch.randn(1, 9, 16)
    assert sqnr(quantized(longer), run(path, longer)) > 60
    with torch.no_grad():
        assert sqnr(model(longer), run(path, longer)) > 30


def test_weight_only_is_written_as_integer_weights(tmp_path) -> None:
    model, x = Feed().eval(), torch.randn(2, 4, 16)
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )
    activation = PlaceholderObserver.with_args(dtype=torch.float32)
    mapping = QConfigMapping().set_object_type(nn.Linear, QConfig(activation, weight))
    quantized = backquant.quantize(model, x, backend="onnxruntime", qconfig_mapping=mapping)
    path = tmp_path / "m.onnx"
    exported = backquant.export(quantized, path)
    graph = onnx.load(str(path)).graph
    types = Counter(node.op_type for node in graph.node)
    assert types["DequantizeLinear"] == 2
    assert types["QuantizeLinear"] == 0
    assert exported.expected == 0  # nothing was to compute on integers
    found = run(path, x)
    assert sqnr(quantized(x), found) > 35


def test_narrow_range_is_clipped_before_it_is_quantized(tmp_path) -> None:
    """Seven bits: the file computes what the reference model computes."""
    mapping = backquant.get_default_qconfig_mapping("x86")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    quantized = backquant.quantize(
        model, backend="onnxruntime", qconfig_mapping=mapping, calibration=[torch.randn(4, 8)]
    )
    path = tmp_path / "m.onnx"
    backquant.export(quantized, path, require=0.0)
    x = torch.randn(4, 8) * 100
    np.testing.assert_allclose(run(path, x).numpy(), quantized(x).numpy(), atol=1e-3)


def test_require_by_share_and_by_module(residual, tmp_path) -> None:
    model = residual("onnxruntime")
    assert backquant.export(model, tmp_path / "a.onnx", require=1.0).integer_share == 1.0
    assert backquant.export(model, tmp_path / "b.onnx", require="body").path.exists()
    with pytest.raises(backquant.UsageError, match="no quantized operator is in a module 'bdy'"):
        backquant.export(model, tmp_path / "c.onnx", require="bdy")


class Clipped(nn.Module):
    """What clips behind a reshape, and inside of what is quantized: neither does ONNX Runtime take away."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 3)
        self.clip, self.last = nn.Hardtanh(-0.7, 0.9), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.clip(self.conv(torch.relu(self.tokens(x)).transpose(1, 2))))


def test_products_before_a_clip_run_on_integers(tmp_path) -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(2, 6, 8)
    quantized, exported = export(Clipped(), x, tmp_path / "m.onnx")
    assert exported.integer == exported.expected == 4
    assert kernels(exported)["Clip"] == 1  # of integers: the ends of the range are not its bounds
    assert sqnr(quantized(x), run(tmp_path / "m.onnx", x)) > 40


class Cached(nn.Module):
    """Gives how much of its cache is filled, as a number, beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.linear(x), 12


def test_a_number_among_the_outputs_is_a_tensor(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model = backquant.quantize(Cached().eval(), backend="onnxruntime", calibration=[x])
    backquant.export(model, tmp_path / "m.onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    first, filled = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert filled.shape == () and filled == 12
    torch.testing.assert_close(torch.from_numpy(first), model(x)[0], atol=0.05, rtol=0)


class Shifted(nn.Module):
    """Takes the least, or divides by the greatest value of a whole tensor."""

    def __init__(self, least: bool) -> None:
        super().__init__()
        self.linear, self.least = nn.Linear(8, 8), least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.amin() if self.least else y / y.amax()


@pytest.mark.parametrize("least", [True, False])
def test_the_least_and_the_greatest_of_all_values(least: bool, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model = backquant.quantize(Shifted(least).eval(), backend="onnxruntime", calibration=[x])
    backquant.export(model, tmp_path / "m.onnx", example_inputs=x)
    assert sqnr(model(x), run(tmp_path / "m.onnx", x)) > 30


class Regrouped(nn.Module):
    """Attention whose result is reshaped before its axes are exchanged (UMT5)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 12, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        y = y.reshape(2, -1, 12, 8).transpose(1, 2).contiguous()
        return self.out(y.view(2, 12, -1))


def test_views_behind_attention_survive_the_exporter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32)
    model = backquant.quantize(
        Regrouped().eval(), backend="onnxruntime", calibration=[x], capture="export"
    )
    backquant.export(model, tmp_path / "m.onnx", example_inputs=x)
    assert sqnr(model(x), run(tmp_path / "m.onnx", x)) > 25


def test_names_of_modules_that_look_like_the_runtimes_own(tmp_path: Path) -> None:
    """``_token_`` and a number is what the runtime appends; Segment Anything's layers have it within."""
    model = nn.Sequential()
    model.add_module("attn_token_to_image", nn.Linear(8, 8))
    model.add_module("attn_token_2", nn.Linear(8, 8))
    x = torch.randn(2, 3, 8)
    quantized = backquant.quantize(
        model.eval(), x, backend="onnxruntime", calibration=[x], slower="keep"
    )
    exported = backquant.export(quantized, tmp_path / "model.onnx", example_inputs=x)
    named = {name for kernel in exported.kernels if kernel.integer for name in kernel.nodes}
    assert named >= {"attn_token_to_image", "attn_token_2"}


class Downsampled(nn.Module):
    """As a temporal network: convolutions behind pads, beside a convolution that is called in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv1d(n, 16, 3) for n in (8, 16, 16))
        self.pad, self.beside = nn.ReplicationPad1d((2, 0)), nn.Conv1d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv1d(self.pad(x), self.first.weight, self.first.bias).relu()
        y = (y + self.beside(x)).relu()
        z = F.conv1d(self.pad(y), self.second.weight, self.second.bias).relu()
        z = F.conv1d(self.pad(z), self.third.weight, self.third.bias).relu()
        return (z + y).relu()


def test_convolutions_whose_names_are_those_of_other_results(tmp_path: Path) -> None:
    x = torch.randn(1, 8, 20)
    model = backquant.quantize(
        Downsampled().eval(), backend="onnxruntime", calibration=[x], slower="keep"
    )
    exported = backquant.export(model, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer == exported.expected == 4
    named = [use.nodes for use in exported.kernels if use.kernel == "QLinearConv"]
    assert len(set(named)) == len(named) == 4


def test_a_tensor_with_the_name_of_another_origin() -> None:
    origins = {"conv_2/Conv": "conv_2", "conv_2": "beside"}  # a node, and a tensor
    assert origin_of("conv_2/Conv_token_7", origins) == "conv_2"
    assert origin_of("conv_2", origins) == "beside"
