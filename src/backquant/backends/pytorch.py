"""PyTorch's own backend configs, entry by entry: what ``backquant.ao`` gives by PyTorch's names.

They are ours, with engine and defaults, but for what differs:

1. PyTorch has no conditions, tolerances, symmetric ranges or steps of biases, and no grouped matrix products;
2. beside a number, an operator of two tensors has the qparams of its input, whatever range it gives;
3. it has entries for ``floordiv`` and ``resize_``, which no kernel keeps;
4. some of its backends claim other dtypes for some operators, where ours are corrected: ``_x86`` and so on.

An operator without a kernel runs in the reference model's arithmetic.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    get_backend_config,
)
from backquant.operators import (
    conv,
    elementwise,
    embedding,
    fixed_qparams,
    grouped,
    linear,
    recurrent,
    shape,
)
from backquant.operators import equivalents as catalog

__all__ = [
    "get_executorch_backend_config",
    "get_fbgemm_backend_config",
    "get_native_backend_config",
    "get_native_backend_config_dict",
    "get_onednn_backend_config",
    "get_qnnpack_backend_config",
    "get_tensorrt_backend_config",
    "get_tensorrt_backend_config_dict",
    "get_test_only_legacy_native_backend_config",
    "get_test_only_legacy_native_backend_config_dict",
    "get_x86_backend_config",
]

_FLOAT16 = DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16)
_DYNAMIC_INT8 = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
_DYNAMIC_FLOAT16 = DTypeConfig(
    torch.float16, torch.float, torch.float16, torch.float, is_dynamic=True
)
_WEIGHT_ONLY_QINT8 = DTypeConfig(torch.float, torch.float, torch.qint8)
DTypes = list[DTypeConfig]
Entries = list[BackendPatternConfig]


class _Claim(NamedTuple):
    """What PyTorch makes of the dtypes of some operators, by pattern."""

    patterns: Collection[Any]
    change: Callable[[DTypes], DTypes]


def _patterns(*entries: Entries) -> list[Any]:
    return [_pattern(entry) for some in entries for entry in some]


def _pattern(entry: BackendPatternConfig) -> Any:
    return entry._pattern_complex_format if entry.pattern is None else entry.pattern


def _also(config: DTypeConfig) -> Callable[[DTypes], DTypes]:
    return lambda configs: [*configs, config]


def _only(config: DTypeConfig) -> Callable[[DTypes], DTypes]:
    return lambda configs: [config for _ in configs[:1]]


def _with_weights(configs: DTypes) -> DTypes:
    """Weight dtypes for operators that have no weight; not where scales have a bound, as XNNPACK's."""
    return [
        config
        if config.input_dtype_with_constraints.scale_min_lower_bound
        else DTypeConfig(
            config.input_dtype_with_constraints,
            config.output_dtype_with_constraints,
            torch.qint8,
            torch.float,
        )
        for config in configs
    ]


def _binary() -> list[Any]:
    return _patterns(elementwise.binary_entries([]), elementwise.matmul_entries([]))


def _x86() -> list[_Claim]:
    return [_Claim(_binary() + _patterns(fixed_qparams.entries([_FLOAT16])), _with_weights)]


def _executorch() -> list[_Claim]:
    with_sub = elementwise.binary_entries([], elementwise.ADD_SUB_MUL)
    return [_Claim(_patterns(with_sub), _with_weights)]


def _tensorrt() -> list[_Claim]:
    return [_Claim(_binary(), _with_weights)]


def _onednn() -> list[_Claim]:
    finished = _patterns(linear.leaky_relu_entries([]), linear.tanh_entries([]))
    functional = [p for p in finished if isinstance(p, tuple) and p[0] is nn.functional.linear]
    tables = _patterns(embedding.table_entries([]), embedding.bag_entries([]))
    return [
        _Claim(functional, _also(_DYNAMIC_INT8)),
        _Claim(tables, _only(_WEIGHT_ONLY_QINT8)),
    ]


def _qnnpack() -> list[_Claim]:
    both = _patterns(linear.entries([]), recurrent.entries([]))
    return [_Claim(both, _also(_DYNAMIC_FLOAT16))]


def _legacy() -> list[_Claim]:
    others = (
        linear.entries([]),
        fixed_qparams.entries([_FLOAT16]),
        catalog.sharing_qparams_entries([]),
    )
    return [_Claim(_binary() + _patterns(*others), _also(_FLOAT16))]


def _plain(config: DTypeConfig) -> DTypeConfig:
    """Rule 1 for dtypes."""
    activations = (config.input_dtype_with_constraints, config.output_dtype_with_constraints)
    first, second, weight = (
        DTypeWithConstraints(**{**dtype.to_dict(), "symmetric": None})
        for dtype in (*activations, config.weight_dtype_with_constraints)
    )
    return DTypeConfig(first, second, weight, config.bias_dtype, config.is_dynamic)


def _as_listed(entry: BackendPatternConfig) -> BackendPatternConfig:
    """Rules 1 and 2 for an entry."""
    fields = {key: value for key, value in entry.to_dict().items() if key != "where"}
    fields["dtype_configs"] = [_plain(config) for config in entry.dtype_configs]
    by_count = entry._num_tensor_args_to_observation_type
    if by_count:
        shared = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        fields["num_tensor_args_to_observation_type"] = {**by_count, 1: shared}
    return BackendPatternConfig.from_dict(fields)


def _without_kernel() -> dict[Any, Entries]:
    """Rule 3: entries that PyTorch lists before one of ours, by its pattern."""
    return {
        "contiguous": shape.sharing_entries([], (operator.floordiv,)),
        "relu": shape.sharing_entries([], ("resize_",)),
    }


def _with_transposed() -> dict[Any, Entries]:
    """Three dimensions, too, where qnnpack's kernel gives wrong numbers."""
    return {**_without_kernel(), nn.Linear: conv.transposed_entries(conv.TRANSPOSED[3])}


def _config(
    like: str,
    claims: Callable[[], list[_Claim]] = list,
    name: str | None = None,
    more: Callable[[], dict[Any, Entries]] = _without_kernel,
) -> BackendConfig:
    """Rules 1 to 4. Entries of ``more`` have the dtypes of the one before."""
    ours, missing, claimed = get_backend_config(like), more(), claims()
    left_out = _patterns(grouped.entries([]))
    listed: Entries = []
    for entry in ours.configs:
        pattern = _pattern(entry)
        if pattern in left_out:
            continue
        for other in missing.get(pattern, ()):
            listed.append(other.set_dtype_configs(listed[-1].dtype_configs))
        listed.append(_as_listed(entry))
        for patterns, change in claimed:
            if pattern in patterns:
                listed[-1].dtype_configs = change(listed[-1].dtype_configs)
    config = BackendConfig(name or like).set_backend_pattern_configs(listed)
    return config.set_engine(ours.engine).set_defaults(ours.defaults)


def _dict(get: Callable[[], BackendConfig]) -> dict[str, Any]:
    return get().to_dict()


get_executorch_backend_config = functools.partial(_config, "executorch", _executorch, more=dict)
get_fbgemm_backend_config = functools.partial(_config, "fbgemm")
get_native_backend_config = functools.partial(_config, "native")
get_onednn_backend_config = functools.partial(_config, "onednn", _onednn)
get_qnnpack_backend_config = functools.partial(_config, "qnnpack", _qnnpack, more=_with_transposed)
get_tensorrt_backend_config = functools.partial(_config, "tensorrt", _tensorrt)
get_test_only_legacy_native_backend_config = functools.partial(
    _config, "native", _legacy, "_native_and_fp16"
)
get_x86_backend_config = functools.partial(_config, "x86", _x86)

get_native_backend_config_dict = functools.partial(_dict, get_native_backend_config)
get_tensorrt_backend_config_dict = functools.partial(_dict, get_tensorrt_backend_config)
get_test_only_legacy_native_backend_config_dict = functools.partial(
    _dict, get_test_only_legacy_native_backend_config
)
