from __future__ import annotations

import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from backquant import backend_config
from backquant.backend_config import BackendConfig, get_backend_config, installed, list_backends
from backquant.errors import SpecError, UnknownBackendError

OF_PYTORCH = [
    "native",
    "fbgemm",
    "qnnpack",
    "x86",
    "onednn",
    "tensorrt",
    "executorch",
    "qnnpack_pt2e",
]
OURS = [
    "onnxruntime",
    "openvino",
    "xnnpack",
    "inductor_x86",
    "tensorrt_fp8",
    "x86_lowbit",
    "litert",
    "litert_micro",
    "litert_16x8",
    "compressed_tensors",
    "gptq",
    "awq",
    "mlx",
    "torchao",
    "gguf",
]
BUILT_IN = [*OF_PYTORCH, *OURS]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of another package, offered as backend ``acme``; entry points are added to it."""
    module = types.ModuleType("acme_backend")
    module.backend_config = lambda: BackendConfig("acme")  # type: ignore[attr-defined]
    module.points = [("acme", "acme_backend")]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_backend", module)
    group = "backquant.backends"

    def entry_points(**selection: Any) -> list[metadata.EntryPoint]:
        assert selection == {"group": group}
        return [metadata.EntryPoint(name, value, group) for name, value in module.points]

    monkeypatch.setattr(installed.metadata, "entry_points", entry_points)
    return module


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_backends_load_by_name_and_are_new_each_time(name: str) -> None:
    backend = get_backend_config(name)
    assert isinstance(backend, BackendConfig)
    if name in OF_PYTORCH:
        assert backend == getattr(backend_config, f"get_{name}_backend_config")()
    assert backend is not get_backend_config(name)
    assert backend.configs


def test_dict_getters() -> None:
    for name in ("native", "tensorrt"):
        values = getattr(backend_config, f"get_{name}_backend_config_dict")()
        assert BackendConfig.from_dict(values) == get_backend_config(name)


def test_list_needs_no_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.metadata, "entry_points", lambda **_: [])
    assert list_backends() == BUILT_IN


def test_other_packages_offer_backends(plugin: types.ModuleType) -> None:
    assert list_backends() == [*BUILT_IN, "acme"]
    assert get_backend_config("acme").name == "acme"
    plugin.points = [("acme", "acme_backend:backend_config")]  # type: ignore[attr-defined]
    assert get_backend_config("acme").name == "acme"


def test_a_built_in_name_cannot_be_taken(plugin: types.ModuleType) -> None:
    plugin.points = [("x86", "acme_backend")]  # type: ignore[attr-defined]
    assert list_backends() == BUILT_IN
    assert get_backend_config("x86").name == "x86"


def test_a_name_offered_twice_is_refused_unless_both_are_one(plugin: types.ModuleType) -> None:
    plugin.points = [("acme", "acme_backend")] * 2  # type: ignore[attr-defined]
    assert get_backend_config("acme").name == "acme"
    plugin.points = [("acme", "acme_backend"), ("acme", "other")]  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="several installed packages offer a backend 'acme'"):
        get_backend_config("acme")


def test_broken_plugins(plugin: types.ModuleType) -> None:
    plugin.points = [("acme", "no_such_module_of_acme")]  # type: ignore[attr-defined]
    with pytest.raises(SpecError) as missing:
        get_backend_config("acme")
    assert str(missing.value) == (
        "the description of backend 'acme' cannot be imported: "
        "No module named 'no_such_module_of_acme'\n"
        "  where  entry point acme = 'no_such_module_of_acme'\n"
        "  fix    python -c 'import no_such_module_of_acme'"
    )
    plugin.points = [("acme", "acme_backend:nothing")]  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="gave NoneType, not a BackendConfig"):
        get_backend_config("acme")
    plugin.points = [("acme", "acme_backend")]  # type: ignore[attr-defined]
    plugin.backend_config = lambda: {"name": "acme"}  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="backend 'acme' gave dict, not a BackendConfig"):
        get_backend_config("acme")
    plugin.backend_config = None  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="gave NoneType"):
        get_backend_config("acme")


def test_unknown_names() -> None:
    with pytest.raises(UnknownBackendError) as near:
        get_backend_config("qnnpak")
    assert near.value.fix.startswith("did you mean 'qnnpack'")
    with pytest.raises(KeyError) as far:
        get_backend_config("zzzzzz")
    assert str(far.value) == (
        "backend 'zzzzzz' is not supported\n  where  backend='zzzzzz'\n"
        f"  fix    one of {list_backends()}"
    )


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "mine.json"])
def test_files_by_path_and_by_string(name: str, tmp_path: Path) -> None:
    backend = BackendConfig("mine").set_backend_pattern_configs(get_backend_config("x86").configs)
    path = tmp_path / name
    backend.save(path)
    assert get_backend_config(path) == backend
    assert get_backend_config(str(path)) == backend
    assert BackendConfig.load(str(path)) == backend


def test_a_relative_file_name_is_a_file_by_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    BackendConfig("mine").save("mine.yaml")
    assert get_backend_config("mine.yaml").name == "mine"
