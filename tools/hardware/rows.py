"""The rows: what was found in the documents of hardware vendors, each with the description that says it."""

# ruff: noqa: E501 - descriptions as the page shows them
from __future__ import annotations

import math

import torch
from tools.hardware import requests as r
from tools.hardware.row import Request, Row, Tried
from torch import nn
from torch.nn import functional as F

from backquant import observe as ob

W = "{dtype: qint8, quant_min_lower_bound: -127, quant_max_upper_bound: 127, symmetric: true"


def _is_power(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def _symmetric_weights(tried: Tried) -> str:
    conv, fc = tried.graph.get_submodule("0"), tried.graph.get_submodule("1")
    for layer, scales in ((conv, 8), (fc, 1)):
        assert int(layer.weight.abs().max()) == 127 and layer.weight_scale.numel() == scales
        assert not layer.weight_zero_point.any()
    return f"{tried.observed('weight')}; {tried.observed('weight', 1)}"


def _range_of(role: str, low: int, high: int) -> object:
    def honoured(tried: Tried) -> str:
        found = tried.observed(role)
        assert (found.quant_min, found.quant_max) == (low, high)
        assert tried.called("quantize_per_tensor") and tried.decibels > 40
        return str(found)

    return honoured


def _four_bits(tried: Tried) -> str:
    layer = tried.graph.get_submodule("0")
    assert int(layer.weight.abs().max()) == 7 and layer.weight_scale.numel() == 8
    return str(tried.observed("weight"))


def _bias_of(which: str) -> object:
    def honoured(tried: Tried) -> str:
        layer = tried.graph.get_submodule("0")
        step = tried.observed("output").scale
        if which == "input_times_weight":
            step = tried.observed("input").scale * layer.weight_scale.double()
        steps = layer.bias.detach().double() / step
        assert (steps - steps.round()).abs().max() < 1e-3 and steps.abs().max() >= 1
        return f"bias of whole steps, {int(steps.abs().max().round())} at most"

    return honoured


def _powers_of_two(tried: Tried) -> str:
    scales = [tried.observed(role).scale for role in ("input", "output")]
    assert all(map(_is_power, scales))
    assert all(map(_is_power, tried.graph.get_submodule("0").weight_scale.flatten().tolist()))
    return f"{tried.observed('input')}; {tried.observed('output')}"


def _scales_of_gaudi(tried: Tried) -> str:
    layer = tried.graph.get_submodule("0")
    scales = {tried.observed("input").scale, *layer.weight_scale.flatten().tolist()}
    assert scales <= {2**-8, 2**-4, 1, 2**4} and tried.decibels > 20
    return f"{tried.observed('input')}; {tried.observed('weight')}"


def _ends_at_240(tried: Tried) -> str:
    layer = tried.graph.get_submodule("0")
    assert float(layer.weight.float().abs().max()) == 240 and layer.weight_scale.numel() == 16
    assert (tried.observed("input").quant_min, tried.observed("input").quant_max) == (-240, 240)
    return f"{tried.observed('input')}; {tried.observed('weight')}"


def _groups(tried: Tried) -> str:
    layer = tried.graph.get_submodule("0")
    assert tuple(layer.weight_scale.shape) == (16, 2) and int(layer.weight.abs().max()) == 8
    assert tried.called("choose_qparams") and tried.called("per_token")
    return f"{tried.observed('weight')}; {tried.called('choose_qparams')[0].target}"


def _one_scale(tried: Tried) -> str:
    # the rows are those of the convolutions, of the operator that joins, and of the reshape
    scales = {
        (tried.observed("output", n).scale, tried.observed("output", n).zero_point)
        for n in range(4)
    }
    assert len(scales) == 1
    return f"four tensors: {tried.observed('output', 3)}"


def _fixed(tried: Tried) -> str:
    found = tried.observed("output")
    assert (found.scale, found.zero_point) == (2**-8, -128)
    return str(found)


def _tanh16(tried: Tried) -> str:
    one, two = tried.observed("input"), tried.observed("output")
    assert one.zero_point == 0 and (two.scale, two.zero_point) == (2**-15, 0)
    return f"{one}; {two}"


def _widens(tried: Tried) -> str:
    one, two = tried.observed("input"), tried.observed("output")
    assert (one.dtype, two.dtype) == ("qint8", "int16") and tried.decibels > 35
    return f"{one}; {two}"


def _unsigned(tried: Tried) -> str:
    found = tried.observed("output")
    assert found.zero_point == 0 and found.quant_min == 0 and found.scale > 0
    return str(found)


def _all_quantized(tried: Tried) -> str:
    assert tried.decibels > 30
    return f"{tried.observed('weight')}"


def _both(tried: Tried) -> str:
    assert tried.decibels > 30
    return str(tried.observed("output"))


def _microscaled(tried: Tried) -> str:
    layer = tried.graph.get_submodule("0")
    assert tuple(layer.weight_scale.shape) == (16, 2)
    assert all(map(_is_power, layer.weight_scale.flatten().tolist()))
    values = {abs(float(v)) for v in layer.weight.float().unique()}
    assert values <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0} and 6.0 in values
    return str(tried.observed("weight"))


def _nvfp4(tried: Tried) -> str:
    scale = tried.graph.get_submodule("0").weight_scale.double()
    parts = scale / (scale.max() / 448)
    assert tuple(scale.shape) == (16, 4)
    assert (parts - parts.float().to(torch.float8_e4m3fn).double()).abs().max() < 1e-3
    return str(tried.observed("weight"))


def _microscaled_at_each_call(tried: Tried) -> str:
    [node] = tried.called("backquant.quantize_blocks")
    assert node.args[1] == "per_group(size=32)" and node.args[-1] is torch.float8_e8m0fnu
    assert tried.graph.get_submodule("0").weight_scale.shape == (16, 2) and tried.decibels > 10
    return f"{node.target}, {node.args[1]}"


def _four_bits_with_16(tried: Tried) -> str:
    assert int(tried.graph.get_submodule("0").weight.abs().max()) == 7
    found = tried.observed("input")
    assert (found.dtype, found.quant_max) == ("uint16", 65535)
    return f"{found}; {tried.observed('weight')}"


def _ratio_is_power(tried: Tried) -> str:
    scales = [tried.observed(role).scale for role in ("input", "output")]
    ratios = tried.graph.get_submodule("0").weight_scale.double() * scales[0] / scales[1]
    exponents = ratios.log2()
    assert (exponents - exponents.round()).abs().max() < 1e-6 and not all(map(_is_power, scales))
    return f"8 ratios, 2^{int(exponents.min().round())} … 2^{int(exponents.max().round())}"


def _half_up(tried: Tried) -> str:
    [node] = tried.called("requantize") or tried.called("quantize_rounded")
    assert node.args[-1] == "half_up"
    return f"{node.target}, {', '.join(map(str, node.args[-2:]))}"


VELA = "Arm Ethos-U: nxp-imx/ethos-u-vela, SUPPORTED_OPS.md"
QNN = "Qualcomm HTP: 80-63442-10; executorch, backends/qualcomm/quantizer/qconfig.py"
ESP = "Espressif ESP-DL: quantization-specification.rst"
TIDL = "TI TIDL: tidl_fsg_quantization.md"

ROWS = (
    Row(
        "symmetric-weights",
        "int8 activations; weights in [-127, 127], symmetric, a scale per channel; per tensor in linear layers",
        VELA,
        f"""\
dtype_configs:
  by_channel: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}, granularity: per_channel}}}}
  by_tensor: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}, granularity: per_tensor}}}}
entries:
- {{operators: [conv2d], dtype_configs: [by_channel]}}
- {{operators: [linear], dtype_configs: [by_tensor]}}
""",
        Request(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(6, 4)), r.image()),
        _symmetric_weights,
        {
            "quant-range": Request(r.conv(), r.image(), r.asked(r.activation(), r.weight(low=-128))),
            "granularity": Request(r.linear(), r.matrix(2, 64), r.asked(r.activation())),
        },
    ),
    Row(
        "int16-activations",
        "int16 activations, symmetric, with int8 or int16 weights",
        f"{VELA}; {ESP}",
        f"""\
dtype_configs:
  w8: {{input_dtype: &a {{dtype: int16, symmetric: true}}, output_dtype: *a, weight_dtype: {W}}}}}
  w16: {{input_dtype: *a, output_dtype: *a, weight_dtype: {{dtype: int16, symmetric: true}}}}
entries:
- {{operators: [conv2d], dtype_configs: [w8, w16]}}
""",
        Request(
            r.conv(),
            r.image(),
            r.asked(
                r.activation(torch.int16, r.SYMMETRIC), r.weight(torch.int16, -32767, 32767)
            ),
        ),
        _range_of("weight", -32767, 32767),
        {"symmetric": Request(r.conv(), r.image(), r.asked(r.activation(torch.int16)))},
    ),
    Row(
        "uint16-activations",
        "uint16 activations with a zero point",
        QNN,
        f"""\
dtype_configs:
  a: {{input_dtype: uint16, output_dtype: uint16, weight_dtype: {W}}}}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _range_of("input", 0, 65535),
        {"dtype": Request(r.conv(), r.image(), r.asked(r.activation(torch.int16)))},
    ),
    Row(
        "int4-weights",
        "weights of 4 bits, a scale per channel",
        f"{QNN}; ST Neural-ART",
        """\
dtype_configs:
  a:
    input_dtype: qint8
    output_dtype: qint8
    weight_dtype: {dtype: int4, quant_min_lower_bound: -7, quant_max_upper_bound: 7, symmetric: true,
                   granularity: per_channel}
entries:
- {operators: [conv2d], dtype_configs: [a]}
""",
        Request(r.conv(), r.image()),
        _four_bits,
        {"dtype": Request(r.conv(), r.image(), r.asked(r.activation()))},
    ),
    Row(
        "int4-weights-uint16-activations",
        "weights of 4 bits with activations of 16",
        QNN,
        """\
dtype_configs:
  a:
    input_dtype: uint16
    output_dtype: uint16
    weight_dtype: {dtype: int4, quant_min_lower_bound: -7, quant_max_upper_bound: 7, symmetric: true}
entries:
- {operators: [conv2d, linear], dtype_configs: [a]}
""",
        Request(r.conv(), r.image()),
        _four_bits_with_16,
        {"dtype": Request(r.conv(), r.image(), r.asked(r.activation()))},
    ),
    Row(
        "bias-input-times-weight",
        "int32 bias of input × weight scale",
        f"{VELA}; {QNN}, _derived_bias_quant_spec; NXP Neutron, DerivedQuantizationSpec",
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}}},
      bias_dtype: int32, bias_scale: input_times_weight}}
entries:
- {{operators: [conv2d, linear], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _bias_of("input_times_weight"),
        {
            "dtype": Request(
                lambda: r.Calls(lambda x, b: F.linear(x, torch.eye(4), b)),
                lambda: (torch.randn(2, 4), torch.randn(4)),
            )
        },
    ),
    Row(
        "bias-of-the-output",
        "bias with the output's exponent",
        ESP,
        f"""\
dtype_configs:
  a: {{input_dtype: &a {{dtype: qint8, zero_point_exact_match: 0, power_of_two_scale: true}}, output_dtype: *a,
      weight_dtype: {W}, power_of_two_scale: true}}, bias_dtype: int32, bias_scale: output}}
entries:
- {{operators: [conv2d, linear], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _bias_of("output"),
        {
            "dtype": Request(
                lambda: r.Calls(lambda x, b: F.linear(x, torch.eye(4), b)),
                lambda: (torch.randn(2, 4), torch.randn(4)),
            )
        },
    ),
    Row(
        "powers-of-two",
        "scales of integers are powers of two",
        f"{TIDL}; {ESP}",
        f"""\
dtype_configs:
  a: {{input_dtype: &a {{dtype: qint8, power_of_two_scale: true}}, output_dtype: *a,
      weight_dtype: {W}, power_of_two_scale: true}}}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _powers_of_two,
        {"power-of-two-scale": Request(r.conv(), r.image(), r.asked(r.fixed(0.3)))},
    ),
    Row(
        "scales-of-a-set",
        "8-bit floats with scales of a set (exponent biases)",
        "Intel Gaudi 2: vllm-gaudi, extension/scales.py",
        """\
dtype_configs:
  a: {input_dtype: &a {dtype: float8_e4m3fn, symmetric: true, scales: [2**-8, 2**-4, 1, 2**4]},
      output_dtype: float32, weight_dtype: *a}
entries:
- {operators: [linear], dtype_configs: [a]}
""",
        Request(r.linear(), r.matrix(2, 64)),
        _scales_of_gaudi,
        {
            "scale-set": Request(
                r.linear(),
                r.matrix(2, 64),
                r.asked(
                    r.fixed(0.3, 0, torch.float8_e4m3fn),
                    ob.MinMaxObserver.with_args(
                        dtype=torch.float8_e4m3fn, qscheme=torch.per_tensor_symmetric
                    ),
                    ob.PlaceholderObserver.with_args(dtype=torch.float32),
                ),
            )
        },
    ),
    Row(
        "e4m3-ends-at-240",
        "E4M3 that ends at ±240, a scale per channel of the weight",
        "Intel Gaudi 2: neural-compressor, PT_FP8Quant.md",
        """\
dtype_configs:
  a:
    input_dtype: &a {dtype: float8_e4m3fn, symmetric: true, quant_min_lower_bound: -240, quant_max_upper_bound: 240}
    output_dtype: float32
    weight_dtype: {dtype: float8_e4m3fn, symmetric: true, granularity: per_channel, quant_min_lower_bound: -240,
                   quant_max_upper_bound: 240}
entries:
- {operators: [linear], dtype_configs: [a]}
""",
        Request(r.linear(), r.matrix(2, 64)),
        _ends_at_240,
        {
            "quant-range": Request(
                r.linear(),
                r.matrix(2, 64),
                r.asked(
                    r.activation(torch.float8_e4m3fn, r.SYMMETRIC),
                    r.weight(torch.float8_e4m3fn, None, None),
                    ob.PlaceholderObserver.with_args(dtype=torch.float32),
                ),
            )
        },
    ),
    Row(
        "groups-and-tokens",
        "int4 weights in groups that are a multiple of 32; activations of 8 bits, a scale for each token at each call",
        "XNNPACK, node_visitor; torchao, Int8DynamicActivationInt4Weight",
        """\
dtype_configs:
  a:
    input_dtype: {dtype: int8, granularity: per_token}
    weight_dtype: {dtype: int4, granularity: per_group}
    is_dynamic: true
    where: {group_size: {multiple_of: 32}}
entries:
- {operators: [linear], dtype_configs: [a]}
""",
        Request(r.linear(), r.matrix(2, 64), r.groups_and_tokens),
        _groups,
        {
            "group-size": Request(r.linear(48), r.matrix(2, 48), r.groups_and_tokens),
            "condition": Request(r.linear(), r.matrix(2, 64), lambda: r.groups_and_tokens(16)),
        },
    ),
    Row(
        "shared-by-what-moves",
        "reshape and concatenation share the scale of what they read",
        VELA,
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}}}}}
  values: {{input_dtype: qint8, output_dtype: qint8}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
- {{operators: [cat, reshape], dtype_configs: [values]}}
""",
        Request(lambda: r.Joins(lambda a, b: torch.cat((a, b))), r.image()),
        _one_scale,
        {
            "dtype": Request(
                lambda: r.Calls(lambda x: torch.cat((x, x))),
                r.image(),
                r.asked(r.activation(torch.quint8)),
            )
        },
    ),
    Row(
        "shared-by-maximum",
        "maximum and minimum: all inputs and the output share a scale",
        f"{VELA}; {QNN}",
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}}}}}
  values: {{input_dtype: qint8, output_dtype: qint8}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
- {{operators: [maximum, minimum, reshape], dtype_configs: [values]}}
""",
        Request(lambda: r.Joins(torch.maximum), r.image()),
        _one_scale,
        {
            "dtype": Request(
                lambda: r.Calls(torch.minimum),
                lambda: (torch.randn(4), torch.randn(4)),
                r.asked(r.activation(torch.quint8)),
            )
        },
    ),
    Row(
        "fixed-scale-of-a-table",
        "sigmoid gives a fixed scale (a table computes it)",
        f"{VELA}; TensorFlow Lite, quantization_spec",
        """\
dtype_configs:
  a: {input_dtype: qint8, output_dtype: {dtype: qint8, scale_exact_match: 2**-8, zero_point_exact_match: -128}}
entries:
- {operators: [sigmoid], dtype_configs: [a]}
""",
        Request(nn.Sigmoid, r.image()),
        _fixed,
        {
            "fixed-qparams": Request(
                nn.Sigmoid, r.image(), r.asked(r.activation(), output=r.activation())
            )
        },
    ),
    Row(
        "symmetric-in-fixed-out",
        "int16 tanh: symmetric input, output of the fixed scale 2⁻¹⁵",
        "TensorFlow Lite, 16x8",
        """\
dtype_configs:
  a: {input_dtype: {dtype: int16, symmetric: true},
      output_dtype: {dtype: int16, scale_exact_match: 2**-15, zero_point_exact_match: 0}}
entries:
- {operators: [tanh], dtype_configs: [a]}
""",
        Request(nn.Tanh, r.image()),
        _tanh16,
        {
            "symmetric": Request(
                nn.Tanh,
                r.image(),
                r.asked(r.activation(torch.int16), output=r.fixed(2**-15, 0, torch.int16)),
            )
        },
    ),
    Row(
        "int8-in-int16-out",
        "int8 in and int16 out in one operator",
        TIDL,
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: int16, weight_dtype: {W}}}}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _widens,
        {"dtype": Request(r.conv(), r.image(), r.asked(r.activation()))},
    ),
    Row(
        "unsigned-around-zero",
        "unsigned activations with zero point 0 and a scale that is measured",
        TIDL,
        """\
dtype_configs:
  a: {input_dtype: quint8, output_dtype: {dtype: quint8, zero_point_exact_match: 0}}
entries:
- {operators: [relu, tanh], observation_type: OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT, dtype_configs: [a]}
""",
        Request(nn.ReLU, r.image()),
        _unsigned,
        {"zero-point": Request(nn.Tanh, r.image())},
    ),
    Row(
        "kernels-strides-channels",
        "limits of kernels, strides, dilation, channels, products of them, sums of weights",
        f"{VELA}; NXP Neutron; Axis ARTPEC-9; AMD DPU PG400; {TIDL}",
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}}}}}
entries:
- operators: [conv2d]
  dtype_configs: [a]
  where:
    stride: {{min: 1, max: 3}}
    dilation_height * (kernel_height - 1) + 1: {{max: 64}}
    kernel_height * kernel_width * ceil(in_channels / 16): {{max: 4096}}
    out_channels: {{multiple_of: 8}}
    weight_sums: {{max: 8323072}}
- {{operators: [max_pool2d], dtype_configs: [{{input_dtype: qint8, output_dtype: qint8}}],
    where: {{kernel_size: {{max: 8}}}}}}
""",
        Request(r.conv(stride=3), r.image()),
        _all_quantized,
        {
            "condition stride": Request(r.conv(stride=4), r.image()),
            "condition height": Request(
                r.conv((2, 1), dilation=(64, 1)), lambda: torch.randn(1, 3, 70, 2)
            ),
            "condition product": Request(
                r.conv((64, 65), channels=1), lambda: torch.randn(1, 1, 64, 65)
            ),
            "condition channels": Request(r.conv(out=12), r.image()),
            "condition sums": Request(
                lambda: nn.Sequential(nn.Conv2d(66000, 8, 1, bias=False)).apply(_ones),
                r.image(66000, side=1),
            ),
            "condition pool": Request(lambda: nn.MaxPool2d(9), r.image(side=9)),
        },
    ),
    Row(
        "ranks-and-sizes",
        "at most four axes, batch 1, static sizes, no axis above 65535",
        f"{VELA}; NVIDIA DLA",
        """\
dtype_configs:
  a: {input_dtype: qint8, output_dtype: qint8}
entries:
- {operators: [tanh], dtype_configs: [a], where: {rank: {max: 4}, batch: 1, shape: static, dims: {max: 65535}}}
""",
        Request(nn.Tanh, r.image()),
        _both,
        {
            "condition rank": Request(nn.Tanh, r.matrix(1, 1, 2, 2, 2)),
            "condition batch": Request(nn.Tanh, r.image(batch=2)),
            "condition dims": Request(nn.Tanh, r.matrix(1, 65536)),
        },
    ),
    Row(
        "mx-blocks",
        "blocks of 32 values of E2M1 (or E4M3) with E8M0 scales: MXFP4, MXFP8",
        "AWS Neuron, EVRF039; AMD; OCP Microscaling Formats 1.0",
        """\
dtype_configs:
  mxfp4: {input_dtype: float32, output_dtype: float32, weight_dtype: {dtype: float4_e2m1fn_x2,
          granularity: per_group(size=32), scale_dtype: float8_e8m0fnu}}
  mxfp8: {input_dtype: float32, output_dtype: float32, weight_dtype: {dtype: float8_e4m3fn,
          granularity: per_group(size=32), scale_dtype: float8_e8m0fnu}}
entries:
- {operators: [linear], dtype_configs: [mxfp4, mxfp8]}
""",
        Request(r.linear(), r.matrix(2, 64), r.blocks(torch.float4_e2m1fn_x2, 32)),
        _microscaled,
        {
            "granularity": Request(r.linear(), r.matrix(2, 64), r.blocks(torch.float8_e4m3fn, 16)),
            "group-size": Request(r.linear(48), r.matrix(2, 48), r.blocks(torch.float8_e4m3fn, 32)),
        },
    ),
    Row(
        "nvfp4-blocks",
        "blocks of 16 values of E2M1 with E4M3 scales, and one scale for the tensor: NVFP4",
        "NVIDIA Blackwell, NVFP4",
        """\
dtype_configs:
  a: {input_dtype: float32, output_dtype: float32, weight_dtype: {dtype: float4_e2m1fn_x2,
      granularity: per_group(size=16), scale_dtype: float8_e4m3fn}}
entries:
- {operators: [linear], dtype_configs: [a]}
""",
        Request(r.linear(), r.matrix(2, 64), r.blocks(torch.float4_e2m1fn_x2, 16)),
        _nvfp4,
        {"dtype": Request(r.linear(), r.matrix(2, 64), r.blocks(torch.float8_e4m3fn, 16))},
    ),
    Row(
        "mx-activations",
        "activations and weights in blocks of 32 (MXFP8, MXFP4) or 16 (NVFP4), quantized at each call",
        "OCP Microscaling Formats 1.0; AMD; NVIDIA Blackwell, NVFP4",
        """\
dtype_configs:
  mxfp8: {is_dynamic: true, input_dtype: &x {dtype: float8_e4m3fn, granularity: per_group(size=32),
      scale_dtype: float8_e8m0fnu}, output_dtype: float32, weight_dtype: *x}
  mxfp4: {is_dynamic: true, input_dtype: &y {dtype: float4_e2m1fn_x2, granularity: per_group(size=32),
      scale_dtype: float8_e8m0fnu}, output_dtype: float32, weight_dtype: *y}
  nvfp4: {is_dynamic: true, input_dtype: &z {dtype: float4_e2m1fn_x2, granularity: per_group(size=16),
      scale_dtype: float8_e4m3fn}, output_dtype: float32, weight_dtype: *z}
entries:
- {operators: [linear], dtype_configs: [mxfp8, mxfp4, nvfp4]}
""",
        Request(r.linear(), r.matrix(2, 64), r.blocks_at_each_call(torch.float4_e2m1fn_x2, 32)),
        _microscaled_at_each_call,
        {
            "granularity": Request(
                r.linear(), r.matrix(2, 64), r.blocks_at_each_call(torch.float8_e4m3fn, 16)
            ),
            "group-size": Request(
                r.linear(48), r.matrix(2, 48), r.blocks_at_each_call(torch.float8_e4m3fn, 32)
            ),
        },
    ),
    Row(
        "ratio-of-scales",
        "input × weight / output scale is a power of two (or lies within a range)",
        "Axis ARTPEC-9",
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}, granularity: per_channel}},
      requantization_ratio: power_of_two, requantization: shift}}
  b: {{input_dtype: qint8, output_dtype: {{dtype: qint8, scale_exact_match: 2**-12, zero_point_exact_match: 0}},
      weight_dtype: {W}}}, requantization_ratio: [null, 2**-9]}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
- {{operators: [linear], dtype_configs: [b]}}
""",
        Request(r.conv(), r.image()),
        _ratio_is_power,
        {
            "requantization-ratio": Request(
                r.linear(), r.matrix(2, 64), r.asked(r.activation(), r.tensor_weight, r.fixed(2**-12))
            )
        },
    ),
    Row(
        "rounding",
        "halves are rounded up, sums become results by a multiplier of 32 bits and a shift",
        "Espressif ESP32-S3: ESP-DL; TensorFlow Lite",
        f"""\
dtype_configs:
  a: {{input_dtype: qint8, output_dtype: qint8, weight_dtype: {W}}}, rounding: half_up, requantization: fixed_point}}
entries:
- {{operators: [conv2d], dtype_configs: [a]}}
""",
        Request(r.conv(), r.image()),
        _half_up,
        {"dtype": Request(r.conv(), r.image(), r.asked(r.activation(torch.quint8)))},
    ),
)  # fmt: skip


def _ones(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.ones_(module.weight)
