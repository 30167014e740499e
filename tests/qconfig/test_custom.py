from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig as OracleConvert
from torch.ao.quantization.fx.custom_config import FuseCustomConfig as OracleFuse
from torch.ao.quantization.quant_type import QuantType as OracleType

from backquant.errors import ConfigError
from backquant.qconfig import ConvertCustomConfig, FuseCustomConfig, QuantType


class Observed(nn.Module):
    pass


class Quantized(nn.Module):
    @classmethod
    def from_observed(cls, module: nn.Module) -> Quantized:
        return cls()


def _convert(cls: Any, kinds: Any) -> Any:
    return (
        cls()
        .set_observed_to_quantized_mapping(Observed, Quantized)
        .set_observed_to_quantized_mapping(nn.Linear, Quantized, kinds.DYNAMIC)
        .set_observed_to_quantized_mapping(nn.Conv2d, Quantized, kinds.WEIGHT_ONLY)
        .set_preserved_attributes(["tag"])
    )


def test_convert_dicts_equal_the_oracles() -> None:
    ours, theirs = _convert(ConvertCustomConfig, QuantType), _convert(OracleConvert, OracleType)
    assert ours.to_dict() == theirs.to_dict()
    assert ConvertCustomConfig.from_dict(theirs.to_dict()) == ours
    assert OracleConvert.from_dict(ours.to_dict()).to_dict() == theirs.to_dict()
    assert ConvertCustomConfig().to_dict() == OracleConvert().to_dict() == {}


def test_fuse_dicts_equal_the_oracles() -> None:
    ours = FuseCustomConfig().set_preserved_attributes(["tag"])
    theirs = OracleFuse().set_preserved_attributes(["tag"])
    assert ours.to_dict() == theirs.to_dict()
    assert FuseCustomConfig.from_dict(theirs.to_dict()) == ours
    assert FuseCustomConfig().to_dict() == {}


def test_equality_copies_and_repr() -> None:
    config = _convert(ConvertCustomConfig, QuantType)
    assert copy.deepcopy(config) == config
    assert config != ConvertCustomConfig()
    assert ConvertCustomConfig() != FuseCustomConfig()
    assert repr(FuseCustomConfig()) == "FuseCustomConfig()"


def test_classes_are_taken_as_they_are_until_a_module_is_replaced() -> None:
    config = ConvertCustomConfig().set_observed_to_quantized_mapping(nn.Linear, Observed)
    theirs = OracleConvert().set_observed_to_quantized_mapping(nn.Linear, Observed)
    assert config.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("cls", [ConvertCustomConfig, FuseCustomConfig])
def test_unknown_keys_are_refused(cls: Any) -> None:
    with pytest.raises(ConfigError, match="preserved_attribute") as caught:
        cls.from_dict({"preserved_attribute": []})
    assert caught.value.fix == "did you mean 'preserved_attributes'?"


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="'fast' is no kind"):
        ConvertCustomConfig.from_dict(
            {"observed_to_quantized_custom_module_class": {"fast": {Observed: Quantized}}}
        )
