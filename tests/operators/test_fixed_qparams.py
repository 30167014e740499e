from __future__ import annotations

import pytest
import torch

from backquant.backend_config import DTypeConfig, DTypeWithConstraints
from backquant.errors import SpecError
from backquant.operators.fixed_qparams import MINUS_ONE_TO_ONE, ZERO_TO_ONE, constrain, entries


def test_both_activations_are_constrained_and_the_original_is_not() -> None:
    config = DTypeConfig(torch.quint8, torch.quint8)
    result = constrain(config, MINUS_ONE_TO_ONE)
    expected = DTypeWithConstraints(
        torch.quint8,
        quant_min_lower_bound=0,
        quant_max_upper_bound=255,
        scale_exact_match=2 / 256,
        zero_point_exact_match=128,
    )
    assert result.input_dtype_with_constraints == expected
    assert result.output_dtype_with_constraints == expected
    assert config == DTypeConfig(torch.quint8, torch.quint8)


def test_other_dtypes_stay_as_they_are() -> None:
    signed = DTypeConfig(
        DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12), torch.float16
    )
    assert constrain(signed, ZERO_TO_ONE) == signed
    for entry in entries([signed]):
        assert entry.dtype_configs == [signed]


@pytest.mark.parametrize("bound", ["scale_min_lower_bound", "scale_max_upper_bound"])
@pytest.mark.parametrize("side", ["input_dtype", "output_dtype"])
def test_scale_bound_beside_fixed_scale_is_refused(bound: str, side: str) -> None:
    config = DTypeConfig(**{side: DTypeWithConstraints(torch.quint8, **{bound: 2**-12})})
    with pytest.raises(SpecError, match="cannot also bound its scale") as error:
        constrain(config, ZERO_TO_ONE)
    assert error.value.fix
