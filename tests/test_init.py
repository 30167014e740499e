from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import backquant
from fresh import failures

words = re.compile(r"\w+").findall
DESCRIPTION = words("""
BackendConfig BackendPatternConfig DTypeConfig DTypeWithConstraints ObservationType
get_native_backend_config get_native_backend_config_dict get_fbgemm_backend_config
get_qnnpack_backend_config get_x86_backend_config get_onednn_backend_config
get_tensorrt_backend_config get_tensorrt_backend_config_dict get_executorch_backend_config
get_qnnpack_pt2e_backend_config get_backend_config list_backends get_pattern_to_dtype_configs
get_qat_module_classes get_fused_module_classes get_pattern_to_input_type_to_index
get_root_module_to_quantized_reference_module get_fuser_method_mapping get_module_to_qat_module
get_fusion_pattern_to_root_node_getter get_fusion_pattern_to_extra_inputs_getter
pattern_to_human_readable entry_to_pretty_str MatchAllNode reverse_sequential_wrapper2
json_schema
""")
ASKED = words("""
QConfig QConfigMapping get_default_qconfig get_default_qat_qconfig get_default_qconfig_mapping
get_default_qat_qconfig_mapping default_qconfig default_dynamic_qconfig float16_dynamic_qconfig
float16_static_qconfig per_channel_dynamic_qconfig float_qparams_weight_only_qconfig
float_qparams_weight_only_qconfig_4bit default_weight_only_qconfig default_qat_qconfig
default_symmetric_qnnpack_qconfig default_per_channel_symmetric_qnnpack_qconfig
PrepareCustomConfig ConvertCustomConfig FuseCustomConfig qconfig_equals
""")
MEASURING = words("""
ObserverBase UniformQuantizationObserverBase MinMaxObserver MovingAverageMinMaxObserver
PerChannelMinMaxObserver MovingAveragePerChannelMinMaxObserver HistogramObserver
FixedQParamsObserver PlaceholderObserver RecordingObserver NoopObserver ReuseInputObserver
FakeQuantize FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize enable_observer
disable_observer enable_fake_quant disable_fake_quant default_observer default_weight_observer
default_per_channel_weight_observer default_histogram_observer default_dynamic_quant_observer
default_placeholder_observer default_fake_quant default_weight_fake_quant
default_per_channel_weight_fake_quant default_fixed_qparams_range_0to1_observer
default_fixed_qparams_range_neg1to1_fake_quant
""")
FLOW = words("""
fuse_fx prepare_fx prepare_qat_fx convert_fx convert_to_reference_fx quantize explain save load
as_generator as_quantizer decoder_inputs
""")
ERRORS = words("""
ArtifactError BackquantError CalibrationError CaptureError ConfigError CoverageError EngineError
InputError MissingExtraError PassError SpecError UnknownBackendError UsageError
""")


@pytest.mark.parametrize("name", [*DESCRIPTION, *ASKED, *MEASURING, *FLOW, *ERRORS])
def test_public_names_are_importable_flat(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from backquant import {name}", namespace)
    assert namespace[name] is getattr(backquant, name)
    assert name in dir(backquant)


@pytest.mark.parametrize("name", DESCRIPTION)
def test_the_description_language_is_a_module_of_its_own(name: str) -> None:
    module = importlib.import_module("backquant.backend_config")
    assert getattr(module, name) is getattr(backquant, name)


@pytest.mark.parametrize(
    "path",
    [
        "nn",
        "nn.intrinsic",
        "nn.intrinsic.qat",
        "nn.qat",
        "nn.qat.dynamic",
        "nn.quantized.reference",
        "nn.quantizable",
    ],
)
def test_modules_stand_where_those_of_torch_do(path: str) -> None:
    assert importlib.import_module(f"backquant.{path}")


def test_rooms_are_attributes() -> None:
    assert backquant.errors is importlib.import_module("backquant.errors")
    assert backquant.nn is importlib.import_module("backquant.nn")


def test_all_names_at_once() -> None:
    namespace: dict[str, object] = {}
    exec("from backquant import *", namespace)
    assert {*DESCRIPTION, *ASKED, *MEASURING, *FLOW, *ERRORS} <= set(namespace)
    assert "annotations" not in namespace and "importlib" not in namespace


def test_what_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'backquant' has no attribute 'quantise'"):
        backquant.quantise  # noqa: B018
    with pytest.raises(ImportError):
        exec("from backquant import prepare_fxx")
    assert not hasattr(backquant, "__wrapped__") and not hasattr(backquant, "_private")


def test_a_room_that_fails_to_import_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(backquant.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        backquant.something_new  # noqa: B018


def test_public_names_belong_to_one_room() -> None:
    owners: dict[str, object] = {}
    for room in backquant._ROOMS:
        module = importlib.import_module(f"backquant.{room}")
        for name in module.__all__:
            value = getattr(module, name)
            assert owners.setdefault(name, value) is value, name


def in_a_fresh_process(code: str) -> str:
    source = str(Path(backquant.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_costs_nothing() -> None:
    code = "import json, sys, backquant; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(in_a_fresh_process(code)))
    costly = words("torch numpy pydantic yaml rich typer jinja2 safetensors")
    assert not loaded & set(costly)
    ours = {name for name in loaded if name.startswith("backquant")}
    assert ours == {"backquant", "backquant.version"}


def test_a_name_loads_its_room_and_those_below() -> None:
    code = (
        "import json, sys, backquant; backquant.BackendConfig; print(json.dumps(list(sys.modules)))"
    )
    loaded = set(json.loads(in_a_fresh_process(code)))
    assert "torch" in loaded and "backquant.backend_config" in loaded
    assert not loaded & {"pydantic", "typer", "jinja2", "backquant.observe", "backquant.api"}


def test_every_name_works_first_in_a_fresh_process() -> None:
    """PyTorch's get_fbgemm_backend_config() fails unless another module was imported first."""
    calls = (
        "get_fbgemm_backend_config()",
        "get_default_qconfig_mapping('x86')",
        "MinMaxObserver()",
        "json_schema()",
        "quantize.__doc__",
        "load.__doc__",
    )
    codes = [f"import backquant; assert backquant.{call}" for call in (*calls, "no_such_name")]
    found = failures(codes)
    assert list(found) == codes[-1:] and "AttributeError" in found[codes[-1]]


def test_what_loads_and_runs_models_imports_no_compiler() -> None:
    """Dynamo costs as much CPU time as torch and backquant together."""
    code = "import json, sys, backquant; backquant.load, backquant.save; print(json.dumps(list(sys.modules)))"
    loaded = set(json.loads(in_a_fresh_process(code)))
    assert "backquant.runtime.quantized_model" in loaded
    assert not loaded & {"torch._dynamo", "sympy"}


def test_the_version_stands_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", backquant.__version__)
    text = (Path(backquant.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert "backquant.version.__version__" in text
