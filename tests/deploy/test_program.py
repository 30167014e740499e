"""The captured program: functional, whatever the model changes in place, and marked with its nodes."""

from __future__ import annotations

from pathlib import Path

import benchmarks.stock  # noqa: F401 - torchvision beside the CPU build of torch
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.deploy.program import export_program
from backquant.errors import CaptureError


class InPlace(nn.Module):
    """One of each way to change a value: modules, functions, methods, assignments to views."""

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.clip = nn.Hardtanh(-2.0, 2.0, inplace=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        z = self.clip(self.body(y))
        z += y
        z = F.relu(z, inplace=True)
        if self.assigns:
            z[:, 0] = z[:, 1]
            z[:, 2:4].mul_(2.0)
        z = z.clamp_(0.0, 3.0)
        z.masked_fill_(z > 2.5, 1.0)
        return self.fc(z.mean((2, 3)).sub_(0.5))


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    noise = (wanted - found).detach().square().sum()
    return float(10 * torch.log10(wanted.detach().square().sum() / noise))


def run(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def test_a_program_is_functional_and_its_nodes_keep_their_origins() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True)))
    x = torch.randn(1, 3, 4, 4)
    program = export_program(module, (x,), {}, None)
    targets = [str(n.target) for n in program.exported.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.conv2d.default", "aten.relu.default"]
    assert list(program.origins.values()) == ["_0", "_1"]
    assert torch.equal(program.exported.module()(x), module(x))


def test_a_changed_input_is_a_new_value() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 1)))
    x = torch.randn(1, 3, 4, 4)
    program = export_program(module, (x.clone(),), {}, None)
    [output] = program.exported.graph_signature.output_specs
    assert output.arg.name == program.exported.graph.output_node().args[0][0].name
    given = x.clone()
    assert torch.equal(program.exported.module()(given), module(x.clone()))
    assert torch.equal(given, x)


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_every_change_in_place_reaches_onnx_runtime(capture, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = InPlace(assigns=capture == "export").eval(), torch.randn(2, 3, 8, 8)
    wanted = model(x)
    quantized = backquant.quantize(
        model, x, backend="onnxruntime", calibration=[x], capture=capture
    )
    backquant.export(quantized, tmp_path / "m.onnx")
    found = run(tmp_path / "m.onnx", x)
    assert sqnr(quantized(x), found) > 30
    assert sqnr(wanted, found) > 20


def test_resnet18_of_torchvision_exports_whole(tmp_path) -> None:
    import torchvision

    torch.manual_seed(0)
    model, x = torchvision.models.resnet18().eval(), torch.randn(2, 3, 64, 64)
    for backend, name in (("onnxruntime", "m.onnx"), ("openvino", "m.xml")):
        quantized = backquant.quantize(model, x, backend=backend, calibration=[x])
        exported = backquant.export(quantized, tmp_path / name)
        assert exported.integer_share == 1.0
        assert exported.integer == exported.expected == 32


class Deciding(nn.Module):
    """As the experts of transformers' Switch Transformers: a loop over what was chosen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in (x.sum(1) > 0).nonzero():
            x = x * (row + 1)
        return x


def test_a_module_that_stays_whole_and_decides_by_values_is_named_with_its_line() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Deciding()).eval(), torch.randn(3, 4)
    result = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    with pytest.raises(CaptureError, match="what it computes next depends on the values") as told:
        backquant.export(result, "never.onnx", example_inputs=x)
    where = str(told.value.where)
    assert where.startswith("module '1'") or where.startswith("module '_1'")
    assert "for row in (x.sum(1) > 0).nonzero():" in where
    assert "rewrite its forward" in str(told.value.fix)
