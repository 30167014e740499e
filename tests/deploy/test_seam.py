"""``backquant.export``: what it refuses, what it writes, what it reports."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.backends.deployed import STATIC
from backquant.deploy import Requirement, find_target, target
from backquant.deploy.onnxruntime import OnnxRuntimeTarget
from backquant.errors import CoverageError, ExportError, MissingExtraError, UsageError
from backquant.operators import conv
from backquant.operators.entry import admit


def test_target_by_suffix() -> None:
    assert find_target(None, Path("m.onnx")).name == "onnx"
    assert find_target(None, Path("m.xml")).name == "openvino"
    assert find_target("openvino", Path("m.onnx")).name == "openvino"


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("onxx", "m.onnx", r"no target 'onxx' \(did you mean 'onnx'\?\)"),
        ("xnnpack", "m.pte", r"no target 'xnnpack' \(did you mean 'executorch'\?\)"),
        (None, "m.txt", "no target has files that end in '.txt'"),
        ("onnx", "m.xml", "the files of onnx do not end in '.xml'"),
    ],
)
def test_unknown_targets(name: str | None, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_target(name, Path(path))


def test_missing_extra_is_named(residual, tmp_path, monkeypatch) -> None:
    absent = (Requirement("onnxruntime", "no_such_module_of_backquant"),)
    monkeypatch.setattr(OnnxRuntimeTarget, "requires", absent)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[onnx\]'"):
        backquant.export(residual("onnxruntime"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_warns_once_outside_of_the_tested_versions(monkeypatch) -> None:
    class Old(OnnxRuntimeTarget):
        requires = (Requirement("onnxruntime", "onnxruntime", "0.1", "0.2"),)

    monkeypatch.setattr(target, "_WARNED", set())
    with pytest.warns(UserWarning, match=r"tested with: 0\.1 to 0\.2"):
        target.check_version(Old())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.check_version(Old())


def test_existing_file_is_kept_unless_asked(residual, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        backquant.export(residual("onnxruntime"), path)
    assert path.read_text() == "mine"
    backquant.export(residual("onnxruntime"), path, overwrite=True)
    assert [item.name for item in tmp_path.iterdir()] == ["m.onnx"]


def test_wants_a_model_without_an_engine(tmp_path) -> None:
    lowered = backquant.quantize(nn.Linear(4, 4), calibration=[torch.randn(8, 4)])
    with pytest.raises(UsageError, match='backend="onnxruntime"'):
        backquant.export(lowered, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="is not a quantized model"):
        backquant.export(nn.Linear(4, 4), tmp_path / "m.onnx")


def test_folder_and_option(residual, tmp_path) -> None:
    model = residual("onnxruntime")
    with pytest.raises(UsageError, match="is a folder"):
        (tmp_path / "d.onnx").mkdir()
        backquant.export(model, tmp_path / "d.onnx")
    with pytest.raises(UsageError, match="there is no folder"):
        backquant.export(model, tmp_path / "none" / "m.onnx")
    with pytest.raises(UsageError, match="has no option 'opse'"):
        backquant.export(model, tmp_path / "m.onnx", options={"opse": 18})


def test_untranslatable_operator_is_named_before_writing(tmp_path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.airy_ai(self.fc(x))

    model = backquant.quantize(Odd(), backend="onnxruntime", calibration=[torch.randn(4, 8)])
    with pytest.raises(ExportError, match=r"special_airy_ai") as raised:
        backquant.export(model, tmp_path / "m.onnx")
    assert "one operator" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_fails_with_the_list_when_too_few_became_integer(tmp_path) -> None:
    """A description that claims more than ONNX Runtime has: transposed convolutions on integers."""
    config = backquant.get_backend_config("onnxruntime").set_backend_pattern_configs(
        admit(conv.transposed_entries(conv.TRANSPOSED[2]), [STATIC])
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.ConvTranspose2d(8, 8, 3) for _ in range(5)))
    mapping = backquant.get_default_qconfig_mapping(config)
    quantized = backquant.quantize(
        model, backend=config, qconfig_mapping=mapping, calibration=[torch.randn(2, 3, 8, 8)]
    )
    with pytest.raises(CoverageError, match=r"in float that are quantized") as raised:
        backquant.export(quantized, tmp_path / "m.onnx")
    [where] = [line for line in str(raised.value).splitlines() if "ConvTranspose2d" in line]
    assert (
        "1, 2, and 3 more (ConvTranspose2d on integers): " in where  # alike, once
    )
    assert list(tmp_path.iterdir()) == []
    exported = backquant.export(quantized, tmp_path / "m.onnx", require=0.0)
    assert exported.integer < exported.expected
    assert exported.left_in_float


def test_dynamic_shape_that_the_model_refuses(tmp_path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).reshape(4, 8) + 1

    model = backquant.quantize(Fixed(), backend="onnxruntime", calibration=[torch.randn(4, 8)])
    with pytest.raises(ExportError, match="the model fixes the dynamic size 'batch' to 4"):
        backquant.export(model, tmp_path / "m.onnx", dynamic_shapes={"x": {0: "batch"}})
    assert not list(tmp_path.iterdir())


def test_artifact_exports(residual, tmp_path) -> None:
    backquant.save(residual("onnxruntime"), tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    assert loaded.example == residual("onnxruntime").example
    exported = backquant.export(loaded, tmp_path / "m.onnx")
    assert exported.integer == exported.expected > 0
    assert exported.integer_share == 1.0
