"""The name tables against what PyTorch and backquant really export."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest

from backquant.migrate.names import ALIASES, FLAT, FUSERS, MODULES, NN, PRIVATE, ROOMS
from backquant.migrate.resolve import fate

PUBLIC = [
    "torch.ao.quantization",
    "torch.ao.quantization.backend_config",
    "torch.ao.quantization.fake_quantize",
    "torch.ao.quantization.fuse_modules",
    "torch.ao.quantization.fuser_method_mappings",
    "torch.ao.quantization.fx.custom_config",
    "torch.ao.quantization.observer",
    "torch.ao.quantization.qconfig",
    "torch.ao.quantization.qconfig_mapping",
    "torch.ao.quantization.quant_type",
    "torch.ao.quantization.quantization_mappings",
    "torch.ao.quantization.quantize",
    "torch.ao.quantization.quantize_fx",
    "torch.ao.quantization.quantize_jit",
    "torch.ao.quantization.stubs",
    "torch.ao.quantization.utils",
    "torch.ao.nn.intrinsic",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.qat.dynamic",
    "torch.ao.nn.quantizable",
    "torch.ao.nn.quantized",
    "torch.ao.nn.quantized.dynamic",
    "torch.ao.nn.quantized.reference",
    "torch.quantization",
    "torch.quantization.observer",
    "torch.quantization.quantize_fx",
    "torch.nn.intrinsic",
    "torch.nn.intrinsic.qat",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
]
#: What a module happens to import, and is no name of its own.
FOREIGN_MODULES = ("typing", "collections", "abc", "enum", "dataclasses", "functools", "torch.fx")
FOREIGN = {"Any", "Callable", "TYPE_CHECKING", "annotations", "deprecated", "namedtuple", "Module"}


def found(path: str) -> Any:
    """The object of a dotted name, which may have modules that nothing imported yet."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


def public_names(module: ModuleType) -> list[str]:
    """Names of ``__all__`` and other names without underscore that PyTorch's quantization defines."""
    names = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        if name.startswith("_") or name in FOREIGN or inspect.ismodule(value):
            continue
        home = getattr(value, "__module__", "") or ""
        if home.startswith(("torch.ao", "torch.quantization")):
            names.add(name)
        elif not isinstance(value, type) and not callable(value) and not home:
            names.add(name)  # a table or a constant
        elif name.startswith(("default_", "float", "per_channel", "QConfigAny")):
            names.add(name)
    return sorted(name for name in names if not name.startswith("__"))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_mapped_or_needs_a_person(module: str) -> None:
    names = public_names(importlib.import_module(module))
    assert len(names) > 0
    unexplained = {}
    for name in names:
        result = fate(f"{module}.{name}")
        if result is None or (result.by_hand is not None and result.by_hand.kind == "unknown name"):
            unexplained[name] = result
    assert unexplained == {}


def all_targets() -> list[str]:
    packages = {f"backquant.nn.{package}.{name}" for package in NN for name in NN[package]}
    return sorted(
        {*FLAT.values(), *FUSERS.values(), *PRIVATE.values(), *MODULES.values()} | packages
    )


@pytest.mark.parametrize("target", all_targets())
def test_every_target_exists(target: str) -> None:
    found(target)


def test_rooms_have_their_names() -> None:
    missing = {
        f"{room}.{name}"
        for room, names in ROOMS.items()
        for name in names
        if not hasattr(importlib.import_module(room), name)
    }
    assert missing == set()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_exist_in_pytorch(module: str) -> None:
    if module.endswith("observation_type"):
        observation = found("torch.ao.quantization.backend_config.backend_config")
        assert hasattr(observation, "ObservationType")  # a file of its own in PyTorch 1.13 only
    else:
        importlib.import_module(module)


def test_mapped_names_exist_in_pytorch_under_the_same_name() -> None:
    """A misspelt source would never be found in anybody's code."""
    modules = [importlib.import_module(module) for module in PUBLIC + BACKEND_FILES]
    missing = {name for name in FLAT if not any(hasattr(module, name) for module in modules)}
    assert missing == OLD_NAMES


BACKEND_FILES = [
    "torch.ao.quantization.backend_config.utils",
    "torch.ao.quantization.backend_config.x86",
    "torch.ao.quantization.backend_config._qnnpack_pt2e",
]
#: Names that older versions of PyTorch had.
OLD_NAMES = {"reverse_sequential_wrapper2"}


@pytest.mark.parametrize(("old", "new"), ALIASES)
def test_old_packages_are_the_new_ones(old: str, new: str) -> None:
    if "_numeric_suite" in old or old == "torch.nn.quantized._reference":
        assert importlib.import_module(old)
        return
    theirs, ours = importlib.import_module(old), importlib.import_module(new)
    shared = [n for n in vars(theirs) if n[0] != "_" and isinstance(getattr(theirs, n), type)]
    assert shared
    assert all(
        getattr(ours, name) is getattr(theirs, name) for name in shared if hasattr(ours, name)
    )


def test_same_kind_of_thing() -> None:
    """A class stays a class, and what can be called can be called; but for types of annotations."""
    differing = {}
    for name, target in FLAT.items():
        if name in {*OLD_NAMES, "Pattern", "QConfigAny"}:
            continue
        theirs = next(
            getattr(module, name)
            for module in map(importlib.import_module, PUBLIC + BACKEND_FILES)
            if hasattr(module, name)
        )
        ours = found(target)
        if isinstance(theirs, type) != isinstance(ours, type) or callable(theirs) != callable(ours):
            differing[name] = (theirs, ours)
    assert differing == {}
