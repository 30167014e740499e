"""The derived mappings against PyTorch's, on its eight backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.ao.quantization
from torch import nn
from torch.ao.quantization.backend_config import utils as oracle_utils

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    SequentialFuser,
    derived,
)
from backquant.errors import SpecError

ToOurs = Callable[[Any], BackendConfig]
Translated = Callable[[Any], Any]

MAPPINGS = [
    "get_pattern_to_dtype_configs",
    "get_pattern_to_input_type_to_index",
    "get_root_module_to_quantized_reference_module",
    "get_module_to_qat_module",
    "get_fusion_pattern_to_root_node_getter",
    "get_fusion_pattern_to_extra_inputs_getter",
]


@pytest.mark.parametrize("name", MAPPINGS)
def test_mapping_equals_pytorchs(
    name: str, oracle: Any, to_ours: ToOurs, translated: Translated
) -> None:
    ours = getattr(derived, name)(to_ours(oracle))
    theirs = getattr(oracle_utils, name)(oracle)
    assert list(ours) == [translated(key) for key in theirs]
    if name == "get_pattern_to_dtype_configs":
        ours = {key: [config.to_dict() for config in value] for key, value in ours.items()}
        theirs = {key: [config.to_dict() for config in value] for key, value in theirs.items()}
    assert list(ours.values()) == [translated(value) for value in theirs.values()]


@pytest.mark.parametrize("name", ["get_qat_module_classes", "get_fused_module_classes"])
def test_classes_equal_pytorchs_and_have_an_order(name: str, oracle: Any, to_ours: ToOurs) -> None:
    ours = getattr(derived, name)(to_ours(oracle))
    theirs = getattr(oracle_utils, name)(oracle)
    assert isinstance(ours, tuple)
    assert len(ours) == len(theirs)
    assert set(ours) == set(theirs)
    assert ours == getattr(derived, name)(to_ours(oracle))


def test_fusers_take_the_arguments_of_pytorchs(
    oracle: Any, to_ours: ToOurs, translated: Translated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are called with recorded arguments shaped like the key.

    PyTorch keeps onednn's entries at module level: they have to be put back.
    """
    calls: list[Any] = []
    for config in oracle._pattern_complex_format_to_config.values():
        if config.fuser_method is not None:
            monkeypatch.setattr(config, "fuser_method", lambda *arguments: calls.append(arguments))
    ours = derived.get_fuser_method_mapping(to_ours(oracle))
    theirs = oracle_utils.get_fuser_method_mapping(oracle)
    assert list(ours) == [translated(key) for key in theirs]
    for key in theirs:
        modules = key if isinstance(key, tuple) else (key,)
        theirs[key](True, *modules)
        ours[translated(key)](True, *modules)
    assert calls[::2] == calls[1::2]


def test_fuser_of_a_longer_sequence_gets_its_modules_in_forward_order() -> None:
    pattern = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d)
    entry = BackendPatternConfig(pattern).set_fuser_method(lambda is_qat, *modules: modules)
    mapping = derived.get_fuser_method_mapping(BackendConfig().set_backend_pattern_config(entry))
    (key, fuser), *rest = mapping.items()
    assert not rest
    assert fuser(False, *key) == pattern


def test_a_fuser_on_a_single_operator_is_refused() -> None:
    entry = BackendPatternConfig(nn.Linear).set_fuser_method(SequentialFuser(nn.Sequential))
    with pytest.raises(SpecError, match=r"torch.nn.Linear is a single operator and has a fuser"):
        derived.get_fuser_method_mapping(BackendConfig().set_backend_pattern_config(entry))


def test_the_last_entry_decides_the_reference_module() -> None:
    entries = [
        BackendPatternConfig(pattern).set_root_module(nn.Linear).set_reference_quantized_module(ref)
        for pattern, ref in (("a", nn.Identity), ("b", nn.Bilinear), ("c", None))
    ]
    backend = BackendConfig().set_backend_pattern_configs(entries)
    mapping = derived.get_root_module_to_quantized_reference_module(backend)
    assert mapping == {nn.Linear: nn.Bilinear}


def test_every_public_name_of_pytorch_is_here_with_its_parameter() -> None:
    here = {name: getattr(derived, name) for name in derived.__all__}
    for name in oracle_utils.__all__:
        if name.startswith("get_"):
            assert list(inspect.signature(here[name]).parameters) == ["backend_config"]
    assert torch.ao.quantization is not None
