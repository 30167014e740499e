"""Which module becomes which in eager mode."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

import backquant.nn.intrinsic as nni
import backquant.nn.intrinsic.qat as nniqat
import backquant.nn.intrinsic.quantized as nniq
from backquant.nn import qat, quantizable, quantized
from backquant.nn.quantizable.slots import FloatFunctional
from backquant.nn.quantized import composed, dynamic, functional_modules, reference
from backquant.nn.stubs import DeQuantStub, QuantStub
from backquant.observe import (
    default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
)

_Table = dict[Any, Any]
_RANKS = (1, 2, 3)
_CONVS = tuple(f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in _RANKS)

_STUBS: _Table = {
    QuantStub: functional_modules.Quantize,
    DeQuantStub: functional_modules.DeQuantize,
}
DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: _Table = {
    **_STUBS,
    **{
        getattr(nn, name): getattr(quantized, name)
        for name in (
            *("Linear", *_CONVS, "BatchNorm2d", "BatchNorm3d", "Dropout", "ELU", "GroupNorm"),
            *("Hardswish", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm"),
            *("LeakyReLU", "PReLU"),
        )
    },
    nn.modules.linear.NonDynamicallyQuantizableLinear: quantized.Linear,
    nn.Embedding: dynamic.Embedding,
    nn.EmbeddingBag: dynamic.EmbeddingBag,
    FloatFunctional: functional_modules.QFunctional,
    **{getattr(nni, name): getattr(nniq, name) for name in nniq.__all__},
    **{getattr(nniqat, f"ConvBn{n}d"): getattr(quantized, f"Conv{n}d") for n in _RANKS},
    **{getattr(nniqat, f"ConvBnReLU{n}d"): getattr(nniq, f"ConvReLU{n}d") for n in _RANKS},
    **{getattr(nniqat, f"ConvReLU{n}d"): getattr(nniq, f"ConvReLU{n}d") for n in _RANKS},
    **{getattr(qat, f"Conv{n}d"): getattr(quantized, f"Conv{n}d") for n in _RANKS},
    nniqat.LinearReLU: nniq.LinearReLU,
    nniqat.LinearBn1d: quantized.Linear,
    qat.Linear: quantized.Linear,
}
DEFAULT_REFERENCE_STATIC_QUANT_MODULE_MAPPINGS: _Table = {
    **_STUBS,
    **{getattr(nn, name): getattr(reference, name) for name in ("Linear", *_CONVS)},
    nn.Embedding: reference.Embedding,
    nn.EmbeddingBag: reference.EmbeddingBag,
}
DEFAULT_QAT_MODULE_MAPPINGS: _Table = {
    **{getattr(nn, name): getattr(qat, name) for name in ("Linear", "Conv2d", "Conv3d")},
    nn.modules.linear.NonDynamicallyQuantizableLinear: qat.Linear,
    **{
        getattr(nni, name): getattr(nniqat, name)
        for name in nniqat.__all__
        if name[0].isupper() and name != "ConvReLU1d"
    },
}
#: Results with a range that is known: the observer.
FIXED: _Table = {
    **dict.fromkeys(
        (nn.Hardsigmoid, nn.Sigmoid, nn.Softmax), default_fixed_qparams_range_0to1_fake_quant
    ),
    nn.Tanh: default_fixed_qparams_range_neg1to1_fake_quant,
}
_CUSTOM = ("LSTM", "MultiheadAttention")


_BY_NAME = {kind.__name__: kind for kind in (QuantStub, DeQuantStub, FloatFunctional)}


def type_of(module: nn.Module) -> Any:
    """The class of ``module``; ours for a marker of PyTorch's, which older paths such as
    ``torch.nn.quantized.FloatFunctional`` still give.

    >>> type_of(nn.Linear(1, 1)).__name__
    'Linear'
    """
    kind = type_before_parametrizations(module)
    return _BY_NAME.get(kind.__name__, kind) if kind.__module__.startswith("torch.ao.") else kind


def static_module_mappings(is_reference: bool) -> _Table:
    """The default of ``convert``."""
    if is_reference:
        return get_default_static_quant_reference_module_mappings()
    return get_default_static_quant_module_mappings()


def get_default_static_quant_module_mappings() -> _Table:
    """From float and QAT classes to quantized ones.

    >>> get_default_static_quant_module_mappings()[nn.Linear] is quantized.Linear
    True
    """
    return dict(DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)


def get_default_static_quant_reference_module_mappings() -> _Table:
    """From float classes to reference classes."""
    return dict(DEFAULT_REFERENCE_STATIC_QUANT_MODULE_MAPPINGS)


def get_embedding_static_quant_module_mappings() -> _Table:
    """The same as for static quantization, and embeddings that were trained."""
    trained = {qat.Embedding: dynamic.Embedding, qat.EmbeddingBag: dynamic.EmbeddingBag}
    return {**DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, **trained}


def get_default_qat_module_mappings() -> _Table:
    """From float classes to those that train."""
    return dict(DEFAULT_QAT_MODULE_MAPPINGS)


def get_embedding_qat_module_mappings() -> _Table:
    """The same, and embeddings."""
    embeddings = {nn.Embedding: qat.Embedding, nn.EmbeddingBag: qat.EmbeddingBag}
    return {**DEFAULT_QAT_MODULE_MAPPINGS, **embeddings}


def get_default_qconfig_propagation_list() -> set[Any]:
    """The classes that ``prepare`` observes."""
    tables = DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, DEFAULT_QAT_MODULE_MAPPINGS
    return {nn.Sequential, *tables[0], *tables[1]}


def get_default_custom_config_dict() -> dict[str, _Table]:
    """LSTMs and attention, whose inside is observed."""
    return {
        "float_to_observed_custom_module_class": {
            getattr(nn, name): getattr(quantizable, name) for name in _CUSTOM
        },
        "observed_to_quantized_custom_module_class": {
            getattr(quantizable, name): getattr(composed, name) for name in _CUSTOM
        },
    }


def no_observer_set() -> set[Any]:
    """The classes that observe their own results."""
    return {getattr(quantizable, name) for name in _CUSTOM}
