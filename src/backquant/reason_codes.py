"""Every code that a reason may have: what it means, and what to do. The table of docs/reasons.md.

``Reason.rule`` is such a code, or one of another table: the check of TensorRT's rules has its own, and so may
an engine or a target that is not of this package.
"""

from __future__ import annotations

from enum import Enum

_ENTRY = (
    "none here: describe a kernel of yours in a BackendConfig; `backquant diff` compares backends"
)
_FIRST = "prepare it before its parent"
_REWRITE = "rewrite the call with supported arguments; else it stays float"
_OBSERVER = "an observer within what is supported"
_PRODUCER = "quantize what produces its input"
_READER = "quantize what reads its result"
_TARGET = "quantize for another target, or leave it in float: `require=0.0`"


class ReasonCode(str, Enum):
    """The code of a reason, with its ``meaning`` and its ``remedy``.

    >>> ReasonCode.NO_ENTRY == "no-entry", str(ReasonCode.NO_ENTRY)
    (True, 'no-entry')
    """

    meaning: str
    remedy: str

    def __new__(cls, code: str, meaning: str, remedy: str) -> ReasonCode:
        """A string with two attributes."""
        made = str.__new__(cls, code)
        made._value_ = code
        made.meaning, made.remedy = meaning, remedy
        return made

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    # what is requested, and whether the backend has it
    NO_ENTRY = "no-entry", "the backend has no entry for the operator", _ENTRY
    NO_DTYPE_CONFIG = "no-dtype-config", "the entry supports no quantization at all", _ENTRY
    QCONFIG_NONE = (
        "qconfig-none",
        "the QConfigMapping leaves it in float, or has no rule for it",
        "a rule of yours for it, before the one that says so",
    )
    NOT_TRACED = (
        "not-traced",
        "the module was left whole, so that nothing inside of it is seen",
        "name parts of it instead in PrepareCustomConfig",
    )
    NOT_CAPTURED = (
        "not-captured",
        "the module can neither be traced nor exported",
        "rewrite its forward, as the reason says; see docs/capture.md",
    )
    CUSTOM_MODULE = (
        "custom-module",
        "its class is mapped to an observed class, for another kind of quantization",
        "ask for that kind, or map the class for this one",
    )
    NOT_PREPARED = (
        "not-prepared",
        "it was prepared in float, or for something else than conversion asks for",
        "prepare with the mapping and the backend that are converted for",
    )
    LEFT_OUT = (
        "left-out",
        "a standalone module that conversion leaves out",
        "the QConfigMapping or the backend that conversion was given",
    )
    STANDALONE = (
        "standalone",
        "a standalone module that was not prepared before its parent",
        _FIRST,
    )
    OBSERVED_CUSTOM = (
        "custom_module",
        "a custom module that was not prepared before its parent",
        _FIRST,
    )
    CONDITION = "condition", "this call does not meet a condition of the entry", _REWRITE
    TENSOR_COUNT = "tensor-count", "the entry is for another number of tensors", _REWRITE
    # dtypes and constraints
    DTYPE = "dtype", "the dtype is not supported", _OBSERVER
    DTYPE_TOKEN = (
        "dtype-token",
        "the same integers under another name (`quint8` and `uint8`), which a description distinguishes",
        _OBSERVER,
    )
    DYNAMIC = "dynamic", "static where dynamic is supported, or the other way round", _OBSERVER
    QUANT_RANGE = "quant-range", "integers outside of the supported range", _OBSERVER
    SCALE_MIN = "scale-min", "scales may be smaller than supported", _OBSERVER
    SCALE_MAX = "scale-max", "a scale, as measured, is larger than supported", _OBSERVER
    POWER_OF_TWO_SCALE = "power-of-two-scale", "a scale is no power of two", _OBSERVER
    SCALE_SET = "scale-set", "a scale is none of those that the hardware has", _OBSERVER
    REQUANTIZATION_RATIO = (
        "requantization-ratio",
        "input × weight / output scale, as measured, is none of those that the hardware computes",
        "observers whose scales leave it a choice: none that is fixed or shared",
    )
    BIAS_STEP = (
        "bias-step",
        "a bias that would be rounded to products whose step, as measured, is coarser than supported",
        "smaller scales of the input or the weight, or a layer without a bias; else it stays float",
    )
    BIAS_RANGE = (
        "bias-range",
        "a bias that, counted in steps of its scale as measured, is beyond its integers",
        "a dtype config with a wider bias_dtype, or a layer without a bias; else it stays float",
    )
    ZERO_POINT = (
        "zero-point",
        "values were measured that the fixed zero point has no room for",
        "a dtype config for signed values, or a rule that leaves it in float",
    )
    FIXED_QPARAMS = (
        "fixed-qparams",
        "fixed scale and zero point are not the supported ones",
        _OBSERVER,
    )
    SYMMETRIC = (
        "symmetric",
        "affine where symmetric is supported, or the other way round",
        _OBSERVER,
    )
    GRANULARITY = (
        "granularity",
        "one scale is for other values than supported: a tensor, a channel, a group, …",
        _OBSERVER,
    )
    GROUP_SIZE = "group-size", "groups or blocks do not divide the weight", _OBSERVER
    CH_AXIS = "ch-axis", "channels lie on another axis than supported", _OBSERVER
    NO_OBSERVER = "no-observer", "the QConfig asks for none of the tensor", _OBSERVER
    NO_TENSOR = "no-tensor", "the call has no tensor in this position", _REWRITE
    # what stands around it
    FLOAT_NEIGHBOURS = (
        "float-neighbours",
        "the backend quantizes it only between quantized operators",
        "quantize what it stands between",
    )
    FLOAT_PLACE = (
        "float-place",
        "the backend leaves it in float where it stands (`leave_float`)",
        "a BackendConfig without that rule",
    )
    NOTHING_TO_SHARE = (
        "nothing-to-share",
        "it has no scale of its own, and what it reads is not quantized",
        _PRODUCER,
    )
    COMPUTED_WEIGHT = (
        "computed-weight",
        "its weight or bias depends on the inputs",
        "make them parameters: compute them once, before quantizing",
    )
    # what is measured
    SLOWER_THAN_FLOAT = (
        "slower-than-float",
        "on integers it took longer here than in float",
        'slower="keep" quantizes it all the same; docs/speed.md',
    )
    SHARED_RANGE = (
        "shared-range",
        "one scale for values of such different ranges leaves hardly a step to some, as measured",
        "bring the parts to one range before they are joined, or a rule of yours; docs/accuracy.md",
    )
    ROUNDED_TO_ZERO = (
        "rounded-to-zero",
        "a divisor, or what a logarithm or an inverse root reads, would be rounded to 0, as measured",
        "a larger number added to that value, or a rule of yours",
    )
    SEARCH = (
        "search",
        "a search under a budget left it in float",
        "another budget; docs/accuracy.md",
    )
    RECIPE = (
        "recipe",
        "a recipe put it in front of layers, whose input channels it scales",
        "a recipe without the step `products`; docs/accuracy.md",
    )
    NOISE_OF_WEIGHTS = (
        "noise-of-weights",
        "8-bit weights of a recurrent layer cost more than the data allows",
        "a QConfig of your own for the layer; docs/dynamic.md",
    )
    # what no kernel does, although the plan has it
    NO_KERNEL = "no-kernel", "no kernel of the engine for it", "another engine; docs/kernels.md"
    KERNEL_DEFECT = (
        "kernel-defect",
        "torch's kernel computes it wrongly on this machine",
        "another engine; docs/kernels.md",
    )
    SATURATION = (
        "saturation",
        "products of these integers overflow 16 bits on this CPU",
        "activations of 7 bits: `reduce_range=True`",
    )
    FLOAT_IN_REFERENCE = (
        "float-in-reference",
        "the reference model computes it in float, too",
        "the reasons of the plan",
    )
    FLOAT_INPUT = "float-input", "its input is computed in float", _PRODUCER
    FLOAT_OUTPUT = "float-output", "its result is read in float", _READER
    MIXED_DTYPES = "mixed-dtypes", "its inputs are integers of several dtypes", "one dtype for both"
    DTYPES = "dtypes", "the kernel takes no such dtypes together", _OBSERVER
    ACTIVATION_DTYPE = "activation-dtype", "the engine has no such activations", _OBSERVER
    INPUT_DTYPE = "input-dtype", "the kernel has no such inputs", _OBSERVER
    OUTPUT_DTYPE = "output-dtype", "the kernel gives no such results", _OBSERVER
    WEIGHT_DTYPE = "weight-dtype", "the engine has no such weights", _OBSERVER
    WEIGHT_AXIS = (
        "weight-axis",
        "the weight's scales lie on another axis than the kernel's",
        _OBSERVER,
    )
    WEIGHT_GRANULARITY = "weight-granularity", "the kernel has one scale per weight", _OBSERVER
    WEIGHT_ZERO_POINT = "weight-zero-point", "the kernel takes symmetric weights only", _OBSERVER
    SCALE = "scale", "the weight's scales are not what the kernel takes", _OBSERVER
    EPS = "eps", "scales may get smaller than the kernel's", _OBSERVER
    OTHER_QPARAMS = (
        "other-qparams",
        "input and output have scales of their own",
        "one observer for both",
    )
    ONE_TENSOR = "one-tensor", "both inputs are one tensor", _REWRITE
    POST_OP = "post-op", "the kernel does not compute what follows", _REWRITE
    ARGUMENTS = "arguments", "called with what the kernel does not take", _REWRITE
    ATTRIBUTE = "attribute", "an attribute of a tensor that integers do not have", _REWRITE
    INDEX = "index", "the index is a quantized tensor", _REWRITE
    DIMENSIONS = "dimensions", "a number of dimensions that the kernel does not take", _REWRITE
    NODES = "nodes", "other values read what the kernel would not give", _REWRITE
    PADDING = "padding", "a padding that the kernel does not take", _REWRITE
    PADDING_MODE = "padding-mode", "the kernel pads with zeros only", 'padding_mode="zeros"'
    PADDING_IDX = "padding-idx", "the kernel has no `padding_idx`", _REWRITE
    MAX_NORM = "max-norm", "the kernel has no `max_norm`", _REWRITE
    MODE = "mode", "a mode that the kernel does not have", _REWRITE
    RETURN_INDICES = "return-indices", "the kernel gives no indices", "return_indices=False"
    PROJ_SIZE = "proj-size", "the kernel has no projections", "proj_size=0"
    STATISTICS = "statistics", "no running statistics to normalize by", "track_running_stats=True"
    TRAINING = "training", "it does something else in training mode", "model.eval()"
    WHOLE_TUPLE = "whole-tuple", "a tuple is passed on as a whole", "unpack it before"
    # what a target does not take, or leaves
    NO_TRANSLATION = "no-translation", "the target has no operator for it", _TARGET
    DYNAMIC_SHAPE = "dynamic-shape", "the target takes no such dynamic shape", "a fixed size"
    NOT_DELEGATED = "not-delegated", "the target's partitioner left it in float", _TARGET
    TARGET_FLOAT = "target-float", "read back from the file, it computes in float", _TARGET
    GENERATED = "generated", "it became generated code, which computes in float", _TARGET


def remedy_of(rule: str) -> str:
    """What to do about reasons with this code; nothing for a code that is not of this table.

    >>> remedy_of("training"), remedy_of("quant-min-127")
    ('model.eval()', '')
    """
    known = _BY_CODE.get(rule)
    return "" if known is None else known.remedy


_BY_CODE = {code.value: code for code in ReasonCode}
