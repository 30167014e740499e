from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig as Oracle

from backquant.backend_config import BackendConfig
from backquant.errors import ConfigError
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfigMapping,
    QuantType,
    StandaloneModuleConfigEntry,
    default_qconfig,
)

INPUTS = (torch.ones(1),)


class Observed(nn.Linear):
    @classmethod
    def from_float(cls, module: nn.Linear) -> Observed:
        return cls(module.in_features, module.out_features)


def _filled(cls: Any) -> Any:
    return (
        cls()
        .set_standalone_module_name("a", None, INPUTS, None, None)
        .set_standalone_module_class(nn.LSTM, None, INPUTS, None, None)
        .set_float_to_observed_mapping(nn.Linear, Observed)
        .set_non_traceable_module_names(["b", "c"])
        .set_non_traceable_module_classes([nn.GRU])
        .set_input_quantized_indexes([0, 2])
        .set_output_quantized_indexes([1])
        .set_preserved_attributes(["tag"])
    )


def test_dicts_equal_the_oracles() -> None:
    ours, theirs = _filled(PrepareCustomConfig), _filled(Oracle)
    assert ours.to_dict() == theirs.to_dict()
    assert PrepareCustomConfig.from_dict(theirs.to_dict()) == ours
    assert PrepareCustomConfig().to_dict() == Oracle().to_dict() == {}


def test_every_setter_of_the_oracle_is_here() -> None:
    wanted = {n for n, _ in inspect.getmembers(Oracle) if not n.startswith("_")}
    assert wanted <= set(dir(PrepareCustomConfig))


def test_nested_configs_round_trip() -> None:
    mapping = QConfigMapping().set_global(default_qconfig)
    inner = PrepareCustomConfig().set_preserved_attributes(["tag"])
    backend = BackendConfig("mine")
    config = PrepareCustomConfig().set_standalone_module_name("a", mapping, INPUTS, inner, backend)
    written = config.to_dict()
    assert written["standalone_module_name"] == [
        ("a", mapping.to_dict(), INPUTS, inner.to_dict(), backend)
    ]
    assert PrepareCustomConfig.from_dict(written) == config
    written["standalone_module_name"] = [("a", mapping, INPUTS, inner, backend.to_dict())]
    assert PrepareCustomConfig.from_dict(written) == config
    assert copy.deepcopy(config) == config
    entry = config.standalone_module_names["a"]
    assert entry == StandaloneModuleConfigEntry(mapping, INPUTS, inner, backend)


def test_observed_modules_have_a_kind_and_can_be_made() -> None:
    config = PrepareCustomConfig()
    with pytest.raises(ConfigError, match="training is static"):
        config.set_float_to_observed_mapping(nn.Linear, Observed, QuantType.QAT)
    assert config == PrepareCustomConfig()
    config.set_float_to_observed_mapping(nn.Linear, nn.GRU)  # made when it is used, checked then


def test_kinds_round_trip() -> None:
    """PyTorch has static ones only."""
    config = PrepareCustomConfig()
    config.set_float_to_observed_mapping(nn.Linear, Observed, QuantType.DYNAMIC)
    config.set_float_to_observed_mapping(nn.Linear, Observed, QuantType.WEIGHT_ONLY)
    written = config.to_dict()["float_to_observed_custom_module_class"]
    assert written == {"dynamic": {nn.Linear: Observed}, "weight_only": {nn.Linear: Observed}}
    assert PrepareCustomConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError):
        Oracle().set_float_to_observed_mapping(nn.Linear, Observed, QuantType.DYNAMIC)


@pytest.mark.parametrize(
    ("key", "module"), [("standalone_module_name", "a"), ("standalone_module_class", nn.LSTM)]
)
def test_a_module_is_named_once(key: str, module: Any) -> None:
    entry = (module, None, (), None, None)
    with pytest.raises(ConfigError, match="has two entries") as caught:
        PrepareCustomConfig.from_dict({key: [entry, entry]})
    assert key in caught.value.where


def test_malformed_dicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no key") as caught:
        PrepareCustomConfig.from_dict({"standalone_module": []})
    assert caught.value.fix == "did you mean 'standalone_module_name'?"
    with pytest.raises(ConfigError, match="expected a QConfigMapping"):
        PrepareCustomConfig.from_dict({"standalone_module_name": [("a", 3, (), None, None)]})


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_non_traceable_module_names", "encoder"),
        ("set_non_traceable_module_names", [nn.LSTM]),
        ("set_non_traceable_module_classes", nn.LSTM),
        ("set_non_traceable_module_classes", ["LSTM"]),
        ("set_input_quantized_indexes", 0),
        ("set_input_quantized_indexes", [-1]),
        ("set_output_quantized_indexes", [True]),
        ("set_preserved_attributes", "tag"),
    ],
)
def test_lists_are_lists(setter: str, value: Any) -> None:
    config = PrepareCustomConfig()
    with pytest.raises(ConfigError, match="expected a list such as") as caught:
        getattr(config, setter)(value)
    assert setter in caught.value.where
    assert config == PrepareCustomConfig()
