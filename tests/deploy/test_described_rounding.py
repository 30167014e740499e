"""Files of ``qdq-onnx`` and ``pt2e`` round and requantize as described, or leave it to the hardware."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import backquant

SPEC = """
schema_version: 1
name: npu
dtype_configs:
  sums:
    input_dtype: &narrow {dtype: qint8, quant_min_lower_bound: -100, quant_max_upper_bound: 90}
    output_dtype: *narrow
    weight_dtype: {dtype: qint8, quant_min_lower_bound: -127, symmetric: true, granularity: per_channel}
    bias_dtype: int32
    bias_scale: input_times_weight
    FIELDS
  values: {input_dtype: *narrow, output_dtype: *narrow, rounding: half_away}
entries:
- {operators: [conv2d, conv2d+relu, linear, conv_transpose2d], dtype_configs: [sums]}
- {operators: [tanh, flatten], dtype_configs: [values]}
"""
ARITHMETIC = [
    ("fixed_point_twice", ""),
    ("float", "half_up"),
    ("float", "half_away"),
    ("fixed_point", "half_even"),
    ("fixed_point", "half_up"),
    ("shift", "half_away"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.grown, self.last = nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.second(torch.relu(self.first(x))))
        return self.last(y.flatten(1)), self.grown(y)


@cache
def inputs() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def quantized(tmp_path: Path, arithmetic: str, rounding: str) -> Any:
    fields = [f"requantization: {arithmetic}"]
    fields += [f"rounding: {rounding}"] if rounding else []
    fields += ["requantization_ratio: power_of_two"] if arithmetic == "shift" else []
    (tmp_path / "npu.yaml").write_text(SPEC.replace("FIELDS", "\n    ".join(fields)))
    torch.manual_seed(0)
    return backquant.quantize(
        Net().eval(), inputs(), backend=tmp_path / "npu.yaml", calibration=[inputs()]
    )


def runs(path: Path, optimized: bool) -> list[torch.Tensor]:
    level = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: inputs().numpy()})
    return [torch.from_numpy(each) for each in made]


def unequal(made: list[torch.Tensor], wanted: tuple[torch.Tensor, ...]) -> int:
    return sum(int((one != two).sum()) for one, two in zip(made, wanted, strict=True))


@pytest.mark.parametrize("arithmetic,rounding", ARITHMETIC)
def test_files_compute_what_is_described(arithmetic: str, rounding: str, tmp_path: Path) -> None:
    model = quantized(tmp_path, arithmetic, rounding)
    wanted = model(inputs())
    exported = backquant.export(model, tmp_path / "m.onnx", to="qdq-onnx")
    assert exported.integer == exported.expected == 6
    assert unequal(runs(tmp_path / "m.onnx", optimized=False), wanted) == 0
    found = Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)
    word = "".join(part.capitalize() for part in (arithmetic + "_" + rounding).split("_"))
    own = {"Float": "Quantize"}.get(word[:5], "Requantize") + word.removeprefix("Float")
    assert found[own] == (6 if own == "QuantizeHalfAway" else 4)
    backquant.export(model, tmp_path / "m.pt2", to="pt2e")
    program = torch.export.load(tmp_path / "m.pt2")
    assert unequal(list(program.module()(inputs())), wanted) == 0
    names = {getattr(n.target, "namespace", "") for n in program.graph.nodes}
    assert "backquant" not in names  # loads without this package


def test_the_hardware_may_round_instead(tmp_path: Path) -> None:
    model = quantized(tmp_path, "shift", "half_up")
    wanted, options = model(inputs()), {"standard_quantize": True}
    exported = backquant.export(model, tmp_path / "m.onnx", to="qdq-onnx", options=options)
    assert exported.integer == exported.expected == 6
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    assert {node.domain for node in nodes} == {""}
    quantize = [n for n in nodes if n.op_type == "QuantizeLinear"]
    told = [{p.key: p.value for p in node.metadata_props} for node in quantize]
    words = Counter((t.get("backquant.requantization"), t.get("backquant.rounding")) for t in told)
    assert words == {(None, None): 1, ("shift", "half_up"): 4, ("float", "half_away"): 2}
    assert unequal(runs(tmp_path / "m.onnx", optimized=False), wanted) > 0  # halves to even
    backquant.export(model, tmp_path / "m.pt2", to="pt2e", options=options)
    program = torch.export.load(tmp_path / "m.pt2")
    called = [n for n in program.graph.nodes if n.op == "call_function"]
    quantize = [n for n in called if "quantize_per_tensor" in n.name and "de" not in n.name[:2]]
    words = Counter(tuple(sorted(n.meta.get("custom", {}).values())) for n in quantize)
    assert words == {(): 1, ("half_up", "shift"): 4, ("float", "half_away"): 2}
    assert not any("accumulator_step" in name for name in program.state_dict)


def test_halves_go_where_the_description_says(tmp_path: Path) -> None:
    """Values half way between two integers, in a model that has many of them."""
    found = {}
    for rounding in ("half_even", "half_up", "half_away"):
        model = quantized(tmp_path, "shift", rounding)
        path = tmp_path / f"{rounding}.onnx"
        backquant.export(model, path, to="qdq-onnx")
        found[rounding] = runs(path, optimized=True)
        assert unequal(found[rounding], model(inputs())) == 0
    assert unequal(found["half_even"], tuple(found["half_up"])) > 0
    assert unequal(found["half_away"], tuple(found["half_up"])) > 0
