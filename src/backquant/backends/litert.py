"""litert: ``.tflite`` files for LiteRT (TensorFlow Lite), TensorFlow Lite for Microcontrollers and NPU
compilers.

Source: LiteRT 8-bit quantization specification (``quantization_spec``), and the kernels of LiteRT 2.3.

1. Activations are signed 8-bit with any zero point; weights signed 8-bit, symmetric, without -128, one scale
   per output channel (products of two activations: none). Biases are int32 in steps of input × weight scale.
2. Results of softmax and sigmoid are in steps of 1/256 from -128, of tanh in steps of 1/128 around 0, of
   log-softmax in steps of 1/16 up to 127.
3. Poolings, concatenation, padding, resizing and what moves values keep their input's qparams.
4. In float stay norms, and functions that have no integer kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QDQRules,
    Tolerance,
)
from backquant.backends.defaults import JOINED, RESIDUAL, SCORES, SIGNED_DEFAULTS, TABLES
from backquant.operators import clamped, conv, elementwise, entries_of, linear, shape, spellings
from backquant.operators.entry import admit, observed

ONE_STEP = Tolerance(1, "XNNPACK requantizes in float32, LiteRT's other kernels in fixed point")
ACTIVATION = DTypeWithConstraints(torch.qint8)
# the kernel divides by the places of its window that lie inside
_INSIDE: dict[str, Any] = {
    "ceil_mode": False,
    "any": [{"padding": 0}, {"count_include_pad": True}],
}
# an average of the whole image is a mean; of other windows, an average pooling
_WHOLE: dict[str, Any] = {"output_size": {"one_of": [1, (1,), (1, 1)]}}


@dataclass(frozen=True)
class Values:
    """What activations and biases are. ``unit``, ``around_zero``, ``log_unit``: scale and zero point of the
    results of rule 2; ``computed``: the functions of one value whose results have qparams of their own;
    ``missing``: operators of rule 3 without a kernel."""

    activation: DTypeWithConstraints
    bias: torch.dtype
    unit: tuple[float, int]
    around_zero: tuple[float, int]
    computed: tuple[str, ...]
    log_unit: tuple[float, int] | None = None
    missing: tuple[str, ...] = ()

    def config(self, **more: Any) -> DTypeConfig:
        """Of an operator without weights."""
        return DTypeConfig(self.activation, self.activation, tolerance=ONE_STEP, **more)

    def fixed(self, scale: float, zero_point: int) -> DTypeConfig:
        """Rule 2."""
        result = DTypeWithConstraints(
            self.activation.dtype, scale_exact_match=scale, zero_point_exact_match=zero_point
        )
        return DTypeConfig(self.activation, result, tolerance=ONE_STEP)

    def weighted(self, ch_axis: int, **more: Any) -> DTypeConfig:
        """Rule 1."""
        return DTypeConfig(
            self.activation,
            self.activation,
            weight(ch_axis=ch_axis),
            self.bias,
            bias_scale="input_times_weight",
            tolerance=ONE_STEP,
            **more,
        )


def weight(**more: Any) -> DTypeWithConstraints:
    """The weights of rule 1."""
    return DTypeWithConstraints(
        torch.qint8,
        quant_min_lower_bound=-127,
        quant_max_upper_bound=127,
        symmetric=True,
        **more,
    )


INT8 = Values(
    ACTIVATION,
    torch.int32,
    unit=(1 / 256, -128),
    around_zero=(1 / 128, 0),
    computed=("leaky_relu", "prelu", "gelu", "hardswish", "silu", "hardsigmoid"),
    log_unit=(1 / 16, 127),
)
DEFAULTS = replace(SIGNED_DEFAULTS, leave_float=(RESIDUAL, JOINED, TABLES, SCORES))

MEANS: tuple[Any, ...] = spellings("mean")
WHOLE: tuple[Any, ...] = spellings("adaptive_avg_pool1d", "adaptive_avg_pool2d")
#: Rule 3.
KEPT = (
    *("relu", "relu6", "hardtanh", "clamp", "dropout", "identity", "contiguous", "clone"),
    *("flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "unflatten"),
    *("max_pool1d", "max_pool2d", "interpolate", "pad", "cat", "stack"),
    *("chunk", "split", "unbind", "select", "narrow", "expand", "repeat", "flip", "roll"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "maximum", "minimum"),
)


def _convolutions(values: Values) -> list[BackendPatternConfig]:
    plain, transposed = values.weighted(0), values.weighted(1, where={"groups": 1})
    return [
        entry
        for dims in (1, 2)
        for entry in (
            *admit(conv.conv_entries(conv.CONV[dims]), [plain]),
            *admit(conv.transposed_entries(conv.TRANSPOSED[dims]), [transposed]),
        )
    ]


def _functions(values: Values) -> list[BackendPatternConfig]:
    """Functions of one value."""
    made = [
        *entries_of(["softmax", "sigmoid"], [values.fixed(*values.unit)]),
        *entries_of(["tanh"], [values.fixed(*values.around_zero)]),
        *entries_of(values.computed, [values.config()]),
    ]
    if values.log_unit is not None:
        made += entries_of(["log_softmax"], [values.fixed(*values.log_unit)])
        made += entries_of(["elu"], [values.config(where={"alpha": 1})])
    return made


def described(name: str, values: Values, defaults: BackendDefaults) -> BackendConfig:
    """The kernels of LiteRT for one kind of activations."""
    plain, weighted = values.config(), values.weighted(0)
    undivided = {**_INSIDE, "divisor_override": None}
    return (
        BackendConfig(name)
        .set_defaults(defaults)
        .set_qdq(QDQRules(attention="products"))
        .set_backend_pattern_configs(
            [
                *_convolutions(values),
                *linear.entries([weighted]),
                *clamped.entries([weighted], dimensions=(1, 2)),
                *elementwise.binary_entries([plain], elementwise.ADD_SUB_MUL),
                *entries_of(["matmul"], [plain]),
                *_functions(values),
                *admit([observed(each) for each in MEANS], [plain]),
                *entries_of(["avg_pool1d"], [values.config(where=_INSIDE)]),
                *entries_of(["avg_pool2d"], [values.config(where=undivided)]),
                *admit([observed(each) for each in WHOLE], [values.config(where=_WHOLE)]),
                *entries_of([each for each in KEPT if each not in values.missing], [plain]),
                *shape.tensor_info_entries([plain]),
            ]
        )
    )


def backend_config() -> BackendConfig:
    """What LiteRT computes on integers.

    >>> config = backend_config()
    >>> config.name, config.engine
    ('litert', None)
    """
    return described("litert", INT8, DEFAULTS)
