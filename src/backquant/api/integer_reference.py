"""``convert_to_integer_reference``: a prepared model in integers only, as the description says."""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.api.arguments import given_conversion
from backquant.backend_config import BackendConfig
from backquant.convert import convert_to_reference
from backquant.pipeline.capture import spelled_request
from backquant.pipeline.lower import quantized_model
from backquant.qconfig import ConvertCustomConfig, QConfigMapping
from backquant.runtime import QuantizedModel

_ENGINE = "integer_reference"


def convert_to_integer_reference(
    graph_module: fx.GraphModule,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> QuantizedModel:
    """The integer reference of a calibrated model, with which a chip's simulator is compared.

    Operators exchange integer tensors and give the same bits on every machine: sums are exact, biases are
    integers with the scale input × weight scale, results are made by the requantization and the rounding of
    the description, and functions of one value are tables. Dynamically quantized operators take floats and
    quantize them at each call; operators that stay float run between dequantize and quantize nodes.
    docs/vendors.md says what each operator computes.

    Args:
        graph_module: from ``prepare_fx``, ``prepare_export`` or ``prepare_qat_fx``; it is not changed.
        convert_custom_config, qconfig_mapping, backend_config: as in ``convert_fx``.

    Raises:
        EngineError: an operator is quantized in a way for which there is no integer arithmetic (to
            float16 or 8-bit floats, weights alone, recurrent layers); names it.
        UsageError, ConfigError: as in ``convert_fx``.

    >>> import torch
    >>> from backquant.api.flow import prepare_fx
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid()).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(16, 4))
    >>> [use.kernel for use in convert_to_integer_reference(prepared).kernels]
    ['integer.linear', 'integer.table(sigmoid)']
    """
    request = given_conversion(
        convert_custom_config, qconfig_mapping, backend_config, remove_qconfig=True
    )
    request = spelled_request(graph_module, request)
    reference = convert_to_reference(graph_module, request=request)
    return quantized_model(reference, graph_module, _ENGINE)
