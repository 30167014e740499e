"""Calls as people write them who come from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import UnknownBackendError, UsageError
from backquant.qconfig import get_default_qconfig_mapping

X = torch.randn(4, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def test_a_loader_in_second_place_is_the_data() -> None:
    loader = torch.utils.data.DataLoader(X, batch_size=2)
    assert backquant.quantize(model(), loader).report.coverage == 1.0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cpu", "x86"),
        ("ort", "onnxruntime"),
        ("cuda", "tensorrt"),
        ("TFLite", "litert"),
        ("x68", "x86"),
    ],
)
def test_other_tools_words_for_backends(name: str, meant: str) -> None:
    with pytest.raises(UnknownBackendError) as raised:
        backquant.quantize(model(), [X], backend=name)
    assert f"did you mean {meant!r}" in raised.value.fix


def test_an_argument_by_another_name(snapshot: Any) -> None:
    mapping = get_default_qconfig_mapping("x86")
    with pytest.raises(UsageError) as raised:
        backquant.prepare_fx(model(), mapping, X, backend="x86")  # type: ignore[call-arg]
    snapshot("argument", raised.value)


def test_defaults_of_another_backend_are_noted_and_those_without_use_are_not() -> None:
    mapping = get_default_qconfig_mapping("qnnpack").set_object_type(nn.Tanh, None)
    prepared = backquant.prepare_fx(model(), mapping, X)
    prepared(X)
    report = backquant.convert_fx(prepared).report
    assert report.unused_rules == ("object_type torch.nn.Tanh",)
    assert any("default QConfigs of qnnpack" in note for note in report.notes)


def test_a_model_saves_and_exports_itself(tmp_path: Path) -> None:
    made = backquant.quantize(model(), [X], backend="onnxruntime")
    made.save(tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(X), made(X))
    made.export(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").is_file()


class Named(nn.Module):
    """A model whose layers are called as methods are."""

    def __init__(self) -> None:
        super().__init__()
        self.save, self.export = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.export(self.save(x))


def test_layers_of_these_names_come_first(tmp_path: Path) -> None:
    made = backquant.quantize(Named().eval(), [X])
    assert torch.equal(torch.fx.Interpreter(made).run(X), made(X))
    backquant.save(made, tmp_path / "m.bq")
    assert torch.equal(backquant.load(tmp_path / "m.bq")(X), made(X))


def test_axes_keep_their_names(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    made = backquant.quantize(model(), [X], backend="onnxruntime")
    made.export(tmp_path / "m.onnx", dynamic_shapes={"input": {0: "batch<=64"}})
    graph = onnx.load(tmp_path / "m.onnx").graph
    first = [v.type.tensor_type.shape.dim[0].dim_param for v in (*graph.input, *graph.output)]
    assert first == ["batch", "batch"]


def test_the_report_has_accuracy_and_the_users_metric() -> None:
    data = [torch.randn(4, 8) for _ in range(3)]
    made = backquant.quantize(model(), data, metric=lambda m: float(m(X).shape[1]))
    figures = made.report.figures
    assert figures.data == "on the last calibration batch"
    assert figures.sqnr is not None and figures.sqnr > 20
    assert (figures.metric, figures.float_metric) == (4.0, 4.0)
    assert "metric    4 (float 4)" in str(made.report)


def test_a_model_mostly_in_float_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2)).eval()
    images = torch.randn(2, 3, 8, 8)
    backquant.quantize(net, [images])
    assert not caplog.records
    entries = backquant.get_backend_config("x86").configs
    linear = backquant.BackendConfig("linear").set_backend_pattern_configs(
        [entry for entry in entries if entry.pattern is nn.Linear]
    )
    made = backquant.quantize(net, [images], backend=linear)
    [record] = caplog.records
    assert record.name == "backquant" and "is mostly FLOAT: 6.9%" in record.getMessage()
    assert "is mostly FLOAT: 6.9%" in str(made.report).splitlines()[0]
    by_user = backquant.default_mapping("x86").set_object_type(nn.Conv2d, None)
    backquant.quantize(net, [images], qconfig_mapping=by_user)
    assert len(caplog.records) == 1
