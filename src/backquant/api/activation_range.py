"""How many bits activations get when the user asks for nothing: 8 where the engine sums products of
8 bits without saturation on this CPU, 7 where it does not.

``get_default_qconfig_mapping`` stays PyTorch's; this is the choice of ``quantize`` and ``explain``.

Source: oneDNN developer guide, "Nuances of int8 computations": without VNNI two products of 8 bits
are summed in 16 bits, which saturates unless one factor has 7 bits.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from backquant.api.arguments import Backend, resolve_backend
from backquant.backend_config import BackendConfig, QuantDefault
from backquant.dtypes import quantize_bounds
from backquant.lower import EngineInfo, engine_info
from backquant.qconfig import QConfigMapping, get_default_qconfig_mapping

__all__ = ["default_mapping", "mapping_on_engine"]


def default_mapping(backend: Backend = "x86") -> QConfigMapping:
    """What ``quantize`` asks for on this machine when no mapping is passed, to be changed in part.

    It is ``get_default_qconfig_mapping(backend)`` with the range of activations that the engine here sums
    without saturation. Raises ``UsageError`` and ``BackendNotFoundError`` as ``quantize`` does.

    >>> import torch
    >>> from torch import nn
    >>> from backquant import quantize
    >>> mapping = default_mapping("x86").set_module_name("1", None)
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> report = quantize(model, calibration=[torch.randn(8, 4)], qconfig_mapping=mapping).report
    >>> [(row.node, row.outcome) for row in report.rows]
    [('_0', 'quantized'), ('_1', 'float')]
    """
    config = resolve_backend(backend)
    engine = None if config.engine is None else engine_info(config.engine)
    return mapping_on_engine(config, engine)[0]


def mapping_on_engine(
    config: BackendConfig, engine: EngineInfo | None
) -> tuple[QConfigMapping, tuple[str, ...]]:
    """What is asked for by default on this engine, and a note that says which range it is.

    The backend's own default is kept where it does not measure unsigned 8-bit activations in a range
    that it leaves open, where the backend's entries admit no other range, and without an engine.

    >>> from backquant.backend_config import get_backend_config
    >>> from backquant.lower import engine_info
    >>> mapping, (note,) = mapping_on_engine(get_backend_config("qnnpack"), engine_info("qnnpack"))
    >>> mapping.global_qconfig.activation, note[:25]
    (HistogramObserver.with_args(reduce_range=False), 'activations take 8 bits: ')
    """
    if engine is None or config.defaults is None or not _is_open(config.defaults.activation):
        return get_default_qconfig_mapping(config), ()
    reason = narrow_because(engine)
    reduced = bool(reason)
    if not reduced and not _admits(config, quantize_bounds(torch.quint8)):
        return get_default_qconfig_mapping(config), ()
    asked = replace(config.defaults.activation, reduce_range=reduced)
    changed = copy.copy(config).set_defaults(replace(config.defaults, activation=asked))
    wide = f"{engine.name} on {engine.isa} sums products of 8 bits without saturation"
    note = f"activations take {7 if reduced else 8} bits: {reason or wide}"
    return get_default_qconfig_mapping(changed), (note,)


def narrow_because(engine: EngineInfo) -> str:
    """Why 8-bit activations may saturate; empty if they cannot.

    >>> from backquant.lower import engine_info
    >>> narrow_because(engine_info("qnnpack"))
    ''
    """
    if not engine.wide_accumulation:
        return f"{engine.isa} has no VNNI, and two products of 8 bits may saturate"
    if not engine.wide_depthwise:
        return f"{engine.name}'s depthwise kernels sum products in 16 bits"
    return ""


def _is_open(activation: QuantDefault) -> bool:
    """Whether the range is the whole or the reduced one of quint8, with nothing said of bounds."""
    unsigned = activation.dtype in (None, torch.quint8)
    return unsigned and activation.quant_min is None and activation.reduce_range is not None


def _admits(config: BackendConfig, bounds: tuple[int, int]) -> bool:
    """Whether no entry limits unsigned activations to less than ``bounds``."""
    for entry in config.configs:
        for dtypes in entry.dtype_configs:
            asked = dtypes.input_dtype_with_constraints
            if asked.dtype is not torch.quint8:
                continue
            low, high = asked.quant_min_lower_bound, asked.quant_max_upper_bound
            if (low is not None and low > bounds[0]) or (high is not None and high < bounds[1]):
                return False
    return True
