"""Entries and rules for graphs that say which operator is called, and no longer how it was spelled."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant import BackendConfig, BackendPatternConfig, DTypeConfig, QConfigMapping
from backquant.backend_config import get_backend_config
from backquant.nn import intrinsic
from backquant.nn.quantized import reference
from backquant.operators.equivalents import mapping_for_export, with_export_spellings

INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
aten = torch.ops.aten


def _config(*patterns: object) -> BackendConfig:
    entries = [BackendPatternConfig(pattern).add_dtype_config(INT8) for pattern in patterns]
    return BackendConfig("b").set_backend_pattern_configs(entries)


def _added(config: BackendConfig) -> list[str]:
    made = with_export_spellings(config)
    return [str(entry.normal_pattern) for entry in made.configs[len(config.configs) :]]


@pytest.mark.parametrize("name", ["native", "x86", "fbgemm", "qnnpack", "onednn", "tensorrt"])
def test_backends_that_list_every_spelling(name: str) -> None:
    config = get_backend_config(name)
    assert with_export_spellings(config) is config


def test_other_spellings() -> None:
    assert _added(_config(torch.add, "relu")) == ["operator.add", "torch.nn.functional.relu"]
    assert _added(_config((torch.mul, torch.relu))) == ["torch.nn.functional.relu(operator.mul)"]
    assert _added(_config(operator.add, nn.ReLU, F.relu)) == []


def test_aten_stands_for_the_module() -> None:
    made = with_export_spellings(
        _config(aten.addmm.default, (aten.convolution.default, aten.relu.default))
    )
    by_pattern = {str(entry.normal_pattern): entry for entry in made.configs}
    linear = by_pattern["torch.nn.Linear"]
    assert linear.reference_quantized_module is reference.Linear
    assert by_pattern["torch.nn.functional.linear"]._input_type_to_index == {"weight": 1, "bias": 2}
    fused = by_pattern["torch.nn.ReLU(torch.nn.Conv2d)"]
    assert fused.fused_module is intrinsic.ConvReLU2d
    assert "backquant.nn.intrinsic.ConvReLU2d" in by_pattern


def test_max_pooling() -> None:
    made = with_export_spellings(get_backend_config("qnnpack_pt2e"))
    patterns = [entry.normal_pattern.anchor.op for entry in made.configs]
    assert nn.MaxPool2d in patterns and F.max_pool2d in patterns


def test_rules() -> None:
    mapping = (
        QConfigMapping()
        .set_object_type(torch.add, None)
        .set_object_type("relu", None)
        .set_object_type(nn.Linear, None)
        .set_module_name_object_type_order("block", torch.mul, 1, None)
    )
    made = mapping_for_export(mapping)
    assert list(made.object_type_qconfigs) == [operator.add, F.relu, nn.Linear]
    assert list(made.module_name_object_type_order_qconfigs) == [("block", operator.mul, 1)]
    both = QConfigMapping().set_object_type(torch.add, None).set_object_type(operator.add, None)
    assert mapping_for_export(both) is both
