"""Helpers of the differential tests: qparams for a weight, and the QConfig that the oracle trains with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Qparams = dict[str, Any]


def make_qparams(weight: torch.Tensor, kind: str, axis: int = 0) -> Qparams:
    """Qparams that fit ``weight``, so that a few values saturate."""
    generator = torch.Generator().manual_seed(weight.numel())
    channels = weight.shape[axis]
    spread = float(weight.detach().abs().max()) / 110
    scales = spread * (0.5 + torch.rand(channels, generator=generator))
    if kind == "per_tensor_symmetric":
        return {
            "qscheme": torch.per_tensor_affine,
            "dtype": torch.qint8,
            "scale": torch.tensor([spread]),
            "zero_point": torch.tensor([0]),
            "quant_min": -128,
            "quant_max": 127,
        }
    if kind == "per_tensor_affine":
        return {
            "qscheme": torch.per_tensor_affine,
            "dtype": torch.quint8,
            "scale": spread,
            "zero_point": 121,
        }
    if kind == "per_channel_symmetric":
        return {
            "qscheme": torch.per_channel_affine,
            "dtype": torch.qint8,
            "scale": scales,
            "zero_point": torch.zeros(channels, dtype=torch.int64),
            "axis": axis,
        }
    if kind == "per_channel_affine":
        return {
            "qscheme": torch.per_channel_affine,
            "dtype": torch.quint8,
            "scale": scales,
            "zero_point": torch.randint(90, 150, (channels,), generator=generator),
            "axis": axis,
        }
    if kind == "int32":
        return {
            "qscheme": torch.per_tensor_affine,
            "dtype": torch.qint32,
            "scale": 1e-6,
            "zero_point": 3,
        }
    bits = {"float_qparams": (torch.quint8, 255), "float_qparams_4bit": (torch.quint4x2, 15)}
    dtype, top = bits[kind]
    low, high = weight.detach().amin(1), weight.detach().amax(1)
    scale = torch.where(high > low, (high - low) / top, torch.ones_like(low))
    return {
        "qscheme": torch.per_channel_affine_float_qparams,
        "dtype": dtype,
        "scale": scale,
        "zero_point": -low / scale,
        "axis": 0,
    }


@pytest.fixture
def qparams() -> Callable[..., Qparams]:
    """``qparams(weight, kind, axis)``; kinds as in ``make_qparams``."""
    return make_qparams


@pytest.fixture
def qat_qconfig() -> Any:
    """PyTorch's own QAT QConfig: a user's fake-quantizers by protocol, and the oracle's numbers."""
    from torch.ao.quantization import get_default_qat_qconfig

    return get_default_qat_qconfig("x86")


@pytest.fixture
def embedding_qconfig() -> Any:
    """PyTorch's QConfig for embeddings in training."""
    from torch.ao.quantization import QConfig
    from torch.ao.quantization.fake_quantize import default_embedding_fake_quant
    from torch.ao.quantization.observer import NoopObserver

    return QConfig(activation=NoopObserver, weight=default_embedding_fake_quant)


@pytest.fixture
def own_qat_qconfig() -> Any:
    """A QAT QConfig of backquant's fake-quantizers."""
    from types import SimpleNamespace

    from backquant.observe import FakeQuantize, MovingAverageMinMaxObserver

    return SimpleNamespace(
        activation=FakeQuantize.with_args(observer=MovingAverageMinMaxObserver),
        weight=FakeQuantize.with_args(
            observer=MovingAverageMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        ),
    )
