"""What every name of ``torch.ao.quantization`` and ``torch.ao.nn`` is called in backquant: data only.

A name that is in none of these tables is in those of ``by_hand.py``. Tests compare both with what
PyTorch and backquant really export.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Older spellings of packages, longest first.
ALIASES: tuple[tuple[str, str], ...] = (
    ("torch.quantization._numeric_suite_fx", "torch.ao.ns._numeric_suite_fx"),
    ("torch.quantization._numeric_suite", "torch.ao.ns._numeric_suite"),
    ("torch.nn.quantized._reference", "torch.ao.nn.quantized.reference"),
    ("torch.nn.quantizable", "torch.ao.nn.quantizable"),
    ("torch.nn.intrinsic", "torch.ao.nn.intrinsic"),
    ("torch.nn.quantized", "torch.ao.nn.quantized"),
    ("torch.quantization", "torch.ao.quantization"),
    ("torch.nn.qat", "torch.ao.nn.qat"),
)

_BACKEND_CONFIG = """
BackendConfig BackendPatternConfig DTypeConfig DTypeWithConstraints ObservationType
get_native_backend_config get_native_backend_config_dict get_fbgemm_backend_config
get_qnnpack_backend_config get_x86_backend_config get_onednn_backend_config
get_tensorrt_backend_config get_tensorrt_backend_config_dict get_executorch_backend_config
get_qnnpack_pt2e_backend_config
get_pattern_to_dtype_configs get_qat_module_classes get_fused_module_classes
get_pattern_to_input_type_to_index get_root_module_to_quantized_reference_module
get_fuser_method_mapping get_module_to_qat_module get_fusion_pattern_to_root_node_getter
get_fusion_pattern_to_extra_inputs_getter pattern_to_human_readable entry_to_pretty_str
MatchAllNode Pattern reverse_sequential_wrapper2
"""

_OBSERVE = """
ObserverBase UniformQuantizationObserverBase MinMaxObserver MovingAverageMinMaxObserver
PerChannelMinMaxObserver MovingAveragePerChannelMinMaxObserver HistogramObserver
FixedQParamsObserver PlaceholderObserver RecordingObserver NoopObserver ReuseInputObserver
FakeQuantizeBase FakeQuantize FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize
enable_observer disable_observer enable_fake_quant disable_fake_quant
default_observer default_placeholder_observer default_per_channel_weight_observer
default_weight_observer default_histogram_observer default_debug_observer
default_dynamic_quant_observer default_float_qparams_observer
default_float_qparams_observer_4bit default_reuse_input_observer
default_affine_fixed_qparams_observer default_symmetric_fixed_qparams_observer
default_fixed_qparams_range_0to1_observer default_fixed_qparams_range_neg1to1_observer
weight_observer_range_neg_127_to_127 per_channel_weight_observer_range_neg_127_to_127
default_fake_quant default_weight_fake_quant default_dynamic_fake_quant
default_affine_fixed_qparams_fake_quant default_symmetric_fixed_qparams_fake_quant
default_fixed_qparams_range_0to1_fake_quant default_fixed_qparams_range_neg1to1_fake_quant
default_per_channel_weight_fake_quant default_embedding_fake_quant
default_embedding_fake_quant_4bit default_histogram_fake_quant default_fused_act_fake_quant
default_fused_wt_fake_quant default_fused_per_channel_wt_fake_quant
fused_wt_fake_quant_range_neg_127_to_127 fused_per_channel_wt_fake_quant_range_neg_127_to_127
get_observer_state_dict load_observer_state_dict
is_per_tensor is_per_channel
"""

_QCONFIG = """
QConfig QConfigAny QConfigMapping qconfig_equals QuantType
PrepareCustomConfig ConvertCustomConfig FuseCustomConfig StandaloneModuleConfigEntry
get_default_qconfig get_default_qat_qconfig
get_default_qconfig_mapping get_default_qat_qconfig_mapping
default_qconfig default_debug_qconfig default_per_channel_qconfig default_dynamic_qconfig
float16_dynamic_qconfig float16_static_qconfig per_channel_dynamic_qconfig
float_qparams_weight_only_qconfig float_qparams_weight_only_qconfig_4bit
default_quint8_weight_qconfig default_weight_only_qconfig default_activation_only_qconfig
default_reuse_input_qconfig default_qat_qconfig default_qat_qconfig_v2
default_dynamic_qat_qconfig default_embedding_qat_qconfig default_embedding_qat_qconfig_4bit
default_symmetric_qnnpack_qconfig default_per_channel_symmetric_qnnpack_qconfig
default_symmetric_qnnpack_qat_qconfig default_per_channel_symmetric_qnnpack_qat_qconfig
"""

_API = """
prepare_fx prepare_qat_fx convert_fx convert_to_reference_fx fuse_fx
fuse_modules fuse_modules_qat quantize_dynamic
"""

_STUBS = "QuantStub DeQuantStub QuantWrapper"

#: Names by the room that has them; all but those of ``backquant.nn`` are in ``backquant`` too.
ROOMS: dict[str, frozenset[str]] = {
    "backquant.backend_config": _words(_BACKEND_CONFIG),
    "backquant.observe": _words(_OBSERVE),
    "backquant.qconfig": _words(_QCONFIG),
    "backquant.nn": _words(_STUBS),
}

#: Names of ``torch.ao.quantization`` and its modules, with their place in backquant.
FLAT: dict[str, str] = {
    **{
        name: f"{room if room == 'backquant.nn' else 'backquant'}.{name}"
        for room, names in ROOMS.items()
        for name in sorted(names)
    },
    **{name: f"backquant.{name}" for name in _API.split()},
}

#: Functions that fuse: not flat, since few write them out.
FUSERS: dict[str, str] = {
    name: f"backquant.nn.intrinsic.fusers.{name}"
    for name in ("fuse_conv_bn", "fuse_conv_bn_relu", "fuse_linear_bn", "fuse_convtranspose_bn")
}

_CONVS = "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d "
_CONV_RELUS = "ConvReLU1d ConvReLU2d ConvReLU3d LinearReLU LinearBn1d "

#: Classes of the packages of ``torch.ao.nn``, by the package's path below it.
NN: dict[str, frozenset[str]] = {
    "intrinsic": _words(
        _CONVS + _CONV_RELUS + "BNReLU2d BNReLU3d LinearLeakyReLU LinearTanh "
        "ConvAdd2d ConvAddReLU2d"
    ),
    "intrinsic.qat": _words(_CONVS + _CONV_RELUS + "freeze_bn_stats update_bn_stats"),
    "qat": _words("Conv1d Conv2d Conv3d Linear Embedding EmbeddingBag"),
    "qat.dynamic": _words("Linear"),
    "quantizable": _words("LSTM LSTMCell MultiheadAttention"),
    "quantized": _words("FloatFunctional LSTM MultiheadAttention"),
    "quantized.reference": _words(
        "Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d "
        "RNNCell LSTMCell GRUCell LSTM GRU Embedding EmbeddingBag"
    ),
}

_BACKEND_CONFIG_FILES = """
backend_config observation_type utils native fbgemm qnnpack x86 onednn tensorrt executorch
_qnnpack_pt2e
"""

#: Modules, and the module of backquant that has their names.
MODULES: dict[str, str] = {
    "torch.ao.quantization": "backquant",
    "torch.ao.quantization.quantize_fx": "backquant",
    "torch.ao.quantization.observer": "backquant.observe",
    "torch.ao.quantization.fake_quantize": "backquant.observe",
    "torch.ao.quantization.qconfig": "backquant.qconfig",
    "torch.ao.quantization.qconfig_mapping": "backquant.qconfig",
    "torch.ao.quantization.quant_type": "backquant.qconfig",
    "torch.ao.quantization.fx.custom_config": "backquant.qconfig",
    "torch.ao.quantization.stubs": "backquant.nn",
    "torch.ao.quantization.backend_config": "backquant.backend_config",
    **{
        f"torch.ao.quantization.backend_config.{name}": "backquant.backend_config"
        for name in _BACKEND_CONFIG_FILES.split()
    },
    "torch.ao.nn": "backquant.nn",
    **{f"torch.ao.nn.{package}": f"backquant.nn.{package}" for package in NN},
}

#: Functions that gave a dict: their calls become a call of the newer function and ``.to_dict()``.
RENAMED_CALLS: dict[str, str] = {
    "get_default_qconfig_dict": "get_default_qconfig_mapping",
    "get_default_qat_qconfig_dict": "get_default_qat_qconfig_mapping",
}

#: Names of PyTorch's implementation that have another name, or are an option, in backquant.
PRIVATE: dict[str, str] = {
    "_with_args": "backquant.with_args",
    "_with_callable_args": "backquant.with_callable_args",
    "_PartialWrapper": "backquant.ObserverPartial",
    "is_activation_post_process": "backquant.is_observer_or_fake_quantize",
    "_is_activation_post_process": "backquant.is_observer_or_fake_quantize",
    "_FusedModule": "backquant.nn.intrinsic.FusedModule",
    "_convert_to_reference_decomposed_fx": "backquant.convert_to_reference_fx",
}
