"""Mappings derived from a description, with the keys and the order of PyTorch's.

Keys are patterns as reversed nested tuples, or ``GraphPattern``s. Values are those of the entries, not
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.fusers import Fuser, in_reversed_order
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.pattern import NormalPattern, Pattern
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.errors import SpecError

__all__ = [
    "get_fused_module_classes",
    "get_fuser_method_mapping",
    "get_fusion_pattern_to_extra_inputs_getter",
    "get_fusion_pattern_to_root_node_getter",
    "get_module_to_qat_module",
    "get_pattern_to_dtype_configs",
    "get_pattern_to_input_type_to_index",
    "get_qat_module_classes",
    "get_root_module_to_quantized_reference_module",
]

_Module = type[torch.nn.Module]
_Value = TypeVar("_Value")


def get_pattern_to_dtype_configs(backend_config: BackendConfig) -> dict[Pattern, list[DTypeConfig]]:
    """The admitted dtype combinations of every pattern.

    >>> add = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(torch.quint8))
    >>> backend = BackendConfig().set_backend_pattern_config(add)
    >>> get_pattern_to_dtype_configs(backend)[torch.add]
    [DTypeConfig(input_dtype=torch.quint8)]
    """
    by_pattern = backend_config._pattern_complex_format_to_config
    return {pattern: config.dtype_configs for pattern, config in by_pattern.items()}


def get_qat_module_classes(backend_config: BackendConfig) -> tuple[_Module, ...]:
    """The modules that training uses, each once, in the order of the entries.

    >>> from backquant.backend_config import get_backend_config
    >>> get_qat_module_classes(get_backend_config("qnnpack"))[0]
    <class 'backquant.nn.qat.conv.Conv1d'>
    """
    return _distinct(config.qat_module for config in backend_config.shared_configs)


def get_fused_module_classes(backend_config: BackendConfig) -> tuple[_Module, ...]:
    """The modules that patterns are fused into, each once, in the order of the entries.

    >>> from backquant.backend_config import get_backend_config
    >>> get_fused_module_classes(get_backend_config("qnnpack"))[0]
    <class 'backquant.nn.intrinsic.fused.ConvReLU1d'>
    """
    return _distinct(config.fused_module for config in backend_config.shared_configs)


def get_pattern_to_input_type_to_index(
    backend_config: BackendConfig,
) -> dict[Pattern, dict[str, int]]:
    """Argument positions of weight and bias of every pattern; empty where the spec names none.

    >>> entry = BackendPatternConfig(torch.nn.functional.linear)
    >>> entry = entry._set_input_type_to_index({"weight": 1})
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_pattern_to_input_type_to_index(backend)[torch.nn.functional.linear]
    {'weight': 1}
    """
    by_pattern = backend_config._pattern_complex_format_to_config
    return {pattern: config._input_type_to_index for pattern, config in by_pattern.items()}


def get_root_module_to_quantized_reference_module(
    backend_config: BackendConfig,
) -> dict[_Module, _Module]:
    """Root module → reference module, of the entries that name both; the last entry decides.

    >>> from backquant.backend_config import get_backend_config
    >>> get_root_module_to_quantized_reference_module(get_backend_config("qnnpack"))[torch.nn.Linear]
    <class 'backquant.nn.quantized.reference.linear.Linear'>
    """
    mapping: dict[_Module, _Module] = {}
    for config in backend_config.shared_configs:
        root, reference = config.root_module, config.reference_quantized_module
        if root is not None and reference is not None:
            mapping[root] = reference
    return mapping


def get_fuser_method_mapping(backend_config: BackendConfig) -> dict[Pattern, Fuser]:
    """Pattern → fuser, where there is one; it takes its modules in the order of the key.

    Raises ``SpecError`` for a fuser on a single operator: there is nothing to fuse.

    >>> from backquant.backend_config import SequentialFuser
    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))
    >>> entry = entry.set_fuser_method(SequentialFuser(torch.nn.Sequential))
    >>> mapping = get_fuser_method_mapping(BackendConfig().set_backend_pattern_config(entry))
    >>> mapping[(torch.nn.ReLU, torch.nn.Linear)](False, torch.nn.ReLU(), torch.nn.Linear(1, 1))[1]
    ReLU()
    """
    mapping: dict[Pattern, Fuser] = {}
    for pattern, config in backend_config._pattern_complex_format_to_config.items():
        if config.fuser_method is None:
            continue
        if config.pattern is None or isinstance(config.pattern, (GraphPattern, NormalPattern)):
            mapping[pattern] = config.fuser_method
        elif isinstance(config.pattern, tuple):
            mapping[pattern] = in_reversed_order(config.fuser_method)
        else:
            raise SpecError(
                f"{config.normal_pattern} is a single operator and has a fuser",
                where="fuser_method",
                fix="set the fuser on the tuple pattern that it fuses",
            )
    return mapping


def get_module_to_qat_module(backend_config: BackendConfig) -> dict[Pattern, _Module]:
    """Pattern → the module that training uses, where there is one.

    >>> entry = BackendPatternConfig(torch.nn.Linear).set_qat_module(torch.nn.Linear)
    >>> len(get_module_to_qat_module(BackendConfig().set_backend_pattern_config(entry)))
    1
    """
    return _field_by_pattern(backend_config, lambda config: config.qat_module)


def get_fusion_pattern_to_root_node_getter(
    backend_config: BackendConfig,
) -> dict[Pattern, Callable[..., Any]]:
    """Pattern → ``f(node pattern) -> node`` that finds the root, where the entry names one.

    The node pattern is shaped like the key, with nodes for operators. Without a getter, the root is
    the last item of the innermost last tuple.

    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))._set_root_node_getter(len)
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_fusion_pattern_to_root_node_getter(backend)[(torch.nn.ReLU, torch.nn.Linear)]
    <built-in function len>
    """
    return _field_by_pattern(backend_config, lambda config: config._root_node_getter)


def get_fusion_pattern_to_extra_inputs_getter(
    backend_config: BackendConfig,
) -> dict[Pattern, Callable[..., Any]]:
    """Pattern → ``f(node pattern) -> nodes``: the nodes that become further inputs of the fused module.

    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))._set_extra_inputs_getter(len)
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_fusion_pattern_to_extra_inputs_getter(backend)[(torch.nn.ReLU, torch.nn.Linear)]
    <built-in function len>
    """
    return _field_by_pattern(backend_config, lambda config: config._extra_inputs_getter)


def _field_by_pattern(
    backend_config: BackendConfig, field: Callable[[BackendPatternConfig], _Value | None]
) -> dict[Pattern, _Value]:
    """Pattern → value of a field, where it is set."""
    mapping: dict[Pattern, _Value] = {}
    for pattern, config in backend_config._pattern_complex_format_to_config.items():
        value = field(config)
        if value is not None:
            mapping[pattern] = value
    return mapping


def _distinct(classes: Iterable[_Module | None]) -> tuple[_Module, ...]:
    return tuple(dict.fromkeys(cls for cls in classes if cls is not None))
