from __future__ import annotations

import operator

import pytest
import torch

from backquant.backend_config import (
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    QuantDefault,
    from_reversed,
)
from backquant.backend_config.describe import (
    describe_dtype,
    describe_dtype_config,
    describe_pattern,
    mode_of,
)
from backquant.backend_config.naming import operator_label
from backquant.nn.quantized import reference


@pytest.mark.parametrize(
    ("op", "label"),
    [
        (torch.nn.Conv2d, "nn.Conv2d"),
        (torch.nn.functional.relu, "F.relu"),
        (torch.relu, "torch.relu"),
        (operator.add, "operator.add"),
        ("view", ".view()"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        (reference.Linear, "reference.Linear"),
    ],
)
def test_labels(op, label):
    assert operator_label(op) == label


def test_nested_patterns():
    pattern = from_reversed((torch.nn.ReLU, ("add_", MatchAllNode, (torch.add, torch.conv2d, 0))))
    assert describe_pattern(pattern) == "nn.ReLU(.add_(*, torch.add(torch.conv2d, 0)))"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "quint8"),
        ({"quant_min_lower_bound": 0, "quant_max_upper_bound": 127}, "quint8 [0, 127]"),
        ({"quant_max_upper_bound": 127}, "quint8 […, 127]"),
        ({"scale_max_upper_bound": 0.5}, "quint8, scale ≤ 0.5"),
        (
            {"scale_exact_match": 2**-8, "zero_point_exact_match": 0},
            "quint8, scale = 2**-8, zero point = 0",
        ),
        ({"symmetric": True}, "quint8, symmetric"),
        ({"symmetric": False}, "quint8, affine"),
        ({"granularity": "per_tensor"}, "quint8, per tensor"),
        ({"granularity": "per_channel", "ch_axis": 1}, "quint8, per channel, channels on axis 1"),
        ({"power_of_two_scale": True}, "quint8, power-of-two scale"),
    ],
)
def test_constraints(fields, text):
    assert describe_dtype(DTypeWithConstraints(torch.quint8, **fields)) == text


def test_dtype_configs():
    bounded = DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12)
    ranged = DTypeWithConstraints(
        torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127
    )
    config = DTypeConfig(
        bounded, torch.qint8, ranged, torch.int32, is_dynamic=False, bias_scale="input_times_weight"
    )
    assert describe_dtype_config(config) == (
        "(qint8, scale ≥ 2**-12) × qint8 [-127, 127] → qint8, bias int32, "
        "not dynamic, bias scale = input × weight"
    )
    assert describe_dtype_config(DTypeConfig()) == "any → any"


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (DTypeConfig(torch.quint8, torch.quint8), "static"),
        (DTypeConfig(torch.quint8, torch.float), "static"),
        (DTypeConfig(torch.float, torch.quint8), "static"),
        (DTypeConfig(torch.float16, torch.float, torch.float16, is_dynamic=True), "dynamic"),
        (DTypeConfig(torch.float, torch.float, torch.quint4x2), "weight-only"),
        (DTypeConfig(torch.float16, torch.float16, torch.float16), "float"),
        (DTypeConfig(), "float"),
    ],
)
def test_modes(config, mode):
    assert mode_of(config) == mode


def test_every_field_of_a_default_is_described():
    default = QuantDefault(
        "moving_average_minmax",
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-127,
        quant_max=127,
        reduce_range=False,
        eps=2**-12,
        ch_axis=1,
        averaging_constant=0.01,
        is_dynamic=True,
        fake_quantize="fused_moving_average",
    )
    assert str(default) == (
        "moving average minmax, qint8, per channel symmetric, [-127, 127], full range, "
        "scale ≥ 2**-12, channel axis 1, averaging constant 0.01, dynamic, fused moving average"
    )
