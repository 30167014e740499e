"""The description language: what a backend can do, pattern by pattern.

>>> import torch
>>> from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
>>> int8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
>>> linear = BackendPatternConfig(torch.nn.Linear).add_dtype_config(int8)
>>> BackendConfig("mine").set_backend_pattern_config(linear).name
'mine'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backquant.backend_config.config import (
    BackendConfig,
    get_backend_config,
    get_executorch_backend_config,
    get_fbgemm_backend_config,
    get_native_backend_config,
    get_native_backend_config_dict,
    get_onednn_backend_config,
    get_onnxruntime_backend_config,
    get_openvino_backend_config,
    get_qnnpack_backend_config,
    get_qnnpack_pt2e_backend_config,
    get_tensorrt_backend_config,
    get_tensorrt_backend_config_dict,
    get_tensorrt_fp8_backend_config,
    get_x86_backend_config,
)
from backquant.backend_config.defaults import BackendDefaults, DefaultOverride, QuantDefault
from backquant.backend_config.derived import (
    get_fused_module_classes,
    get_fuser_method_mapping,
    get_fusion_pattern_to_extra_inputs_getter,
    get_fusion_pattern_to_root_node_getter,
    get_module_to_qat_module,
    get_pattern_to_dtype_configs,
    get_pattern_to_input_type_to_index,
    get_qat_module_classes,
    get_root_module_to_quantized_reference_module,
)
from backquant.backend_config.describe import entry_to_pretty_str, pattern_to_human_readable
from backquant.backend_config.description import KnownSlower, QDQRules
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints, Tolerance
from backquant.backend_config.fusers import (
    ForwardFuser,
    ReversedFuser,
    SequentialFuser,
    folds_for_inference_only,
    is_for_inference_only,
    reverse_sequential_wrapper2,
)
from backquant.backend_config.graph_pattern import AnyOrder, GraphNode, GraphPattern, Value
from backquant.backend_config.installed import list_backends
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_name, short_name
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern import (
    MatchAllNode,
    NormalPattern,
    Pattern,
    PatternNode,
    from_reversed,
    normal_form,
    to_forward,
    to_reversed,
)
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.ports import Port

if TYPE_CHECKING:
    from backquant.backend_config.files import json_schema

__all__ = [
    # the classes
    "BackendConfig",
    "BackendPatternConfig",
    "DTypeConfig",
    "DTypeWithConstraints",
    "Tolerance",
    "ObservationType",
    "MatchAllNode",
    # defaults
    "BackendDefaults",
    "DefaultOverride",
    "KnownSlower",
    "LeaveFloat",
    "QuantDefault",
    # deployment targets
    "QDQRules",
    # patterns
    "AnyOrder",
    "GraphNode",
    "GraphPattern",
    "Port",
    "Value",
    "NormalPattern",
    "Pattern",
    "PatternNode",
    "from_reversed",
    "normal_form",
    "to_forward",
    "to_reversed",
    "operator_name",
    "short_name",
    "pattern_to_human_readable",
    "entry_to_pretty_str",
    # fusers
    "ForwardFuser",
    "ReversedFuser",
    "SequentialFuser",
    "folds_for_inference_only",
    "is_for_inference_only",
    "reverse_sequential_wrapper2",
    # backends by name
    "get_backend_config",
    "list_backends",
    "get_executorch_backend_config",
    "get_fbgemm_backend_config",
    "get_native_backend_config",
    "get_native_backend_config_dict",
    "get_onednn_backend_config",
    "get_onnxruntime_backend_config",
    "get_openvino_backend_config",
    "get_qnnpack_backend_config",
    "get_qnnpack_pt2e_backend_config",
    "get_tensorrt_backend_config",
    "get_tensorrt_backend_config_dict",
    "get_tensorrt_fp8_backend_config",
    "get_x86_backend_config",
    # derived mappings
    "get_fused_module_classes",
    "get_fuser_method_mapping",
    "get_fusion_pattern_to_extra_inputs_getter",
    "get_fusion_pattern_to_root_node_getter",
    "get_module_to_qat_module",
    "get_pattern_to_dtype_configs",
    "get_pattern_to_input_type_to_index",
    "get_qat_module_classes",
    "get_root_module_to_quantized_reference_module",
    # files
    "json_schema",
]


def __getattr__(name: str) -> Any:
    """``json_schema`` is imported when asked for: it needs yaml, the rest only torch."""
    if name == "json_schema":
        from backquant.backend_config.files import json_schema

        return json_schema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
