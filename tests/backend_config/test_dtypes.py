from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization.backend_config import DTypeConfig as OracleConfig
from torch.ao.quantization.backend_config import DTypeWithConstraints as OracleConstraints

from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.errors import SpecError

DTYPES = st.sampled_from([torch.quint8, torch.qint8, torch.qint32, torch.float16, torch.int8])
NUMBERS = st.one_of(st.none(), st.integers(-256, 256), st.floats(allow_nan=False))
BOOLS = st.sampled_from([None, True, False])
CONSTRAINTS = st.builds(
    DTypeWithConstraints,
    dtype=st.one_of(st.none(), DTYPES),
    quant_min_lower_bound=NUMBERS,
    quant_max_upper_bound=NUMBERS,
    scale_min_lower_bound=NUMBERS,
    scale_max_upper_bound=NUMBERS,
    scale_exact_match=NUMBERS,
    zero_point_exact_match=st.one_of(st.none(), st.integers(0, 255)),
    symmetric=BOOLS,
    granularity=st.sampled_from([None, "per_tensor", "per_channel"]),
    ch_axis=st.sampled_from([None, 0, 1, -1]),
    power_of_two_scale=BOOLS,
)
ADMITTED = st.one_of(st.none(), DTYPES, CONSTRAINTS)
CONFIGS = st.builds(
    DTypeConfig,
    ADMITTED,
    ADMITTED,
    ADMITTED,
    st.one_of(st.none(), DTYPES),
    BOOLS,
    bias_scale=st.sampled_from([None, "input_times_weight"]),
)
NAMES = {"torch": torch, "DTypeConfig": DTypeConfig, "DTypeWithConstraints": DTypeWithConstraints}


@given(CONSTRAINTS)
def test_constraints_survive_dict_and_repr(constraints: DTypeWithConstraints) -> None:
    assert DTypeWithConstraints.from_dict(constraints.to_dict()) == constraints
    assert eval(repr(constraints), {**NAMES, "inf": float("inf")}) == constraints


@given(CONFIGS)
def test_configs_survive_dict_and_repr(config: DTypeConfig) -> None:
    assert DTypeConfig.from_dict(config.to_dict()) == config
    assert eval(repr(config), {**NAMES, "inf": float("inf")}) == config


def test_fields_and_order_of_pytorch_come_first() -> None:
    ours, oracle = list(vars(DTypeWithConstraints())), list(vars(OracleConstraints()))
    assert ours[: len(oracle)] == oracle


def test_dict_keys_are_those_of_pytorch() -> None:
    arguments = (torch.quint8, torch.quint8, torch.qint8, torch.float, False)
    assert list(DTypeConfig(*arguments).to_dict()) == list(OracleConfig(*arguments).to_dict())
    assert DTypeConfig().to_dict() == OracleConfig().to_dict() == {}


def test_to_dict_keeps_constraints_without_a_dtype() -> None:
    config = DTypeConfig(DTypeWithConstraints(quant_min_lower_bound=0))
    assert DTypeConfig.from_dict(config.to_dict()) == config


def test_bias_type_is_read_where_pytorch_drops_it() -> None:
    assert OracleConfig.from_dict({"bias_type": torch.float}).bias_dtype is None
    assert DTypeConfig.from_dict({"bias_type": torch.float}).bias_dtype is torch.float


def test_nested_dict_of_constraints_is_read() -> None:
    config = DTypeConfig.from_dict({"weight_dtype": {"dtype": torch.qint8, "symmetric": True}})
    assert config.weight_dtype_with_constraints == DTypeWithConstraints(torch.qint8, symmetric=True)


def test_one_object_may_stand_for_several_roles() -> None:
    shared = DTypeWithConstraints(torch.quint8)
    config = DTypeConfig(shared, shared)
    assert config.input_dtype_with_constraints is shared
    assert config.input_dtype is config.output_dtype is torch.quint8
    assert config.weight_dtype is None


@pytest.mark.parametrize(
    ("given_dict", "where", "fix"),
    [
        ({"input_dtype": "quint8"}, "input_dtype", "torch.quint8"),
        ({"bias_dtype": "torch.float"}, "bias_dtype", "torch.float"),
        ({"weight_dtype": 8}, "weight_dtype", ""),
        ({"is_dynamic": 1}, "is_dynamic", ""),
        ({"bias_scale": "input*weight"}, "bias_scale", "did you mean 'input_times_weight'?"),
        ({"imput_dtype": torch.quint8}, "imput_dtype", "did you mean 'input_dtype'?"),
        ({"output_dtype": {"symetric": True}}, "output_dtype.symetric", None),
    ],
)
def test_from_dict_refuses(given_dict: dict[str, Any], where: str, fix: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        DTypeConfig.from_dict(given_dict)
    assert caught.value.where == where
    assert fix is None or caught.value.fix == fix


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "quint8"},
        {"quant_min_lower_bound": "0"},
        {"zero_point_exact_match": 0.5},
        {"granularity": "per_gruop"},
        {"ch_axis": 0.0},
        {"symmetric": 1},
        {"power_of_two_scale": "yes"},
    ],
)
def test_constraints_refuse(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        DTypeWithConstraints(**fields)
    assert caught.value.where == next(iter(fields))


def test_small_powers_of_two_are_written_as_such() -> None:
    text = repr(DTypeWithConstraints(scale_min_lower_bound=2**-12, scale_exact_match=1 / 256))
    assert text == "DTypeWithConstraints(scale_min_lower_bound=2**-12, scale_exact_match=2**-8)"
