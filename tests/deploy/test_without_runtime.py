"""``qdq-onnx`` and ``pt2e``: what is written is what was planned, and computes what the
reference model does."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import backquant
import snapshots
from backquant.backend_config import BackendConfig
from backquant.deploy import qdq_onnx
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.deploy.portable import Computed, Read, written_operators
from backquant.errors import BackquantError
from backquant.match.plan import Plan
from backquant.nn.quantized.reference import Linear as ReferenceLinear

EXACT = """
schema_version: 1
name: exact
dtype_configs:
  values:
    input_dtype: &value {dtype: DTYPE, symmetric: true, power_of_two_scale: true}
    output_dtype: *value
  weighted:
    input_dtype: *value
    output_dtype: *value
    weight_dtype: {dtype: int4, quant_min_lower_bound: -7, quant_max_upper_bound: 7, power_of_two_scale: true}
    bias_dtype: int32
    bias_scale: input_times_weight
defaults:
  activation: {observer: minmax, dtype: DTYPE, qscheme: per_tensor_symmetric}
  weight:
    {observer: per_channel_minmax, dtype: int4, qscheme: per_channel_symmetric, quant_min: -7, quant_max: 7}
entries:
- operators: [conv2d, conv2d+batch_norm2d, conv2d+batch_norm2d+relu, conv2d+relu, linear]
  dtype_configs: [weighted]
- operators: [add, relu, relu6, max_pool2d, adaptive_avg_pool2d, flatten]
  dtype_configs: [values]
"""
LOAD = """
import sys, torch
import torch.ao.quantization.fx._decomposed
program, x, wanted = torch.export.load(sys.argv[1]), *torch.load(sys.argv[2])
assert torch.equal(program.module()(x), wanted)
assert "backquant" not in sys.modules
print(sorted({str(t.dtype) for t in program.state_dict.values()}))
"""


def run(path: Path, *inputs: torch.Tensor) -> torch.Tensor:
    """What ONNX Runtime computes without its optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(np.asarray(session.run(None, feed)[0]))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("exact") / "exact.yaml"
    path.write_text(EXACT.replace("DTYPE", "int16"))
    return str(path)


@pytest.fixture
def exact(residual: Any, described: str) -> tuple[Any, torch.Tensor]:
    """In powers of two, so that float sums are exact in any order."""
    return residual(described), torch.randn(2, 3, 16, 16)


def test_onnx_is_the_reference_model_bit_for_bit(exact: Any, tmp_path: Path) -> None:
    model, x = exact
    path = tmp_path / "m.onnx"
    exported = backquant.export(model, path, to="qdq-onnx", example_inputs=x)
    assert torch.equal(run(path, x), model(x))
    assert exported.integer == exported.expected == 9
    assert exported.integer_share == 1.0
    assert str(exported).endswith(
        "9 of 9 quantized operators between quantize and dequantize nodes, 100.0% of the multiply-adds"
    )
    file = onnx.load(str(path))
    assert {o.domain: o.version for o in file.opset_import} == {"": 21}
    kinds = {t.name: t.data_type for t in file.graph.initializer}
    dequantized = [n.input[0] for n in file.graph.node if n.op_type == "DequantizeLinear"]
    stored = sorted(kinds[name] for name in dequantized if name in kinds)
    assert stored == 3 * [onnx.TensorProto.INT32] + 3 * [onnx.TensorProto.INT4]  # biases, weights
    quantized = {n.input[2] for n in file.graph.node if n.op_type == "QuantizeLinear"}
    assert {kinds[name] for name in quantized} == {onnx.TensorProto.INT16}


def test_pt2e_loads_without_this_package(exact: Any, tmp_path: Path) -> None:
    model, x = exact
    path = tmp_path / "m.pt2"
    exported = backquant.export(model, path, to="pt2e", example_inputs=x)
    assert exported.integer == exported.expected == 9
    program = torch.export.load(path)
    torch.save((x, model(x)), tmp_path / "x.pt")
    command = [sys.executable, "-c", LOAD, path, tmp_path / "x.pt"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == "['torch.float32', 'torch.int64', 'torch.int8']"
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {node.target.namespace for node in called} == {"aten", "quantized_decomposed"}
    for node in called:
        if node.target.namespace == "quantized_decomposed" and "dequantize" in node.name:
            assert len(node.users) == 1  # one for each reader
    [convolution] = [n for n in called if n.name == "conv2d_1"]
    assert "body" in convolution.meta["nn_module_stack"]
    assert (
        b"/" + __file__.split("/")[1].encode() + b"/" not in path.read_bytes()
    )  # no paths of here


def test_groups_and_8_bit_floats(tmp_path: Path) -> None:
    """4-bit weights in groups are integers; 8-bit floats are arithmetic in a .pt2."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)).eval(),
        torch.randn(3, 64),
    )
    groups = backquant.quantize(model, x, backend="onnxruntime", weights="int4", group_size=16)
    exported = backquant.export(groups, tmp_path / "g.pt2", to="pt2e")
    assert exported.integer == exported.expected == 2
    program = torch.export.load(tmp_path / "g.pt2")
    names = {node.target.__name__ for node in program.graph.nodes if node.op == "call_function"}
    assert "dequantize_per_channel_group.default" in names
    assert torch.equal(program.module()(x), groups(x))
    floats = backquant.quantize(model, x, backend="tensorrt_fp8", calibration=[x])
    backquant.export(floats, tmp_path / "f.pt2", to="pt2e", require=0.0)
    program = torch.export.load(tmp_path / "f.pt2")
    assert torch.equal(program.module()(x), floats(x))
    assert torch.float8_e4m3fn in {t.dtype for t in program.state_dict.values()}


@torch.library.custom_op("backquant_tests::leak", mutates_args=())
def leak(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.25 * x)


@leak.register_fake
def _(x):
    return torch.empty_like(x)


def _leak(x: Any) -> Any:
    from onnxscript import opset18 as op

    zero, quarter = op.Constant(value_float=0.0), op.Constant(value_float=0.25)
    return op.Where(op.Greater(x, zero), x, op.Mul(x, quarter))


TRANSLATIONS = {torch.ops.backquant_tests.leak.default: _leak}


class Doubling(nn.Linear):
    """A module of one's own, with a reference module that inherits its product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class ReferenceDoubling(ReferenceLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(8, 8), Doubling(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.ops.backquant_tests.leak(self.first(x)))


@cache
def quantized_own(capture: str) -> Any:
    """Own modules and operators with entries."""
    int8 = backquant.DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    values = backquant.DTypeConfig(torch.qint8, torch.qint8)
    entry = backquant.BackendPatternConfig
    backend = backquant.get_backend_config("xnnpack").set_backend_pattern_configs(
        [
            entry(torch.ops.backquant_tests.leak).set_dtype_configs([values]),
            entry(torch.ops.backquant_tests.leak.default).set_dtype_configs([values]),
            entry(Doubling)
            .set_dtype_configs([int8])
            .set_root_module(Doubling)
            .set_reference_quantized_module(ReferenceDoubling),
        ]
    )
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    mapping = backquant.get_default_qconfig_mapping(backend)
    made = backquant.quantize(
        Own().eval(), x, backend=backend, qconfig_mapping=mapping, calibration=[x], capture=capture
    )
    return made, x


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_own_operators_and_modules(capture: str, tmp_path: Path) -> None:
    model, x = quantized_own(capture)
    rows = [(row.operator, row.outcome) for row in model.report.operators]
    assert [outcome for _, outcome in rows] == 3 * ["quantized"], rows
    name = f"{__name__}:TRANSLATIONS" if __name__ in sys.modules else TRANSLATIONS
    exported = backquant.export(
        model, tmp_path / "m.onnx", to="qdq-onnx", options={"translations": name}
    )
    assert exported.integer == exported.expected == 3
    assert torch.allclose(run(tmp_path / "m.onnx", x), model(x), atol=1e-6)
    backquant.export(model, tmp_path / "m.pt2", to="pt2e")
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(x), model(x))


def refusal(model: Any, path: Path, **more: Any) -> str:
    with pytest.raises(BackquantError) as raised:
        backquant.export(model, path, **more)
    return str(raised.value).replace(str(path.parent), "")


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = quantized_own("trace")
    onnx_path, told = tmp_path / "m.onnx", {}
    told["no-table"] = refusal(
        model, onnx_path, to="qdq-onnx", options={"translations": "nowhere:T"}
    )
    told["no-mapping"] = refusal(
        model, onnx_path, to="qdq-onnx", options={"translations": "os:sep"}
    )
    told["not-translated"] = refusal(model, onnx_path, to="qdq-onnx")

    def compiler(model: Any, path: Path, job: Any) -> None:
        raise RuntimeError("tiling failed at node 'first': 3 banks")

    monkeypatch.setattr(qdq_onnx, "save_onnx", compiler)
    told["names-the-layer"] = refusal(
        model, onnx_path, to="qdq-onnx", options={"translations": TRANSLATIONS}
    )
    for name, text in told.items():
        snapshots.compare(Path(__file__), name, text)


def rounded(tmp_path: Path, fields: str) -> tuple[Any, torch.Tensor]:
    """A linear layer whose description has ``fields``."""
    torch.manual_seed(0)
    text = EXACT.replace("DTYPE", "qint8").replace("    bias_dtype: int32\n", fields)
    (tmp_path / "r.yaml").write_text(text.replace("    bias_scale: input_times_weight\n", ""))
    x, layer = torch.randn(64, 8), nn.Sequential(nn.Linear(8, 4)).eval()
    return backquant.quantize(layer, x, backend=str(tmp_path / "r.yaml"), calibration=[x]), x


@pytest.mark.parametrize("to", ["onnx", "openvino", "executorch", "inductor"])
def test_roundings_without_an_operator_are_refused(to: str, tmp_path: Path) -> None:
    model, _ = rounded(tmp_path, "    rounding: half_up\n    requantization: fixed_point\n")
    suffix = {"inductor": "pt2", "executorch": "pte"}.get(to, "onnx")
    told = refusal(model, tmp_path / f"m.{suffix}", to=to)
    assert "rounding: half_up, requantization: fixed_point of exact" in told
    if to == "onnx":
        snapshots.compare(Path(__file__), f"rounding-{to}", told)


def test_half_even_is_what_targets_do(tmp_path: Path) -> None:
    model, x = rounded(tmp_path, "    rounding: half_even\n")
    assert "quantize_rounded" in model.graph_module.code
    exported = backquant.export(model, tmp_path / "m.onnx", to="qdq-onnx")
    assert exported.integer == exported.expected == 1
    assert torch.equal(run(tmp_path / "m.onnx", x), model(x))
    backquant.export(model, tmp_path / "m.pt2", to="pt2e")
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(x), model(x))


def half_up(x, scale, zero_point, low, high, dtype, _rounding):  # as the exporter calls it
    from onnxscript import opset18 as op

    number = lambda value: op.Constant(value_float=float(value))  # noqa: E731
    steps = op.Floor(op.Add(op.Div(x, number(scale)), number(0.5)))
    return op.Cast(op.Clip(op.Add(steps, number(zero_point)), number(low), number(high)), to=dtype)


def test_a_translation_of_ones_own_rounds(tmp_path: Path) -> None:
    model, x = rounded(tmp_path, "    rounding: half_up\n")
    table = {torch.ops.backquant.quantize_rounded.default: half_up}
    path = tmp_path / "m.onnx"
    backquant.export(model, path, to="qdq-onnx", require=0.0, options={"translations": table})
    assert torch.equal(run(path, x), model(x))


def test_what_is_not_written_as_planned_is_listed() -> None:
    planned = (ExpectedOperator("fc", "Linear", "fc", ("fc",), 8),)
    job = ExportJob(torch.fx.GraphModule({}, torch.fx.Graph()), (), {}, None, BackendConfig("b"),
                    Plan("b"), {}, planned)  # fmt: skip
    reads = (Read("x"), Read(dtype="int8"))
    [kernel], [reason] = written_operators(job, [Computed("fc", "Gemm", reads)])
    assert not kernel.integer
    assert reason.admitted == "Gemm reads a value that no node dequantizes"
