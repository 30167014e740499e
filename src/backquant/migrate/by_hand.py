"""Names that need a person, with the reason and the way out: data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ByHand:
    """A kind of use that no tool can rewrite.

    ``names`` are symbols of ``torch.ao.quantization``; ``packages`` dotted paths, with what is below
    them. ``holds``: the rest of the file works together with it and stays as it is.

    >>> ByHand("eager mode", "no counterpart", "use prepare_fx", names=("prepare",)).holds
    False
    """

    kind: str
    why: str
    how: str
    names: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    holds: bool = False


_STATIC = (
    "prepared = backquant.prepare_fx(model, backquant.get_default_qconfig_mapping(), "
    "example_inputs); run the calibration data through it; "
    "quantized = backquant.convert_fx(prepared)"
)

#: Groups by subject. A name stands in one of them.
GROUPS: tuple[ByHand, ...] = (
    ByHand(
        "eager mode",
        "eager-mode quantization swaps modules in place; backquant captures the model as a graph",
        _STATIC,
        names=("prepare", "convert", "quantize"),
        holds=True,
    ),
    ByHand(
        "eager mode",
        "eager-mode quantization-aware training swaps modules in place; backquant captures the "
        "model as a graph",
        "prepared = backquant.prepare_qat_fx(model, backquant.get_default_qat_qconfig_mapping(), "
        "example_inputs); train prepared; quantized = backquant.convert_fx(prepared)",
        names=("prepare_qat", "quantize_qat"),
        holds=True,
    ),
    ByHand(
        "eager mode",
        "a step of eager-mode quantization",
        "remove it: prepare_fx and convert_fx do this on the captured graph",
        names=(
            "propagate_qconfig_",
            "add_quant_dequant",
            "swap_module",
            "default_eval_fn",
            "add_observer_",
            "_add_observer_",
            "get_observer_dict",
            "_get_observer_dict",
        ),
        holds=True,
    ),
    ByHand(
        "inside of the flow",
        "a step inside of PyTorch's prepare_fx and convert_fx; backquant's steps are others",
        "call the public function: backquant.fuse_fx, prepare_fx, prepare_qat_fx or convert_fx",
        names=(
            "_fuse_fx",
            "_prepare_fx",
            "_convert_fx",
            "_prepare_standalone_module_fx",
            "_convert_standalone_module_fx",
        ),
        packages=(
            "torch.ao.quantization.fx.prepare",
            "torch.ao.quantization.fx.convert",
            "torch.ao.quantization.fx.fuse",
        ),
        holds=True,
    ),
    ByHand(
        "fusion by name",
        "modules are fused where the backend's description says so, not by a list of names",
        "remove the call: prepare_fx fuses by itself; to fuse only: "
        "backquant.fuse_fx(model, backend_config=...)",
        names=("fuse_known_modules",),
    ),
    ByHand(
        "fusers",
        "which function fuses a pattern is read from the backend's description",
        "backquant.get_fuser_method_mapping(backend_config); "
        "a fuser takes the modules in forward order: fuser(is_qat, conv, relu)",
        names=(
            "get_fuser_method",
            "get_fuser_method_new",
            "_sequential_wrapper2",
            "reverse2",
            "reverse3",
            "_reverse2",
            "_reverse3",
        ),
    ),
    ByHand(
        "TorchScript",
        "quantization of TorchScript modules has no counterpart",
        "quantize the nn.Module that was scripted: " + _STATIC,
        names=(
            "prepare_jit",
            "convert_jit",
            "quantize_jit",
            "prepare_dynamic_jit",
            "convert_dynamic_jit",
            "quantize_dynamic_jit",
            "script_qconfig",
            "script_qconfig_dict",
            "fuse_conv_bn_jit",
            "_prepare_ondevice_dynamic_jit",
            "_convert_ondevice_dynamic_jit",
            "_quantize_ondevice_dynamic_jit",
        ),
        holds=True,
    ),
    ByHand(
        "PT2E",
        "the PT2E flow and its quantizers moved to torchao",
        "import it from torchao.quantization.pt2e, or use backquant.prepare_fx on the nn.Module",
        names=("prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e"),
        packages=(
            "torch.ao.quantization.pt2e",
            "torch.ao.quantization.quantize_pt2e",
            "torch.ao.quantization.quantizer",
        ),
        holds=True,
    ),
    ByHand(
        "PT2E",
        "part of the PT2E flow's affine quantization, which moved to torchao",
        "import it from torchao.quantization.pt2e",
        names=(
            "AffineQuantizedObserverBase",
            "Granularity",
            "MappingType",
            "PerAxis",
            "PerBlock",
            "PerGroup",
            "PerRow",
            "PerTensor",
            "PerToken",
            "TorchAODType",
            "ZeroPointDomain",
            "get_block_size",
        ),
    ),
    ByHand(
        "module tables",
        "which module becomes which is part of the backend's description, not of a global table",
        "backquant.get_root_module_to_quantized_reference_module(backend_config), "
        "backquant.get_module_to_qat_module(backend_config); "
        "to change it: BackendPatternConfig(...).set_reference_quantized_module(...)",
        names=(
            "get_default_static_quant_module_mappings",
            "get_default_static_quant_reference_module_mappings",
            "get_default_static_sparse_quant_module_mappings",
            "get_default_dynamic_quant_module_mappings",
            "get_default_dynamic_sparse_quant_module_mappings",
            "get_default_qat_module_mappings",
            "get_default_float_to_quantized_operator_mappings",
            "get_default_qconfig_propagation_list",
            "get_default_compare_output_module_list",
            "get_default_custom_config_dict",
            "get_embedding_qat_module_mappings",
            "get_embedding_static_quant_module_mappings",
            "get_dynamic_quant_module_class",
            "get_static_quant_module_class",
            "get_quantized_operator",
            "no_observer_set",
            "default_mappings",
            "get_qconfig_propagation_list",
            "get_static_quant_module_mappings",
            "get_dynamic_quant_module_mappings",
            "get_qat_module_mappings",
            "DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS",
            "DEFAULT_DYNAMIC_SPARSE_QUANT_MODULE_MAPPINGS",
            "DEFAULT_FLOAT_TO_QUANTIZED_OPERATOR_MAPPINGS",
            "DEFAULT_MODULE_TO_ACT_POST_PROCESS",
            "DEFAULT_QAT_MODULE_MAPPINGS",
            "DEFAULT_REFERENCE_STATIC_QUANT_MODULE_MAPPINGS",
            "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",
            "DEFAULT_STATIC_SPARSE_QUANT_MODULE_MAPPINGS",
        ),
    ),
    ByHand(
        "old classes",
        "QConfigDynamic has been superseded; its activation defaults to Identity",
        "backquant.QConfig(activation=backquant.default_dynamic_quant_observer, weight=...)",
        names=("QConfigDynamic",),
    ),
    ByHand(
        "old classes",
        "WeightObserver does not exist since PyTorch 1.4",
        "backquant.default_weight_observer",
        names=("WeightObserver",),
    ),
    ByHand(
        "helpers",
        "a helper of PyTorch's implementation",
        "write it out, or keep the import while PyTorch has it",
        names=(
            "ObserverOrFakeQuantize",
            "get_combined_dict",
            "NodePattern",
            "QuantizerCls",
            "check_node",
            "getattr_from_fqn",
            "get_qparam_dict",
            "get_swapped_custom_module_class",
            "activation_dtype",
            "weight_dtype",
            "activation_is_statically_quantized",
            "activation_is_dynamically_quantized",
            "activation_is_int8_quantized",
            "activation_is_int32_quantized",
            "weight_is_quantized",
            "weight_is_statically_quantized",
            "op_is_int8_dynamically_quantized",
            "get_qconfig_dtypes",
            "get_quant_type",
            "check_min_max_valid",
            "calculate_qmin_qmax",
            "has_no_children_ignoring_parametrizations",
            "get_fqn_to_example_inputs",
            "to_underlying_dtype",
            "determine_qparams",
            "validate_qmin_qmax",
            "DEPRECATION_WARNING",
            "attach_preserved_attrs_to_model",
            "ObservedGraphModule",
            "QuantizationTracer",
            "Scope",
            "ScopeContextManager",
            "get_custom_module_class_keys",
            "get_skipped_module_name_and_classes",
            "fuse",
        ),
    ),
    ByHand(
        "engine",
        "the engine is not a setting of the process: every model has its own, from its backend",
        "remove it and name the backend: backquant.prepare_fx(..., "
        'backend_config=backquant.get_backend_config("x86"))',
        packages=("torch.backends.quantized",),
    ),
    ByHand(
        "quantized modules",
        "modules of PyTorch's quantized tensors; a model of backquant runs its own kernels, on "
        "plain integer tensors",
        "build the float module and quantize it; instead of isinstance checks on the result "
        "read quantized.report and quantized.kernels",
        packages=(
            "torch.ao.nn.quantized",
            "torch.ao.nn.intrinsic.quantized",
            "torch.ao.nn.sparse",
        ),
    ),
    ByHand(
        "numeric suite",
        "PyTorch's comparison of two models layer by layer has no counterpart",
        "compare the outputs of model and quantized; quantized.report says what each operator "
        "became",
        packages=("torch.ao.ns",),
    ),
)

#: Below these paths everything not listed elsewhere is PyTorch's implementation.
PACKAGES: tuple[str, ...] = (
    "torch.ao.quantization",
    "torch.ao.nn",
    *(package for group in GROUPS for package in group.packages),
)

#: Modules below ``torch.ao.quantization`` that share their name with a function of theirs.
HOMONYMS = frozenset({"quantize", "quantize_jit", "fuse_modules"})

#: Modules of implementation below ``torch.ao.quantization``: known names are found in them, too.
_IMPLEMENTATION = """
fx utils fuser_method_mappings quantization_mappings fx.fuse_handler fx.graph_module
fx.lower_to_fbgemm fx.lower_to_qnnpack fx.lstm_utils fx.match_utils fx.pattern_utils
fx.qconfig_mapping_utils fx.quantize_handler fx.tracer fx.utils fx._decomposed fx._equalize
fx._lower_to_native_backend fx._model_report fx._model_report.detector
fx._model_report.model_report fx._model_report.model_report_observer
fx._model_report.model_report_visualizer _correct_bias _equalize _learnable_fake_quantize
backend_config._common_operator_config_utils
"""
IMPLEMENTATION = frozenset(_IMPLEMENTATION.split())

INTERNAL = ByHand(
    "internals",
    "a part of PyTorch's implementation, which backquant does not share",
    "say what it is needed for with the public functions, or keep the import while PyTorch has it",
)

UNKNOWN = ByHand(
    "unknown name",
    "no version of PyTorch that is known here has it among its public names",
    "check the spelling; keep the import if the name is your own addition",
)
