from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backquant.backend_config.defaults import (
    FAKE_QUANTIZES,
    OBSERVERS,
    BackendDefaults,
    DefaultOverride,
    QuantDefault,
)
from backquant.errors import SpecError

BOOLS = st.sampled_from([None, True, False])
BOUNDS = st.sampled_from([(None, None), (0, 127), (-128, 127), (0, 255)])
ROLES = st.builds(
    lambda bounds, **fields: QuantDefault(quant_min=bounds[0], quant_max=bounds[1], **fields),
    BOUNDS,
    observer=st.sampled_from(OBSERVERS),
    dtype=st.sampled_from([None, torch.quint8, torch.qint8]),
    qscheme=st.sampled_from([None, torch.per_tensor_affine, torch.per_channel_symmetric]),
    reduce_range=BOOLS,
    eps=st.sampled_from([None, 2**-12]),
    ch_axis=st.sampled_from([None, 0, 1]),
    averaging_constant=st.sampled_from([None, 0.01, 1]),
    is_dynamic=BOOLS,
    fake_quantize=st.sampled_from([None, *FAKE_QUANTIZES]),
)
MAYBE = st.one_of(st.none(), ROLES)
OPERATORS = st.lists(
    st.sampled_from([nn.Linear, nn.PReLU, torch.add, "reshape"]), min_size=1, unique=True
)
OVERRIDES = st.builds(DefaultOverride, OPERATORS.map(tuple), MAYBE, MAYBE, MAYBE, MAYBE)
DEFAULTS = st.builds(
    BackendDefaults, ROLES, ROLES, MAYBE, MAYBE, st.lists(OVERRIDES, max_size=1).map(tuple)
)
NAMES = {"torch": torch, "QuantDefault": QuantDefault}


@given(DEFAULTS)
def test_round_trip(defaults: BackendDefaults) -> None:
    assert BackendDefaults.from_dict(defaults.to_dict()) == defaults
    assert hash(BackendDefaults.from_dict(defaults.to_dict())) == hash(defaults)


@given(ROLES)
def test_repr_of_a_role_evaluates(role: QuantDefault) -> None:
    assert eval(repr(role), dict(NAMES)) == role


@given(DEFAULTS)
def test_the_dict_is_plain(defaults: BackendDefaults) -> None:
    """Containers, numbers, strings, dtypes, schemes; operators stand only under their key."""

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key != "operators":
                    check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert isinstance(value, (str, int, float, torch.dtype, torch.qscheme))

    check(defaults.to_dict())


def test_options_are_keywords_of_an_observer() -> None:
    role = QuantDefault(
        "histogram", dtype=torch.quint8, reduce_range=False, fake_quantize="fake_quantize"
    )
    assert role.options == {"dtype": torch.quint8, "reduce_range": False}


def test_version_0_of_training_takes_observer_and_rounding_apart() -> None:
    fused = QuantDefault("moving_average_minmax", fake_quantize="fused_moving_average")
    override = DefaultOverride(("reshape",), qat_weight=fused)
    minmax = QuantDefault("minmax")
    defaults = BackendDefaults(minmax, minmax, fused, fused, (override,))
    assert defaults.for_qat_version(1) is defaults
    apart = dataclasses.replace(fused, fake_quantize="fake_quantize")
    expected = BackendDefaults(minmax, minmax, apart, apart, (override,))
    assert defaults.for_qat_version(0) == expected
    assert BackendDefaults(minmax, minmax).for_qat_version(0).qat_weight is None
    with pytest.raises(SpecError, match="no version 2 of the defaults"):
        defaults.for_qat_version(2)


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantDefault("minmax").observer = "histogram"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"observer": None}, "observer"),
        ({"observer": "histgram"}, "observer"),
        ({"dtype": "quint8"}, "dtype"),
        ({"qscheme": "per_tensor_affine"}, "qscheme"),
        ({"quant_min": 0.5, "quant_max": 1}, "quant_min"),
        ({"quant_min": 0}, "quant_min"),
        ({"quant_min": 1, "quant_max": 1}, "quant_min"),
        ({"eps": 0.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"reduce_range": 1}, "reduce_range"),
        ({"is_dynamic": 1}, "is_dynamic"),
        ({"averaging_constant": "0.01"}, "averaging_constant"),
        ({"fake_quantize": "fused"}, "fake_quantize"),
    ],
)
def test_a_role_refuses(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        QuantDefault(**{"observer": "minmax", **fields})
    assert caught.value.where == where


def test_defaults_refuse() -> None:
    minmax = QuantDefault("minmax")
    once = DefaultOverride(("reshape",))
    with pytest.raises(SpecError, match=r"\.reshape\(\) is overridden twice") as twice:
        BackendDefaults(minmax, minmax, overrides=(once, once))
    assert twice.value.where == "overrides[1]"
    with pytest.raises(SpecError, match="a BackendDefaults names its weight"):
        BackendDefaults.from_dict({"activation": {"observer": "minmax"}})
    with pytest.raises(SpecError, match="weight must be a QuantDefault"):
        BackendDefaults(minmax, "minmax")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="expected a DefaultOverride"):
        BackendDefaults(minmax, minmax, overrides=("reshape",))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="operators is a tuple of operators, got 'reshape'"):
        DefaultOverride("reshape")  # type: ignore[arg-type]
    with pytest.raises(SpecError) as operator:
        DefaultOverride(("reshape", nn.ReLU()))
    assert operator.value.where == "operators[1].pattern"
    minmax_roles = {"activation": minmax, "weight": minmax}
    with pytest.raises(SpecError) as nested:
        BackendDefaults.from_dict(
            {**minmax_roles, "overrides": [{"operators": ["a"], "wight": {}}]}
        )
    assert nested.value.where == "overrides[0].wight"
