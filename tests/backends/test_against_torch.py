"""All entries of the eight backends against PyTorch's own, in order and field by field.

They are equal except for what ``WEIGHT_WITHOUT_WEIGHTS`` lists, and for what no kernel keeps (``unkept``).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
from functools import cache
from typing import Any

import pytest
import torch
import torch.ao.quantization.backend_config.utils  # PyTorch's own getters fail without it
from torch import nn
from torch.ao.quantization import backend_config as torch_backends
from torch.ao.quantization.backend_config._qnnpack_pt2e import (
    get_qnnpack_pt2e_backend_config as torch_qnnpack_pt2e,
)
from torch.ao.quantization.backend_config.onednn import get_onednn_backend_config as torch_onednn
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.utils import MatchAllNode as TorchMatchAllNode

from backquant.backend_config import MatchAllNode, get_backend_config
from backquant.graph.grouped import grouped_linear
from backquant.operators import find, find_root, fixed_qparams
from unkept import CONDITIONS, SYMMETRIC, as_kept

TORCH = {
    "native": torch_backends.get_native_backend_config,
    "fbgemm": torch_backends.get_fbgemm_backend_config,
    "qnnpack": torch_backends.get_qnnpack_backend_config,
    "x86": torch_x86,
    "onednn": torch_onednn,
    "tensorrt": torch_backends.get_tensorrt_backend_config,
    "executorch": torch_backends.get_executorch_backend_config,
    "qnnpack_pt2e": torch_qnnpack_pt2e,
}
COUNTS = {
    "native": 192,
    "fbgemm": 190,
    "qnnpack": 185,
    "x86": 191,
    "onednn": 220,
    "tensorrt": 147,
    "executorch": 84,
    "qnnpack_pt2e": 13,
}

# Operators without any weight to which PyTorch gives a weight dtype (and a bias dtype), by backend
# and first operator of the pattern. Matching never reads it there, so nothing else changes; but a
# reader of the entry, or of a support table, would learn that `add` takes int8 weights. Ours have
# the same activation dtypes and no weight; that is also what PyTorch's fbgemm has.
_ADD_MUL = {operator.add, torch.add, operator.mul, torch.mul, torch.matmul}
_aten = torch.ops.aten
WEIGHT_WITHOUT_WEIGHTS: dict[str, set[Any]] = {
    "x86": _ADD_MUL | {pattern for pattern, _ in fixed_qparams.PATTERNS},
    "tensorrt": _ADD_MUL,
    "executorch": (_ADD_MUL | {operator.sub, torch.sub}) - {torch.matmul},
    "qnnpack_pt2e": {
        _aten.add.Tensor,
        _aten.add_.Tensor,
        _aten.relu.default,
        _aten.max_pool2d_with_indices.default,
    },
}

_PACKAGES = ("intrinsic", "intrinsic.qat", "qat", "qat.dynamic", "quantized.reference")


@cache
def _names(prefix: str) -> dict[type, str]:
    """Module classes by the public sub-package that offers them, e.g. ``intrinsic.ConvReLU1d``."""
    names: dict[type, str] = {}
    for package in _PACKAGES:
        for name, value in vars(importlib.import_module(f"{prefix}.{package}")).items():
            if not isinstance(value, type) or not issubclass(value, nn.Module):
                continue
            if not name.startswith("_") and value.__module__.startswith(prefix):
                assert names.setdefault(value, f"{package}.{name}") == f"{package}.{name}"
    return names


def _op(op: Any) -> Any:
    """One operator of a pattern, in a form in which ours and PyTorch's compare."""
    if op in (MatchAllNode, TorchMatchAllNode):
        return "any node"
    if isinstance(op, tuple):
        return tuple(_op(part) for part in op)
    if isinstance(op, type):
        return _class(op)
    return op


def _class(cls: type | None) -> Any:
    """A class of either library by name with sub-package; any other class as it is."""
    if cls is None:
        return None
    return _names("torch.ao.nn").get(cls) or _names("backquant.nn").get(cls) or cls


def _arity(function: Any) -> int | None:
    return None if function is None else len(inspect.signature(function).parameters)


_OURS = (
    "granularity",
    "ch_axis",
    "power_of_two_scale",
    "scales",
    "scale_range",
    "scale_dtype",
)


def _dtype(constraints: Any) -> dict[str, Any]:
    """The fields that PyTorch has, and whether it has to be symmetric; ours beyond them must be unset."""
    values = {"symmetric": None, **dataclasses.asdict(constraints)}
    for extension in _OURS:
        assert values.pop(extension, None) is None
    return values


def _dtype_config(config: Any) -> dict[str, Any]:
    assert getattr(config, "bias_scale", None) is None
    return {
        "input": _dtype(config.input_dtype_with_constraints),
        "output": _dtype(config.output_dtype_with_constraints),
        "weight": _dtype(config.weight_dtype_with_constraints),
        "bias": config.bias_dtype,
        "is_dynamic": config.is_dynamic,
    }


def _entry(key: Any, config: Any) -> dict[str, Any]:
    root_getter, inputs_getter = config._root_node_getter, config._extra_inputs_getter
    return {
        "pattern": _op(key),
        "observation": config.observation_type.name,
        "dtype_configs": [_dtype_config(c) for c in config.dtype_configs],
        "by_tensor_args": {
            n: o.name for n, o in config._num_tensor_args_to_observation_type.items()
        },
        "input_type_to_index": config._input_type_to_index,
        "root": _class(config.root_module),
        "qat": _class(config.qat_module),
        "reference": _class(config.reference_quantized_module),
        "fused": _class(config.fused_module),
        "fuser": _arity(config.fuser_method),
        "root_getter": _arity(root_getter),
        "inputs_getter": _arity(inputs_getter),
        # what the getters find in the pattern itself
        "root_node": None if root_getter is None else _op(root_getter(key)),
        "extra_inputs": None if inputs_getter is None else [_op(i) for i in inputs_getter(key)],
        # in which of the two forms the pattern, and so the fuser's arguments, are written
        "reversed": config._pattern_complex_format is not None,
    }


def _entries(config: Any) -> list[dict[str, Any]]:
    return [_entry(k, c) for k, c in config._pattern_complex_format_to_config.items()]


def _first(pattern: Any) -> Any:
    """The operator that a pattern starts with: the innermost of the reversed form."""
    if not isinstance(pattern, tuple):
        return pattern
    return _first(pattern[1])


def _without_weight(entry: dict[str, Any]) -> dict[str, Any]:
    nothing = _dtype(torch_backends.DTypeWithConstraints())
    configs = [{**c, "weight": nothing, "bias": None} for c in entry["dtype_configs"]]
    return {**entry, "dtype_configs": configs}


def _symmetric(entry: dict[str, Any]) -> dict[str, Any]:
    """All that is quantized is symmetric, which PyTorch's form cannot say."""
    configs = [
        {
            role: {**demand, "symmetric": True}
            if isinstance(demand, dict) and demand["dtype"] == torch.qint8
            else demand
            for role, demand in config.items()
        }
        for config in entry["dtype_configs"]
    ]
    return {**entry, "dtype_configs": configs}


#: An operator of this package: PyTorch quantizes no grouped products.
NOT_IN_TORCH = (grouped_linear,)


@pytest.mark.parametrize("name", TORCH)
def test_entries_equal_torch_in_order(name: str) -> None:
    listed = {_op(op) for op in WEIGHT_WITHOUT_WEIGHTS.get(name, ())}
    expected = [
        _without_weight(entry) if _first(entry["pattern"]) in listed else entry
        for entry in _entries(as_kept(name, TORCH[name]()))
    ]
    if name in SYMMETRIC:
        expected = [_symmetric(entry) for entry in expected]
    ours = [e for e in _entries(get_backend_config(name)) if e["pattern"] not in NOT_IN_TORCH]
    assert [e["pattern"] for e in ours] == [e["pattern"] for e in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == theirs


@pytest.mark.parametrize("name", TORCH)
def test_every_listed_difference_exists_in_torch(name: str) -> None:
    listed = {_op(op) for op in WEIGHT_WITHOUT_WEIGHTS.get(name, ())}
    found = {
        _first(entry["pattern"])
        for entry in _entries(TORCH[name]())
        if entry != _without_weight(entry) and _first(entry["pattern"]) in listed
    }
    assert found == listed


@pytest.mark.parametrize("name", TORCH)
def test_conditions_are_the_listed_ones(name: str) -> None:
    """PyTorch's form has none: each stands for uses that a kernel does not take."""
    limited = [c for c in get_backend_config(name).configs if c.where is not None]
    ops = {node.op.__name__ for c in limited for node in c.normal_pattern.nodes}
    assert ops - {"BatchNorm2d"} == CONDITIONS.get(name, set())


def _takes_weight(op: Any) -> bool:
    """Layer norm has one too, which the entries name as float; those of other norms they do not."""
    record = find_root(op) if isinstance(op, type) else find(op)
    return record is not None and (record.is_weighted or record.name == "layer_norm")


@pytest.mark.parametrize("name", TORCH)
def test_weight_dtype_where_and_only_where_there_is_a_weight(name: str) -> None:
    for config in get_backend_config(name).configs:
        ops = [node.op for node in config.normal_pattern.nodes]
        expected = any(_takes_weight(op) for op in ops)
        for dtypes in config.dtype_configs:
            assert (dtypes.weight_dtype is not None) == expected, config


def test_counts() -> None:
    assert {name: len(get_backend_config(name).configs) for name in TORCH} == COUNTS
    assert sum(COUNTS.values()) == 1222


@pytest.mark.parametrize("name", TORCH)
def test_name_is_torchs(name: str) -> None:
    assert get_backend_config(name).name == TORCH[name]().name
