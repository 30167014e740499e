"""Modules that read shapes, axes and slices from tensors, as models imported from ONNX do, are exported."""

from __future__ import annotations

import operator
import warnings

import onnx2torch
import onnxruntime
import pytest
import torch
from torch import fx, nn

import backquant
from backquant.deploy import write_read_sizes
from backquant.deploy.read_sizes import traced_with_values
from backquant.errors import CaptureError

pytestmark = pytest.mark.xdist_group("imported encoder")  # one worker pays for what they share


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An encoder of torch's own, written by torch.onnx and read by onnx2torch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    path = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx about its older exporter
        # in training mode the layer is not one operator, which ONNX does not have
        training = torch.onnx.TrainingMode.PRESERVE
        torch.onnx.export(
            encoder.train(),
            (torch.randn(2, 6, 16),),
            str(path),
            dynamo=False,
            opset_version=14,
            training=training,
        )
        return onnx2torch.convert(str(path)).eval()


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # onnx2torch's slices
def test_an_imported_encoder_is_exported(imported, tmp_path) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 6, 16)
    quantized = backquant.quantize(imported, x, backend="onnxruntime", calibration=[x])
    exported = backquant.export(quantized, tmp_path / "m.onnx", example_inputs=x)
    assert exported.integer == exported.expected > 5
    assert exported.integer_share == 1.0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [got] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(got), quantized(x), atol=0.05)
    assert quantized(torch.randn(2, 6, 16)).shape == (2, 6, 16)  # it is not changed


class Tracer(fx.Tracer):
    """Calls of modules stay calls, as those do that fx cannot look into."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


class Slice(nn.Module):
    def forward(self, x, starts, ends):
        return x[tuple(slice(a, b) for a, b in zip(starts.numpy(), ends, strict=True))]


class Split(nn.Module):
    def forward(self, x, sizes):
        return torch.split(x, sizes.tolist(), 1)


class Largest(nn.Module):
    """Reads the values of what it is given: no constant."""

    def forward(self, x, least):
        return x * 2 if x.max() > least else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slice, self.split, self.largest = Slice(), Split(), Largest()
        self.starts, self.least = nn.Buffer(torch.tensor([0, 1])), nn.Buffer(torch.tensor(3))
        self.sizes = nn.Buffer(torch.tensor([2, 3]))

    def forward(self, x):
        ends = torch.stack([torch.scalar_tensor(x.size(0), dtype=torch.int64), self.starts[1] + 5])
        parts = self.split(self.slice(x, self.starts, ends), self.sizes)
        return self.largest(parts[0], self.least), parts[1]


def test_what_is_read_from_constants_and_sizes_is_written() -> None:
    model = Model()
    module = fx.GraphModule(model, Tracer().trace(model))
    x = torch.arange(24.0).reshape(3, 8)
    wanted = module(x)
    assert write_read_sizes(module, (x,), {}) == ("slice_1", "split")
    called = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert called == ["largest"]  # it branches on a value of its input
    for one, two in zip(wanted, module(x), strict=True):
        assert torch.equal(one, two)
    assert not any(node.target == "size" for node in module.graph.nodes)


class Skipping(Model):
    """What is called with the third argument by name leaves the second out."""

    def forward(self, x, mask=None, other=None):
        first, second = super().forward(x)
        return first + other.reshape(first.size(0), 2), second


def test_an_argument_between_others_may_be_left_out() -> None:
    model = Skipping()
    module = fx.GraphModule(model, Tracer().trace(model))
    given = {"x": torch.arange(24.0).reshape(3, 8), "other": torch.ones(6)}
    wanted = module(**given)
    assert write_read_sizes(module, (given["x"],), {"other": given["other"]}) == (
        "slice_1",
        "split",
    )
    assert all(map(torch.equal, wanted, module(**given)))


def test_calls_of_torch_are_left_alone() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Flatten()))
    before = [str(node) for node in module.graph.nodes]
    assert write_read_sizes(module, (torch.zeros(1, 2),), {}) == ()
    assert [str(node) for node in module.graph.nodes] == before


def test_a_trace_reads_sizes_and_constants() -> None:
    weight = torch.ones(3, 3)

    def run(x, y):
        first, second = x
        assert len(y) == y.shape[0] == y.size(0) == y.dim() + 1 == 3
        return (first @ weight).reshape(torch.Size(torch.tensor([9])))[
            torch.tensor(2) :
        ], second * y

    values = [torch.randn(2, 3, 3), torch.randn(3, 3)]
    made = traced_with_values(run, values)
    for one, two in zip(run(*values), made(*values), strict=True):
        assert torch.equal(one, two)
    targets = {node.target for node in made.graph.nodes if node.op == "call_function"}
    assert targets == {operator.getitem, operator.matmul, operator.mul}


def test_a_trace_does_not_branch_on_values() -> None:
    with pytest.raises(fx.proxy.TraceError):
        traced_with_values(lambda x: x if x.sum() > 0 else -x, [torch.ones(2)])


class Attending(nn.Module):
    """As transformers' Longformer: what some layers compute is decided by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), Deciding()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.ones(x.shape[0], dtype=torch.long) if mask is None else mask
        return self.layer(self.first(x), (mask > 1).any().item())


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_global: bool) -> torch.Tensor:
        x = self.fc(x)
        if is_global:
            x = x.flip(0)
        x[:, 2:] += x[:, :2]
        return x


def test_a_condition_that_is_made_of_sizes_is_known_in_a_file(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(3, 4)
    result = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    backquant.export(result, tmp_path / "m.onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [got] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(got), result(x), atol=0.05)


def test_a_condition_that_is_made_of_inputs_is_refused(tmp_path, capsys) -> None:
    inputs = torch.randn(3, 4), torch.ones(3, dtype=torch.long)
    model = Attending().eval()
    result = backquant.quantize(model, inputs, backend="onnxruntime", calibration=[inputs])
    with pytest.raises(CaptureError, match="depends on the values of a tensor") as caught:
        backquant.export(result, tmp_path / "m.onnx", example_inputs=inputs)
    assert "without the input that decides" in str(caught.value)
    assert capsys.readouterr() == ("", "")  # torch prints the graph
