from __future__ import annotations

import functools

import pytest
import torch

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    SequentialFuser,
)
from backquant.backend_config.files.store import to_data
from backquant.errors import SpecError


def backend(*entries: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(entries)


def test_equal_dtype_configs_get_one_descriptive_name():
    static = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    bounded = DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127)
    configs = {
        "quint8_weight_qint8": static,
        "dynamic_quint8_weight_qint8": DTypeConfig(
            torch.quint8, torch.float, torch.qint8, is_dynamic=True
        ),
        "quint8_to_float32": DTypeConfig(torch.quint8, torch.float),
        "quint8": DTypeConfig(torch.quint8, torch.quint8),
        "quint8_2": DTypeConfig(bounded, torch.quint8),
        "any": DTypeConfig(),
    }
    entries = [
        BackendPatternConfig(op).set_dtype_configs(configs.values())
        for op in (torch.add, torch.mul)
    ]
    data = to_data(backend(*entries))
    assert list(data["dtype_configs"]) == list(configs)
    assert data["entries"] == [
        {"patterns": ["torch.add", "torch.mul"], "dtype_configs": list(configs)}
    ]


def test_only_neighbours_are_grouped():
    static = DTypeConfig(torch.quint8)
    entries = [
        BackendPatternConfig(torch.add).add_dtype_config(static),
        BackendPatternConfig(torch.mul),
        BackendPatternConfig("view").add_dtype_config(static),
    ]
    assert [entry["pattern"] for entry in to_data(backend(*entries))["entries"]] == [
        "torch.add",
        "torch.mul",
        ".view",
    ]


def a_lambda_in(field: str) -> BackendPatternConfig:
    entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))
    setter = {"fuser_method": "set_fuser_method"}.get(field, f"_set_{field}")
    return getattr(entry, setter)(lambda *arguments: arguments)


@pytest.mark.parametrize(
    "field",
    [
        *("fuser_method", "root_node_getter", "extra_inputs_getter"),
        *("overwrite_output_fake_quantize", "overwrite_output_observer"),
    ],
)
def test_a_lambda_is_refused_by_name_entry_and_field(field):
    with pytest.raises(SpecError) as caught:
        to_data(backend(BackendPatternConfig(torch.add), a_lambda_in(field)))
    assert "a_lambda_in.<locals>.<lambda>" in caught.value.what
    assert caught.value.where == f"configs[1] torch.nn.ReLU(torch.nn.Linear): {field}"
    assert "top level of a module" in caught.value.fix


def test_a_local_class_is_refused():
    class Local(torch.nn.Module):
        pass

    for entry in (
        BackendPatternConfig(Local),
        BackendPatternConfig(torch.add).set_root_module(Local),
        BackendPatternConfig((torch.add, "relu")).set_fuser_method(SequentialFuser(Local)),
    ):
        with pytest.raises(SpecError, match=r"Local .*has no import path"):
            to_data(backend(entry))


def test_a_partial_function_in_a_pattern_is_refused():
    entry = BackendPatternConfig(functools.partial(torch.add, alpha=2))
    with pytest.raises(SpecError, match="has no import path"):
        to_data(backend(entry))


def test_infinite_bounds_are_refused():
    bounds = DTypeWithConstraints(torch.quint8, scale_max_upper_bound=float("inf"))
    entry = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(bounds))
    with pytest.raises(SpecError) as caught:
        to_data(backend(entry))
    assert caught.value.where.endswith("dtype_configs[0]")
