from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    get_backend_config,
    list_backends,
)
from backquant.errors import ConfigError, UnknownBackendError
from backquant.observe import FixedQParamsFakeQuantize, FixedQParamsObserver
from backquant.qconfig import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)

PYTORCHS = ["fbgemm", "x86", "qnnpack", "onednn"]


@pytest.mark.parametrize("backend", PYTORCHS)
def test_for_calibration_they_equal_the_oracles(
    backend: str,
    oracle: Callable[..., Any],
    assert_same_mapping: Callable[[Any, Any], None],
    assert_same_qconfig: Callable[[Any, Any], None],
) -> None:
    assert_same_qconfig(get_default_qconfig(backend), oracle("get_default_qconfig", backend))
    assert_same_mapping(
        get_default_qconfig_mapping(backend), oracle("get_default_qconfig_mapping", backend)
    )


@pytest.mark.parametrize("backend", PYTORCHS)
@pytest.mark.parametrize("version", [0, 1])
def test_for_training_they_equal_the_oracles(
    backend: str,
    version: int,
    oracle: Callable[..., Any],
    assert_same_mapping: Callable[[Any, Any], None],
    assert_same_qconfig: Callable[[Any, Any], None],
) -> None:
    ours, theirs = (
        get_default_qat_qconfig(backend, version),
        oracle("get_default_qat_qconfig", backend, version),
    )
    assert_same_qconfig(ours, theirs)
    assert_same_mapping(
        get_default_qat_qconfig_mapping(backend, version),
        oracle("get_default_qat_qconfig_mapping", backend, version),
    )


def test_the_default_backend_is_the_oracles(assert_same_mapping: Any, oracle: Any) -> None:
    assert_same_mapping(get_default_qconfig_mapping(), oracle("get_default_qconfig_mapping"))
    assert_same_mapping(
        get_default_qat_qconfig_mapping(), oracle("get_default_qat_qconfig_mapping")
    )


def test_a_backend_is_a_name_a_file_or_a_description(tmp_path: Path) -> None:
    config = get_backend_config("qnnpack")
    config.save(tmp_path / "mine.yaml")
    expected = get_default_qconfig_mapping("qnnpack")
    assert get_default_qconfig_mapping(config) == expected
    assert get_default_qconfig_mapping(tmp_path / "mine.yaml") == expected
    assert get_default_qconfig_mapping(str(tmp_path / "mine.yaml")) == expected


#: There is no fake quantize for 8-bit floats, nor for groups.
WITHOUT_TRAINING = (
    "tensorrt_fp8",
    "x86_lowbit",
    "compressed_tensors",
    "gptq",
    "awq",
    "mlx",
    "torchao",
    "gguf",
)


@pytest.mark.parametrize("backend", list_backends())
def test_every_backend_has_both_mappings(backend: str) -> None:
    getters = [get_default_qconfig_mapping, get_default_qat_qconfig_mapping]
    if backend in WITHOUT_TRAINING:
        with pytest.raises(ConfigError, match="names no defaults for training"):
            getters.pop()(backend)
    for getter in getters:
        for rule in getter(backend).rules():
            rule.qconfig.activation()
            rule.qconfig.weight()


def test_defaults_written_by_hand_lead_to_the_oracles_mapping(
    fbgemm_defaults: Any, assert_same_mapping: Callable[[Any, Any], None], oracle: Any
) -> None:
    config = get_backend_config("fbgemm").set_defaults(fbgemm_defaults)
    assert_same_mapping(
        get_default_qconfig_mapping(config), oracle("get_default_qconfig_mapping", "fbgemm")
    )
    with pytest.raises(ConfigError, match="no defaults for training"):
        get_default_qat_qconfig_mapping(config)


def _fixed(*dtypes: torch.dtype, **bounds: Any) -> BackendPatternConfig:
    entry = BackendPatternConfig(nn.Sigmoid)
    for dtype in dtypes:
        output = DTypeWithConstraints(
            dtype, scale_exact_match=1 / 128, zero_point_exact_match=-3, **bounds
        )
        entry.add_dtype_config(DTypeConfig(output, output))
    return entry


@pytest.mark.parametrize(
    ("asked", "offered", "chosen"),
    [
        (torch.qint8, (torch.quint8, torch.qint8), torch.qint8),
        (torch.quint8, (torch.quint8, torch.qint8), torch.quint8),
        (torch.quint8, (torch.qint8,), torch.qint8),
    ],
)
def test_fixed_qparams_come_from_the_entries(
    asked: torch.dtype, offered: tuple[torch.dtype, ...], chosen: torch.dtype, fbgemm_defaults: Any
) -> None:
    activation = dataclasses.replace(fbgemm_defaults.activation, dtype=asked)
    config = (
        BackendConfig("mine")
        .set_backend_pattern_config(_fixed(*offered))
        .set_defaults(dataclasses.replace(fbgemm_defaults, activation=activation))
    )
    observer = get_default_qconfig_mapping(config).object_type_qconfigs[nn.Sigmoid].activation()
    assert isinstance(observer, FixedQParamsObserver)
    assert observer.dtype == chosen
    assert [t.item() for t in observer.calculate_qparams()] == [1 / 128, -3]
    full = (-128, 127) if chosen == torch.qint8 else (0, 255)
    assert (observer.quant_min, observer.quant_max) == full


def test_fixed_qparams_keep_the_bounds_of_the_entry_also_for_training() -> None:
    entry = _fixed(torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=120)
    config = get_backend_config("x86").set_backend_pattern_config(entry)
    fake = get_default_qat_qconfig_mapping(config).object_type_qconfigs[nn.Sigmoid].activation()
    assert isinstance(fake, FixedQParamsFakeQuantize)
    assert (fake.quant_min, fake.quant_max) == (-127, 120)


@pytest.mark.parametrize("function", [get_default_qconfig, get_default_qconfig_mapping])
def test_other_versions_and_names_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no version 1"):
        function("x86", 1)
    with pytest.raises(UnknownBackendError, match="did you mean"):
        function("qnnpak")


@pytest.mark.parametrize("function", [get_default_qat_qconfig, get_default_qat_qconfig_mapping])
def test_other_versions_of_training_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="version=0 or 1"):
        function("x86", 2)


def test_a_backend_that_is_no_name_is_refused() -> None:
    for get in (get_default_qconfig, get_default_qat_qconfig, get_default_qconfig_mapping):
        with pytest.raises(UnknownBackendError, match="of type int is not supported"):
            get(3)  # type: ignore[operator]
        with pytest.raises(AssertionError, match="'imaginary' is not supported"):  # as PyTorch
            get("imaginary")
