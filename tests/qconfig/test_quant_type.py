from __future__ import annotations

import pytest
from torch.ao.quantization.quant_type import QuantType as Oracle
from torch.ao.quantization.quant_type import _get_quant_type_to_str

from backquant.errors import ConfigError
from backquant.qconfig import QuantType
from backquant.qconfig.qconfig import quant_type_from_str


def test_kinds_numbers_and_keys_equal_the_oracles() -> None:
    assert [(k.name, k.value) for k in QuantType] == [(k.name, k.value) for k in Oracle]
    for kind in Oracle:
        assert QuantType(kind).key == _get_quant_type_to_str(kind)
        assert quant_type_from_str(QuantType(kind).key) == kind


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="'int8' is no kind"):
        quant_type_from_str("int8")
