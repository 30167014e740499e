"""The mirror against the installed ``torch.ao``: every module, every public name, every signature."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import backquant.ao
from backquant.ao.left_out import GROUPS
from backquant.ao.table import table
from backquant.errors import LeftOutError
from backquant.nn.quantized.scaled import Scaled

LEFT_OUT = Path(__file__).parent / "left_out.txt"
ROOTS = ("quantization", "nn")
#: Fused modules take their parts by position or by keyword in one signature; float modules' arguments go on
#: as they are.
OTHERWISE = {
    *("BNReLU2d", "BNReLU3d", "LinearBn1d", "LinearLeakyReLU", "LinearReLU", "LinearTanh"),
    *(f"Conv{kind}{n}d" for kind in ("Bn", "BnReLU", "ReLU") for n in (1, 2, 3)),
    *("Embedding", "EmbeddingBag", "GRU", "GRUCell", "LSTM", "LSTMCell", "RNNCell"),
    *("_with_args", "_with_callable_args"),  # their first argument is the class itself
}


def modules() -> Iterator[tuple[str, ModuleType]]:
    for root in ROOTS:
        package = importlib.import_module(f"torch.ao.{root}")
        yield root, package
        for found in pkgutil.walk_packages(package.__path__, f"torch.ao.{root}."):
            yield found.name.removeprefix("torch.ao."), importlib.import_module(found.name)


def public(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return [name for name in names if hasattr(module, name)]


def objects(module: ModuleType) -> list[str]:
    return [name for name in public(module) if not isinstance(getattr(module, name), ModuleType)]


MODULES = dict(modules())


def mapped() -> list[tuple[str, str]]:
    return [
        (path, name)
        for path, entries in table().items()
        for name, entry in entries.items()
        if not entry.home.startswith(("!", "="))
    ]


def test_every_module_of_torch_ao_can_be_imported() -> None:
    for path in MODULES:
        assert importlib.import_module(f"backquant.ao.{path}").__name__ == f"backquant.ao.{path}"


def test_every_public_name_of_torch_ao_is_there() -> None:
    missing = [
        f"{path}.{name}"
        for path, module in MODULES.items()
        for name in public(module)
        if not hasattr(importlib.import_module(f"backquant.ao.{path}"), name)
    ]
    assert missing == []


def test_import_star_brings_the_same_names() -> None:
    for path, module in MODULES.items():
        theirs = set(objects(module))
        if theirs and hasattr(module, "__all__"):
            names: dict[str, Any] = {}
            exec(f"from backquant.ao.{path} import *", names)
            assert {name for name in theirs if name not in names} == set(), path


def test_the_list_of_what_is_left_out_only_shrinks() -> None:
    """``left_out.txt`` has every public name that raises, by its reason. Take lines away, add none."""
    left_out = {
        f"{entries[name].home[1:]}  {path}.{name}"
        for path, module in MODULES.items()
        for name in objects(module)
        if (entries := table()[path])[name].home.startswith("!")
    }
    listed = LEFT_OUT.read_text().splitlines()
    assert sorted(listed) == listed
    assert left_out - set(listed) == set(), "names that were there are left out"
    assert set(listed) - left_out == set(), "these are no longer left out: remove the lines"


@pytest.mark.parametrize("path, name", mapped())
def test_a_name_stands_for_the_object_that_the_table_says(path: str, name: str) -> None:
    entry = table()[path][name]
    ours = getattr(importlib.import_module(f"backquant.ao.{path}"), name)
    assert ours is getattr(importlib.import_module(entry.home), entry.name)


def test_constants_are_pytorchs() -> None:
    count = 0
    for path, entries in table().items():
        for name, entry in entries.items():
            if entry.home.startswith("="):
                ours = getattr(importlib.import_module(f"backquant.ao.{path}"), name)
                assert ours == getattr(importlib.import_module(f"torch.ao.{path}"), name)
                count += 1
    assert count > 20


def test_parameters_have_pytorchs_names_in_their_order() -> None:
    count = 0
    for path, name in mapped():
        theirs = getattr(importlib.import_module(f"torch.ao.{path}"), name)
        ours = getattr(importlib.import_module(f"backquant.ao.{path}"), name)
        if inspect.isclass(ours) and issubclass(ours, Scaled):
            continue  # made by conversion, below
        if name in OTHERWISE or not (inspect.isroutine(theirs) or inspect.isclass(theirs)):
            continue
        try:
            wanted = list(inspect.signature(theirs).parameters)
        except ValueError:
            continue
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, (path, name)
        count += 1
    assert count > 100


def test_quantized_modules_are_those_of_converted_models_and_not_made_by_hand() -> None:
    import backquant.ao.nn.quantized as nnq
    from backquant.ao.quantization import get_default_qconfig_mapping
    from backquant.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    assert type(convert_fx(prepared).get_submodule("0")) is nnq.Linear
    with pytest.raises(LeftOutError, match="a quantized Linear is made by conversion"):
        nnq.Linear(4, 4)


def test_what_is_left_out_says_so_when_it_is_used() -> None:
    from backquant.ao.quantization import DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS as MAPPINGS
    from backquant.ao.quantization import quantize_jit
    from backquant.ao.quantization.quantize_jit import prepare_jit

    for use in (
        lambda: quantize_jit(nn.Linear(1, 1)),
        lambda: prepare_jit.anything,
        lambda: MAPPINGS[nn.Linear],
        lambda: list(MAPPINGS),
        lambda: nn.Linear in MAPPINGS,
        lambda: len(MAPPINGS),
        lambda: type("Mine", (prepare_jit,), {}),
    ):
        with pytest.raises(LeftOutError):
            use()
    assert not isinstance(nn.Linear(1, 1), prepare_jit)
    assert (
        repr(prepare_jit)
        == "<torch.ao.quantization.quantize_jit.prepare_jit, which backquant leaves out>"
    )


def test_every_reason_is_used_and_says_what_to_do() -> None:
    used = {
        e.home[1:] for entries in table().values() for e in entries.values() if e.home[0] == "!"
    }
    assert used == set(GROUPS)
    assert all(group.why and group.fix for group in GROUPS.values())


def test_every_import_form_works_and_nothing_is_loaded_before_it_is_used() -> None:
    code = """
import sys
import backquant
assert "backquant.ao" not in sys.modules
import backquant.ao.quantization
assert "torch" not in sys.modules and "torch.ao" not in sys.modules
import backquant.ao.nn.quantized.dynamic as nnqd
from backquant.ao import nn
from backquant.ao.quantization import *
from backquant.ao.quantization.fx.custom_config import PrepareCustomConfig
import backquant.ao.quantization.quantize
import backquant.ao.quantization.fx.lstm_utils
assert backquant.ao.quantization.QConfigMapping is QConfigMapping is backquant.QConfigMapping
assert backquant.ao.nn.intrinsic.qat.ConvBn2d is nn.intrinsic.qat.modules.conv_fused.ConvBn2d
assert callable(backquant.ao.quantization.quantize)  # the function, as in PyTorch
assert "observer" in dir(backquant.ao.quantization)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_unknown_names_and_modules_fail_as_in_python() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("backquant.ao.quantization.observers")
    with pytest.raises(AttributeError, match="no attribute 'prepare_fxx'"):
        backquant.ao.quantization.prepare_fxx  # noqa: B018
    with pytest.raises(AttributeError):
        backquant.ao.quantisation  # noqa: B018
