"""Convolutions that do not pad with zeros run on integers: what is padded is quantized again."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import fx, nn

import backquant
from backquant.graph import register_quantized_decomposed
from backquant.lower.padded import pad_before

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def _quantized_input(conv: nn.Module, dims: int) -> fx.GraphModule:
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    qparams = (0.05, 120, 0, 255, torch.uint8)
    graph = fx.Graph()
    q = graph.call_function(ops.quantize_per_tensor.default, (graph.placeholder("x"), *qparams))
    x = graph.call_function(ops.dequantize_per_tensor.default, (q, *qparams))
    graph.output(graph.call_module("conv", (x,)))
    return fx.GraphModule({"conv": conv}, graph)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d], ids=["1d", "2d"])
def test_the_same_numbers(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    dims = 1 if kind is nn.Conv1d else 2
    conv = kind(2, 3, (3, 4)[:dims], padding="same", padding_mode=mode)  # as much on one side
    module, x = (
        _quantized_input(nn.Sequential(conv, nn.ReLU()), dims),
        torch.randn(2, 2, *[6] * dims),
    )
    wanted = module(x)
    pad_before(module)
    assert torch.equal(module(x), wanted)
    assert conv.padding_mode == mode  # it is not changed
    [call] = [node for node in module.graph.nodes if node.op == "call_module"]
    assert "quantize_per_tensor" in str(call.args[0].args[0].target)


def test_they_run_on_integers_in_onnx_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")).eval()
    x = torch.randn(2, 3, 8, 8)
    result = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    exported = backquant.export(result, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer_share == 1.0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [got] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(got), result(x), atol=0.05)


@pytest.mark.parametrize("slower", ["keep", "float"])
def test_they_run_on_kernels_of_x86(tmp_path: Path, slower: str) -> None:
    """Saved, loaded and compiled, too; what stays float keeps its padding."""
    torch.manual_seed(0)
    reflecting = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
    parts = [nn.Conv2d(3, 8, 4, padding="same"), nn.ReLU(), reflecting, nn.Sigmoid()]
    model = nn.Sequential(*parts, nn.Conv2d(8, 4, 3, padding=2, padding_mode="circular")).eval()
    x = torch.randn(2, 3, 8, 8)
    result = backquant.quantize(model, x, backend="x86", calibration=[x], slower=slower)
    if slower == "keep":
        assert result.report.coverage == 1.0
    backquant.save(result, tmp_path / "m.bq")
    for other in (x, torch.randn(1, 3, 9, 7)):
        got = result(other)
        assert torch.allclose(got, model(other), atol=0.1)
        assert torch.equal(backquant.load(tmp_path / "m.bq")(other), got)
    assert torch.allclose(result.compile(x)(x), result(x), atol=0.02)


def test_a_convolution_of_floats_keeps_its_padding() -> None:
    conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")
    module = _quantized_input(conv, 2)
    pad_before(module, for_kernels=True)
    assert [node.op for node in module.graph.nodes].count("call_function") == 2


def test_a_transposed_convolution_has_no_such_padding() -> None:
    module = _quantized_input(nn.ConvTranspose2d(2, 3, 3), 2)
    pad_before(module)
    assert [node.op for node in module.graph.nodes].count("call_function") == 2
