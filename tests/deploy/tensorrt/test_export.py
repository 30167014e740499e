"""Models exported for TensorRT: no rule is broken, ONNX Runtime computes what the reference model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.portable import portable
from backquant.deploy.tensorrt import Finding, check_onnx
from backquant.deploy.tensorrt import target as target_module
from backquant.errors import CoverageError, ExportError


class Residual(nn.Module):
    """Batch norm, two residual additions, a concatenation, both poolings, a clipped activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.clip = nn.ReLU6()
        self.down = nn.Conv2d(8, 8, 1)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AvgPool2d(2)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.relu(x + self.clip(self.body(x)))
        y = self.relu(self.down(x) + self.branch(x))
        x = torch.cat([self.pool(x), self.average(y)], 1)
        return self.fc(torch.flatten(self.mean(x), 1))


class Block(nn.Module):
    """Attention and an MLP, with residual additions and layer norms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        scores = torch.matmul(self.q(h), self.k(h).transpose(1, 2))
        mixed = torch.matmul(torch.softmax(scores * 0.25, -1), self.v(h))
        x = x + self.out(mixed)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def quantized(model: nn.Module, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(*shape, generator=generator) for _ in range(2)]
    return backquant.quantize(model.eval(), backend="tensorrt", calibration=batches), batches[0]


@pytest.fixture(scope="module", params=["residual", "block"])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    model, shape = {"residual": (Residual(), (2, 3, 16, 16)), "block": (Block(), (2, 6, 16))}[
        request.param
    ]
    made, example = quantized(model, shape)
    path = tmp_path_factory.mktemp(request.param) / "m.onnx"
    return made, example, path, backquant.export(made, path, to="tensorrt")


def run(path: Path, x: torch.Tensor) -> np.ndarray:
    """Node by node as the file says: without the optimiser, which changes roundings."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def test_breaks_no_rule(exported) -> None:
    _, _, path, _ = exported
    assert check_onnx(path) == []


def test_all_weighted_operators_are_quantized(exported) -> None:
    _, _, path, report = exported
    assert report.integer_share == 1.0 and report.expected > 0
    weighted = {"Conv", "Gemm", "MatMul"}
    assert {use.dtype for use in report.kernels if use.kernel in weighted} == {"int8"}
    biases = {t.name: t.data_type for t in onnx.load(path).graph.initializer if "bias" in t.name}
    assert biases and set(biases.values()) == {onnx.TensorProto.FLOAT}


def test_onnx_runtime_computes_what_the_reference_model_does(exported) -> None:
    """Within one step of 8 bits: a pair before an epilogue is left out, and with it a rounding.

    Measured: the convolutional model bit for bit, the attention block 40 dB.
    """
    made, example, path, _ = exported
    with torch.no_grad():
        wanted = made(example).numpy()
    got = run(path, example)
    step = np.abs(wanted).max() / 127
    assert np.abs(got - wanted).max() <= 1.5 * step
    noise = np.square(got - wanted).mean()
    assert noise == 0 or 10 * np.log10(np.square(wanted).mean() / noise) > 35


def test_what_the_target_computes_in_float_is_named(exported) -> None:
    _, _, _, report = exported
    floats = {use.kernel for use in report.kernels if use.dtype == "float32"}
    assert floats <= {"LayerNormalization", "Softmax", "Relu"}
    assert report.integer == report.expected


def test_refuses_a_model_that_breaks_rules(tmp_path) -> None:
    """Unsigned activations, as another backend wants them."""
    made = backquant.quantize(
        nn.Linear(8, 8), backend="onnxruntime", calibration=[torch.randn(4, 8)]
    )
    with pytest.raises(ExportError, match="breaks rules of TensorRT at") as raised:
        backquant.export(made, tmp_path / "m.onnx", to="tensorrt")
    assert "signed" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_advice_becomes_the_reason(tmp_path, monkeypatch) -> None:
    """Where an operator of the file is not on integers, the finding about it says why."""
    made, _ = quantized(nn.Linear(8, 8), (4, 8))
    report = backquant.export(made, tmp_path / "m.onnx", to="tensorrt")
    [product] = [use for use in report.kernels if use.kernel in ("Gemm", "MatMul")]

    def advice(path):
        node = onnx.load(path).graph.node
        name = next(n.name for n in node if n.op_type == product.kernel)
        return [Finding("made-up", "advice", name, "too small", "more", "less", "https://x")]

    monkeypatch.setattr(target_module, "check_onnx", advice)
    monkeypatch.setattr(target_module, "kernels_of", lambda view, origins: iter(()))
    with pytest.raises(CoverageError, match=r"too small \(less\)"):
        backquant.export(made, tmp_path / "other.onnx", to="tensorrt")


def test_one_pair_for_each_epilogue_is_left_out() -> None:
    torch.manual_seed(0)
    made, _ = quantized(Residual(), (2, 3, 16, 16))
    rules = made.backend_config.qdq
    before = portable(made.graph_module, QDQRules())
    after = portable(made.graph_module, rules)
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    count = [sum(n.target is quantize for n in g.graph.nodes) for g in (before, after)]
    assert count[0] - count[1] == 3  # body → clip, clip → add, one of down and branch → add


def test_dynamic_batch(tmp_path) -> None:
    torch.manual_seed(0)
    made, example = quantized(Residual(), (2, 3, 16, 16))
    shapes = {"x": {0: "batch"}}
    backquant.export(made, tmp_path / "m.onnx", to="tensorrt", dynamic_shapes=shapes)
    assert check_onnx(tmp_path / "m.onnx") == []
    assert run(tmp_path / "m.onnx", example[:1]).shape == (1, 4)
