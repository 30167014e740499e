"""FP8 E4M3: scales, reference model, file, and ONNX Runtime on it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import backquant
from backquant.deploy.portable import portable, with_weight_nodes
from backquant.deploy.tensorrt import check_onnx
from backquant.errors import ConfigError
from backquant.nn.quantized import reference
from backquant.observe import MinMaxObserver

E4M3 = torch.float8_e4m3fn


class Net(nn.Module):
    """A convolution, a residual addition, pooling, a linear layer on three axes, a product of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.up, self.fc = nn.Linear(16, 16), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.pool(self.relu(x + self.body(x)))
        x = self.up(torch.flatten(x, 2))
        return self.fc(torch.matmul(x, x.transpose(1, 2)))


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = Net().eval()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    quantized = backquant.quantize(model, backend="tensorrt_fp8", calibration=batches)
    return model, quantized, batches[0]


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    file = tmp_path_factory.mktemp("fp8") / "m.onnx"
    backquant.export(made[1], file, to="tensorrt")
    return file


def test_scale_is_the_largest_magnitude_over_448() -> None:
    observer = MinMaxObserver(
        dtype=E4M3, qscheme=torch.per_tensor_symmetric, quant_min=-448, quant_max=448
    )
    observer(torch.tensor([-3.0, 896.0]))
    scale, zero_point = observer.calculate_qparams()
    assert (scale.item(), zero_point.item()) == (2.0, 0)


def test_weights_are_stored_as_eight_bit_floats(made) -> None:
    model, quantized, _ = made
    weight = quantized.graph_module.get_submodule("fc").weight
    assert weight.dtype == E4M3
    scale = model.fc.weight.abs().max() / 448
    assert torch.equal(weight.float(), (model.fc.weight / scale).to(E4M3).float())
    part = quantized.graph_module.get_submodule("fc")
    assert torch.equal(part.dequantized_weight(), weight.float() * part.weight_scale)


def test_reference_model_is_near_the_float_model(made) -> None:
    model, quantized, x = made
    with torch.no_grad():
        wanted, got = model(x), quantized(x)
    noise = (got - wanted).square().mean()
    assert noise > 0 and 10 * torch.log10(wanted.square().mean() / noise) > 20


def test_file_breaks_no_rule_and_is_of_operator_set_19(path) -> None:
    assert check_onnx(path) == []
    model = onnx.load(path)
    assert [o.version for o in model.opset_import if o.domain == ""] == [19]
    stored = {t.data_type for t in model.graph.initializer if len(t.dims) > 1}
    assert onnx.TensorProto.FLOAT8E4M3FN in stored
    assert not {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} & stored


def test_onnx_runtime_computes_what_the_exported_graph_does(made, path) -> None:
    """Bit for bit but for the order of sums; the graph has a rounding less than the reference model."""
    _, quantized, x = made
    with torch.no_grad():
        wanted = portable(quantized.graph_module, quantized.backend_config.qdq)(x).numpy()
        reference_output = quantized(x).numpy()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    signal = np.square(wanted).mean()
    assert np.square(got - wanted).mean() <= 1e-6 * signal
    assert np.square(got - reference_output).mean() <= 10**-2.5 * signal


def test_roundings_are_those_of_onnx(made) -> None:
    """The operators against onnx's own evaluator of QuantizeLinear-19."""
    x = np.linspace(-60, 60, 4001).astype(np.float32)
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
        ],
        "pair",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])],
        [
            helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]),
            helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    [wanted] = ReferenceEvaluator(model).run(None, {"x": x})
    ops = torch.ops.backquant
    q = ops.quantize_float8(torch.from_numpy(x), 0.1, E4M3)
    assert np.array_equal(ops.dequantize_float8(q, float(np.float32(0.1))).numpy(), wanted)


def test_artifact_keeps_it(made, tmp_path) -> None:
    _, quantized, x = made
    backquant.save(quantized, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    with torch.no_grad():
        assert torch.equal(loaded(x), quantized(x))
    backquant.export(loaded, tmp_path / "m.onnx", to="tensorrt")
    assert check_onnx(tmp_path / "m.onnx") == []


def test_scales_per_channel() -> None:
    qparams = {
        "dtype": E4M3,
        "qscheme": torch.per_channel_affine,
        "scale": torch.tensor([0.5, 2.0]),
        "zero_point": torch.zeros(2),
        "axis": 0,
    }
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    made = reference.Linear.from_float(linear, qparams)
    scale = torch.tensor([[0.5], [2.0]])
    assert torch.equal(made.get_weight(), (linear.weight / scale).to(E4M3).float() * scale)
    assert torch.equal(with_weight_nodes(made)(x), made(x))


def test_ranges_that_are_not_around_zero_are_refused() -> None:
    largest = MinMaxObserver.with_args(dtype=E4M3, qscheme=torch.per_tensor_symmetric)
    narrow = largest.with_args(quant_min=-100, quant_max=50)
    mapping = backquant.QConfigMapping().set_global(backquant.QConfig(narrow, largest))
    with pytest.raises(ConfigError, match=r"the range \[-100, 50\] is none of"):
        backquant.quantize(
            nn.Sequential(nn.Linear(4, 4)),
            backend="tensorrt_fp8",
            qconfig_mapping=mapping,
            calibration=[torch.randn(2, 4)],
        )


def asked(observer: object) -> backquant.QConfigMapping:
    return backquant.QConfigMapping().set_global(backquant.QConfig(PER_TENSOR, observer))


PER_TENSOR = MinMaxObserver.with_args(
    dtype=E4M3, qscheme=torch.per_tensor_symmetric, quant_min=-448, quant_max=448
)


def test_scales_per_channel_are_refused_with_a_fix_that_works() -> None:
    """Also of a convolution that is fused with its activation."""
    weight = backquant.PerChannelMinMaxObserver.with_args(
        dtype=E4M3, qscheme=torch.per_channel_symmetric, quant_min=-448, quant_max=448
    )
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1)).eval()
    x, mapping = torch.randn(1, 1, 5, 5), asked(weight)

    def explained() -> list:
        return backquant.explain(model, x, backend="tensorrt_fp8", qconfig_mapping=mapping).rows

    rows = explained()
    assert [row.outcome for row in rows] == ["float", "float"]
    for row in rows:
        assert (row.reasons[0].rule, row.reasons[0].admitted[-10:]) == ("granularity", "per tensor")
        names = {**vars(torch), **{n: getattr(backquant, n) for n in ("QConfig", "MinMaxObserver")}}
        exec(row.reasons[0].fix, {**names, "torch": torch, "qconfig_mapping": mapping})
    assert [row.outcome for row in explained()] == ["quantized", "quantized"]


def test_training_is_refused() -> None:
    fake = backquant.FakeQuantize.with_args(
        observer=backquant.MovingAverageMinMaxObserver, dtype=E4M3, quant_min=-448, quant_max=448
    )
    mapping = backquant.QConfigMapping().set_global(backquant.QConfig(fake, fake))
    with pytest.raises(ConfigError, match="has no quantization-aware training"):
        backquant.prepare_qat_fx(
            nn.Sequential(nn.Linear(2, 2)),
            mapping,
            torch.randn(1, 2),
            backend_config=backquant.get_backend_config("tensorrt_fp8"),
        )
    with pytest.raises(ConfigError, match="names no defaults for training"):
        backquant.get_default_qat_qconfig_mapping("tensorrt_fp8")


def test_the_description_claims_no_modules_of_training() -> None:
    """Found by ``conform``: 22 claims whose fake quantization is refused."""
    found = backquant.get_backend_config("tensorrt_fp8").configs
    assert not [entry for entry in found if entry.qat_module is not None]
    assert not [entry for entry in found if "qat" in getattr(entry.pattern, "__module__", "")]
    folded = [entry for entry in found if entry.pattern == (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)]
    assert len(folded) == 1
