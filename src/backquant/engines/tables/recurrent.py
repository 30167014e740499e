"""LSTM and GRU layers and recurrent cells that are quantized at each call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from backquant.dtypes import dtype_name
from backquant.engines.tables.dynamic import check_dynamic, reduces_range
from backquant.engines.tables.torch_kernels import TorchKernels
from backquant.lower.dynamic import DynamicInput, dynamic_input
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.recurrent import (
    CellConfig,
    QuantizedCell,
    QuantizedRecurrent,
    RecurrentConfig,
)
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import GRU, LSTM, GRUCell, LSTMCell, RNNCell
from backquant.reason_codes import ReasonCode

_LAYERS: dict[Any, str] = {LSTM: "lstm", GRU: "gru"}
_PARTS = ("", "_scale", "_zero_point")
_CELLS: dict[Any, str] = {LSTMCell: "lstm", GRUCell: "gru", RNNCell: "rnn"}


def recurrent_rules(kernels: TorchKernels) -> list[LowerRule]:
    """Rules for layers and cells.

    >>> [rule.name for rule in recurrent_rules(TorchKernels("fbgemm"))]
    ['recurrent layer', 'recurrent cell']
    """
    return [
        LowerRule("recurrent layer", (tuple(_LAYERS),), partial(_layer, kernels)),
        LowerRule("recurrent cell", (tuple(_CELLS),), partial(_cell, kernels)),
    ]


def _layer(kernels: TorchKernels, site: Site) -> Emit | Reason:
    module: Any = site.module
    refused = _check_layer(site, module)
    x = dynamic_input(site.node.args[0]) if site.node.args else None
    refused = refused or _check_weights(kernels, site, x, module)
    if refused:
        return refused
    config = RecurrentConfig(
        _LAYERS[type(module)],
        kernels.engine,
        _weight_dtype(module),
        module.hidden_size,
        module.num_layers,
        module.batch_first,
        module.bidirectional,
        reduces_range(x, kernels.reduces_modules),
    )
    return _emit(site, QuantizedRecurrent(config, _tensors(module)), x)


def _cell(kernels: TorchKernels, site: Site) -> Emit | Reason:
    module: Any = site.module
    x = dynamic_input(site.node.args[0]) if site.node.args else None
    refused = _check_weights(kernels, site, x, module)
    if refused:
        return refused
    kind = _CELLS[type(module)]
    if kind == "rnn":
        kind = f"rnn_{module.nonlinearity}"
    config = CellConfig(kind, kernels.engine, _weight_dtype(module), module.hidden_size)
    return _emit(site, QuantizedCell(config, _tensors(module)), x)


def _emit(site: Site, kernel: QuantizedRecurrent | QuantizedCell, x: DynamicInput | None) -> Emit:
    args = site.node.args if x is None else (x.source, *site.node.args[1:])
    return Emit(kernel, args, kernel.name, None, site.node.kwargs, each_item=True)


def _check_layer(site: Site, module: Any) -> Reason | None:
    if module.proj_size:
        return site.refuse(ReasonCode.PROJ_SIZE, f"proj_size={module.proj_size}", "no projection")
    if module.training and module.dropout:
        return site.refuse(
            ReasonCode.TRAINING, "dropout in training mode", "evaluation mode: model.eval()"
        )
    return None


def _check_weights(
    kernels: TorchKernels, site: Site, x: DynamicInput | None, module: Any
) -> Reason | None:
    dtypes = {getattr(module, name).dtype for name in module.weight_names}
    if len(dtypes) > 1:
        asked = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        return site.refuse(ReasonCode.DTYPES, f"weights {asked}", "one dtype for all weights")
    for name in module.weight_names:
        integers, scale, zero_point = (getattr(module, name + part) for part in _PARTS)
        weight = WeightTensors(integers, scale, zero_point, None)
        refused = check_dynamic(kernels, site, x, weight, getattr(module, f"{name}_axis"))
        if refused:
            return refused
    return None


def _weight_dtype(module: Any) -> torch.dtype:
    weight: torch.Tensor = getattr(module, module.weight_names[0])
    return weight.dtype


def _tensors(module: Any) -> dict[str, torch.Tensor | None]:
    """Weights with their qparams, and biases, by the float module's names."""
    found: dict[str, torch.Tensor | None] = {}
    for name in module.weight_names:
        found[name] = getattr(module, name)
        for part in _PARTS[1:]:
            found[name + part] = getattr(module, name + part).reshape(-1)
        bias = name.replace("weight", "bias", 1)
        found[bias] = getattr(module, bias, None)
    return found
