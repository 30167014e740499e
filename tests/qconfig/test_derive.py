from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QuantDefault,
)
from backquant.errors import ConfigError
from backquant.operators import entries_of, named
from backquant.qconfig import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from backquant.qconfig.default_mapping import derive_defaults


def backend(*configs: DTypeConfig) -> BackendConfig:
    entry = BackendPatternConfig(nn.Linear).set_dtype_configs(list(configs))
    return BackendConfig("mine").set_backend_pattern_config(entry)


def test_constraints_become_bounds_scheme_and_smallest_scale() -> None:
    config = backend(
        DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16),
        DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True),
        DTypeConfig(
            DTypeWithConstraints(torch.quint8, quant_max_upper_bound=127),
            torch.quint8,
            DTypeWithConstraints(
                torch.qint8,
                quant_min_lower_bound=-127,
                quant_max_upper_bound=127,
                scale_min_lower_bound=2**-12,
                granularity="per_channel",
                ch_axis=0,
            ),
            torch.float,
        ),
    )
    qconfig = get_default_qconfig(config)
    activation, weight = qconfig.activation(), qconfig.weight()
    assert type(activation).__name__ == "HistogramObserver"
    assert (activation.dtype, activation.quant_min, activation.quant_max) == (torch.quint8, 0, 127)
    assert activation.qscheme == torch.per_tensor_affine
    assert type(weight).__name__ == "PerChannelMinMaxObserver"
    assert (weight.quant_min, weight.quant_max, weight.ch_axis) == (-127, 127, 0)
    assert (weight.qscheme, weight.eps.item()) == (torch.per_channel_symmetric, 2**-12)
    trained = get_default_qat_qconfig(config)
    activation, weight = trained.activation(), trained.weight()
    assert (activation.quant_min, activation.quant_max) == (0, 127)
    assert type(weight.activation_post_process).__name__ == "MovingAveragePerChannelMinMaxObserver"
    assert (weight.quant_min, weight.quant_max) == (-127, 127)


def test_plain_dtypes_take_per_tensor_symmetric_weights() -> None:
    qconfig = get_default_qconfig(
        backend(DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float))
    )
    assert qconfig.activation().qscheme == torch.per_tensor_affine
    assert qconfig.weight().qscheme == torch.per_tensor_symmetric
    trained = get_default_qat_qconfig(
        backend(DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float))
    )
    assert (trained.activation().quant_min, trained.activation().quant_max) == (-128, 127)


def test_the_zero_point_rule_of_the_constraints_decides() -> None:
    symmetric = DTypeWithConstraints(torch.qint8, symmetric=True)
    affine = DTypeWithConstraints(torch.qint8, symmetric=False)
    qconfig = get_default_qconfig(backend(DTypeConfig(symmetric, symmetric, affine, torch.float)))
    assert qconfig.activation().qscheme == torch.per_tensor_symmetric
    assert qconfig.weight().qscheme == torch.per_tensor_affine


def test_without_a_weight_the_weight_is_signed() -> None:
    defaults = derive_defaults(backend(DTypeConfig(torch.quint8, torch.quint8)))
    assert defaults.weight.dtype == torch.qint8


def test_entries_with_weights_come_first() -> None:
    config = backend(
        DTypeConfig(torch.quint8, torch.quint8),
        DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float),
    )
    assert derive_defaults(config).activation.dtype == torch.qint8


def test_a_backend_without_integers_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="no static quantized dtype config") as caught:
        get_default_qconfig(backend(DTypeConfig(torch.float16, torch.float16)))
    assert "set_defaults" in caught.value.fix


@pytest.mark.parametrize("name", ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mm"])
def test_written_defaults_per_channel_follow_the_axis_of_the_operator(name: str) -> None:
    per_channel = {"qscheme": torch.per_channel_symmetric, "dtype": torch.qint8}
    defaults = BackendDefaults(
        QuantDefault("histogram", dtype=torch.qint8),
        QuantDefault("per_channel_minmax", **per_channel),
        QuantDefault("moving_average_minmax", dtype=torch.qint8, fake_quantize="fake_quantize"),
        QuantDefault(
            "moving_average_per_channel_minmax", fake_quantize="fake_quantize", **per_channel
        ),
    )
    int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    entries = entries_of([name, "linear"], [int8])
    backend = BackendConfig("b").set_backend_pattern_configs(entries).set_defaults(defaults)
    for mapping in (get_default_qconfig_mapping(backend), get_default_qat_qconfig_mapping(backend)):
        rules = mapping.object_type_qconfigs
        assert {rules[op].weight().ch_axis for op in named(name).calls if op in rules} == {1}
        assert mapping.global_qconfig.weight().ch_axis == 0
    for operator in named(name).modules:
        model = torch.nn.Sequential(operator(4, 4, 3)).eval()
        report = backquant.explain(model, torch.randn(1, 4, *(8,) * int(name[-2])), backend=backend)
        assert [row.outcome for row in report.rows] == ["quantized"]
