"""PyTorch's own descriptions as the oracle, and strategies for patterns."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
)

ORACLE_BACKENDS = {
    "native": ("native", "get_native_backend_config"),
    "fbgemm": ("fbgemm", "get_fbgemm_backend_config"),
    "qnnpack": ("qnnpack", "get_qnnpack_backend_config"),
    "x86": ("x86", "get_x86_backend_config"),
    "onednn": ("onednn", "get_onednn_backend_config"),
    "tensorrt": ("tensorrt", "get_tensorrt_backend_config"),
    "executorch": ("executorch", "get_executorch_backend_config"),
    "qnnpack_pt2e": ("_qnnpack_pt2e", "get_qnnpack_pt2e_backend_config"),
}


def oracle_backend(name: str) -> Any:
    """A BackendConfig of PyTorch."""
    importlib.import_module("torch.ao.quantization")
    module, function = ORACLE_BACKENDS[name]
    found = importlib.import_module(f"torch.ao.quantization.backend_config.{module}")
    return getattr(found, function)()


def translate(value: Any) -> Any:
    """A value of a dict of PyTorch's, with its classes replaced by ours."""
    kind = type(value).__name__
    if kind == "ObservationType":
        return ObservationType[value.name]
    if kind == "DTypeWithConstraints":
        return DTypeWithConstraints(**vars(value))
    if isinstance(value, type) and value.__name__ == "MatchAllNode":
        return MatchAllNode
    if isinstance(value, dict):
        return {key: translate(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(translate(item) for item in value)
    return value


@pytest.fixture(params=list(ORACLE_BACKENDS))
def oracle(request: pytest.FixtureRequest) -> Any:
    """Each of PyTorch's eight backends."""
    return oracle_backend(request.param)


@pytest.fixture
def to_ours() -> Callable[[Any], BackendConfig]:
    """PyTorch's BackendConfig, through its dict, as ours."""
    return lambda config: BackendConfig.from_dict(translate(config.to_dict()))


@pytest.fixture
def translated() -> Callable[[Any], Any]:
    return translate


@pytest.fixture
def full_entry() -> Callable[[], BackendPatternConfig]:
    """An entry with every field of PyTorch 2.x set."""
    return _full_entry


def _full_entry() -> BackendPatternConfig:
    import torch
    from torch import nn

    shares = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return (
        BackendPatternConfig((nn.Linear, nn.ReLU))
        .set_observation_type(shares)
        .add_dtype_config(DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float, True))
        .set_root_module(nn.Linear)
        .set_qat_module(nn.Bilinear)
        .set_reference_quantized_module(nn.Identity)
        .set_fused_module(nn.Sequential)
        .set_fuser_method(len)
        ._set_root_node_getter(max)
        ._set_extra_inputs_getter(min)
        ._set_num_tensor_args_to_observation_type({1: shares})
        ._set_input_type_to_index({"weight": 1, "bias": 2})
    )
