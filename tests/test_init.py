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
CALLS = words("""
fuse_fx prepare_fx prepare_qat_fx prepare_export convert_fx convert_to_reference_fx
convert_to_integer_reference quantize quantize_files quantize_parts explain save load save_parts load_parts
export compare sensitivity search conform as_generator as_quantizer decoder_inputs from_torch_ao to_torch_ao
default_mapping weight_only_mapping get_backend_config list_backends register_dtype
""")
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
MOST = 90


def test_the_top_level_is_small_and_each_name_is_its_rooms() -> None:
    assert set(CALLS) < set(backquant.__all__) and len(backquant.__all__) <= MOST
    for name in backquant.__all__:
        room = importlib.import_module(backquant._listed()[name])
        assert name in room.__all__ and getattr(backquant, name) is getattr(room, name)
        assert name in dir(backquant)


def test_every_error_is_a_name_of_the_top_level() -> None:
    assert set(backquant.errors.__all__) <= set(backquant.__all__)


def test_other_names_are_public_in_their_rooms_alone() -> None:
    assert "default_weight_observer" in backquant.observe.__all__
    assert not hasattr(backquant, "default_weight_observer")
    assert not hasattr(backquant, "round_to") and backquant.dtypes.round_to


@pytest.mark.parametrize("name", DESCRIPTION)
def test_the_description_language_is_a_module_of_its_own(name: str) -> None:
    assert name in importlib.import_module("backquant.backend_config").__all__


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
    assert set(CALLS) <= set(namespace)
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

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        backquant.something_new  # noqa: B018


def test_public_names_belong_to_one_room() -> None:
    owners: dict[str, object] = {}
    for room in sorted(set(backquant._listed().values()) - {"backquant"}):
        module = importlib.import_module(room)
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
        "backend_config.get_fbgemm_backend_config()",
        "get_default_qconfig_mapping('x86')",
        "MinMaxObserver()",
        "backend_config.json_schema()",
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
