"""Dicts in the form of PyTorch 1.13."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    MatchAllNode,
    ObservationType,
    SequentialFuser,
    get_fuser_method_mapping,
    reverse_sequential_wrapper2,
)
from backquant.backend_config.pattern_config import upgrade
from backquant.errors import SpecError

SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def _fuse(*arguments: Any) -> Any:
    return arguments


def _observer() -> str:
    return "observer"


OLD = {
    "name": "old",
    "configs": [
        {"pattern": nn.Linear, "root_module": nn.Linear},
        {
            "pattern": (nn.ReLU, nn.Linear),
            "fuser_method": reverse_sequential_wrapper2(nn.Sequential),
            "fused_module": nn.Sequential,
        },
        {"pattern": (nn.ReLU, (nn.BatchNorm2d, nn.Conv2d)), "fuser_method": _fuse},
        {
            "pattern": (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d))),
            "fuser_method": _fuse,
        },
        {"pattern": "size", "observation_type": SHARES, "input_output_observed": False},
        {
            "pattern": nn.Sigmoid,
            "overwrite_output_fake_quantize": _observer,
            "overwrite_output_observer": _observer,
        },
    ],
}


def test_reversed_patterns_become_forward_ones() -> None:
    backend = BackendConfig.from_dict(OLD, version="1.13")
    assert [config.pattern for config in backend.configs] == [
        nn.Linear,
        (nn.Linear, nn.ReLU),
        (nn.Conv2d, nn.BatchNorm2d, nn.ReLU),
        None,
        "size",
        nn.Sigmoid,
    ]
    assert list(backend._pattern_complex_format_to_config) == [
        entry["pattern"] for entry in OLD["configs"]
    ]


def test_a_trees_pattern_and_fuser_keep_their_form() -> None:
    tree = BackendConfig.from_dict(OLD, version="1.13").configs[3]
    assert tree._pattern_complex_format == OLD["configs"][3]["pattern"]  # type: ignore[index]
    assert tree.fuser_method is _fuse


def test_fusers_are_called_in_forward_order() -> None:
    _, two, three, *_ = BackendConfig.from_dict(OLD, version="1.13").configs
    assert two.fuser_method == SequentialFuser(nn.Sequential)
    linear, relu = nn.Linear(1, 1), nn.ReLU()
    assert two.fuser_method is not None
    assert list(two.fuser_method(False, linear, relu)) == [linear, relu]
    assert three.fuser_method is not None
    called = three.fuser_method(True, "conv", "bn", "relu")
    assert called == (True, "relu", ("bn", "conv"))  # what a fuser of 1.13 was called with


def test_the_derived_fuser_is_the_users_own() -> None:
    mapping = get_fuser_method_mapping(BackendConfig.from_dict(OLD, version="1.13"))
    assert mapping[(nn.ReLU, (nn.BatchNorm2d, nn.Conv2d))] is _fuse
    assert mapping[(nn.ReLU, nn.Linear)] == reverse_sequential_wrapper2(nn.Sequential)


def test_fields_that_only_1_13_has_act() -> None:
    *_, size, sigmoid = BackendConfig.from_dict(OLD, version="1.13").configs
    assert size.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED
    assert size.to_dict()["input_output_observed"] is False
    assert sigmoid._overwrite_output_observer is _observer
    assert sigmoid._overwrite_output_fake_quantize is _observer


def test_what_was_read_survives_in_the_current_form() -> None:
    backend = BackendConfig.from_dict(OLD, version="1.13")
    assert BackendConfig.from_dict(backend.to_dict()) == backend


def test_entries_that_are_objects_are_read_in_the_old_form_too() -> None:
    entry = BackendPatternConfig((nn.ReLU, nn.Linear)).set_fuser_method(_fuse)
    backend = BackendConfig.from_dict({"configs": [entry]}, version="1.13")
    assert backend.configs[0].pattern == (nn.Linear, nn.ReLU)
    assert entry.pattern == (nn.ReLU, nn.Linear)


def test_without_the_version_the_tuple_is_a_forward_one() -> None:
    entry = {"pattern": (nn.ReLU, nn.Linear)}
    assert BackendPatternConfig.from_dict(entry).pattern == (nn.ReLU, nn.Linear)
    assert BackendPatternConfig.from_dict(entry, version="1.13").pattern == (nn.Linear, nn.ReLU)


def test_flat_triple_is_two_arguments() -> None:
    entry = {"pattern": (torch.add, nn.ReLU, nn.Conv2d)}
    config = BackendPatternConfig.from_dict(entry, version="1.13")
    assert config.pattern is None
    assert config.normal_pattern.anchor.inputs == (0, 1)


def test_the_dict_passed_in_is_left_alone() -> None:
    entry = {"pattern": (nn.ReLU, nn.Linear), "fuser_method": _fuse}
    upgrade(entry, "1.13")
    assert entry == {"pattern": (nn.ReLU, nn.Linear), "fuser_method": _fuse}


def test_refusals() -> None:
    with pytest.raises(SpecError) as version:
        BackendConfig.from_dict({"configs": [{"pattern": "add"}]}, version="1.12")
    assert version.value.what == "no dicts of version '1.12' are known"
    assert version.value.where == "configs[0].version"
    with pytest.raises(SpecError, match=r"an entry of version 1\.13 must contain 'pattern'"):
        BackendPatternConfig.from_dict({"root_module": nn.Linear}, version="1.13")
