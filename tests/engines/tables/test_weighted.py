"""Convolutions and linear layers: every geometry, engine and activation against the reference model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.engines import onednn
from backquant.lower import engine_info, find_engine, lower
from backquant.lower.kernels.quantized import QuantizedWeighted
from backquant.lower.machine import EngineInfo
from backquant.nn.quantized import reference as nnqr

CONVS = {1: (nn.Conv1d, nnqr.Conv1d), 2: (nn.Conv2d, nnqr.Conv2d), 3: (nn.Conv3d, nnqr.Conv3d)}
TRANSPOSED = {
    1: (nn.ConvTranspose1d, nnqr.ConvTranspose1d),
    2: (nn.ConvTranspose2d, nnqr.ConvTranspose2d),
    3: (nn.ConvTranspose3d, nnqr.ConvTranspose3d),
}
ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")


def _run(tools, reference, engine="x86"):
    return lower(reference, find_engine(engine).rules(), engine_info(engine))


def _out_qparams(tools, value, low=0, high=255):
    """Qparams that cut a tenth off both ends of ``value``, so that saturation is tested, too."""
    small, large = value.quantile(0.1).item(), value.quantile(0.9).item()
    scale = max(large - small, 0.1) / (high - low)
    zero_point = int(min(max(low - round(small / scale), low), high))
    return tools.qparams(scale, zero_point, low, high)


def _model(tools, module, x, activation=None, out_range=(0, 255), before=None):
    """quantize, module, activation, quantize."""
    before = before or tools.u8
    act = activation or (lambda value: value)
    with torch.no_grad():
        out = _out_qparams(tools, act(module(x)).float(), *out_range)

    def forward(self, value):
        return tools.qdq(act(self.op(tools.qdq(value, before))), out)

    return tools.trace(forward, op=module), out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("number", range(6))
def test_convolutions_of_any_geometry(tools, engine, dims, number):
    generator = torch.Generator().manual_seed(100 * dims + number)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    groups = pick(1, 1, 2, 3)
    inputs, outputs = groups * pick(1, 2, 5), groups * pick(1, 3, 8)
    kernel = tuple(pick(1, 2, 3) for _ in range(dims))
    make, ref = CONVS[dims]
    conv = make(
        inputs,
        outputs,
        kernel,
        stride=tuple(pick(1, 2) for _ in range(dims)),
        padding=tuple(min(pick(0, 1), k // 2) for k in kernel),
        dilation=tuple(pick(1, 1, 2) for _ in range(dims)) if engine != "qnnpack" else 1,
        groups=groups,
        bias=pick(True, False),
    )
    axis = pick(0, None)
    x = torch.randn(pick(1, 3), inputs, *(pick(7, 8, 11) for _ in range(dims))) * 3
    module = ref.from_float(conv, tools.weight_qparams(conv, axis))
    seven = tools.qparams(0.1, 60, 0, 127) if engine == "fbgemm" else None
    reference, out = _model(tools, module, x, before=seven)
    lowered = _run(tools, reference, engine)
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize("engine", ENGINES)
def test_depthwise_and_odd_channels(tools, engine):
    for channels in (1, 13, 16, 37):
        conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        x = torch.randn(2, channels, 9, 10) * 6
        module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
        seven = tools.qparams(0.1, 60, 0, 127) if engine == "fbgemm" else None
        reference, out = _model(tools, module, x, torch.relu, before=seven)
        lowered = _run(tools, reference, engine)
        assert lowered.left_in_float == ()
        tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_kernel_serves_every_batch_and_size(tools, layout):
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, torch.randn(1, 3, 9, 9))
    lowered = _run(tools, reference).graph_module
    for shape in ((1, 3, 9, 9), (5, 3, 20, 7), (2, 3, 1, 1), (0, 3, 9, 9)):
        x = torch.randn(shape).contiguous(memory_format=layout)
        tools.assert_within(lowered(x), reference(x), out.scale)


ACTIVATIONS = {
    "relu": (F.relu, True),
    "relu6": (F.relu6, True),
    "hardtanh": (lambda v: F.hardtanh(v, -0.5, 0.7), True),
    "clamp": (lambda v: v.clamp(min=-0.25), True),
    "hardswish": (F.hardswish, True),
    "silu": (F.silu, True),
    "gelu": (F.gelu, False),
    "gelu tanh": (lambda v: F.gelu(v, approximate="tanh"), False),
    "tanh": (torch.tanh, False),
    "leaky_relu": (lambda v: F.leaky_relu(v, 0.1), False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_behind_a_convolution_are_fused_where_the_kernel_can(tools, name):
    activation, fused = ACTIVATIONS[name]
    conv = nn.Conv2d(4, 8, 1)
    x = torch.randn(3, 4, 5, 5) * 3
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, x, activation)
    lowered = _run(tools, reference)
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    first = lowered.kernels[0]
    assert (len(first.nodes) == 2) is fused
    if not fused:  # the convolution gives floats, the activation is computed on them
        assert first.dtype is torch.float32
        assert [reason.rule for reason in lowered.left_in_float] == ["float-input"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_behind_a_linear_layer_are_all_fused(tools, name):
    activation, _ = ACTIVATIONS[name]
    linear = nn.Linear(6, 8)
    x = torch.randn(30, 6) * 3
    module = nnqr.Linear.from_float(linear, tools.weight_qparams(linear))
    reference, out = _model(tools, module, x, activation)
    lowered = _run(tools, reference)
    assert len(lowered.kernels) == 1
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (2, 3, 4, 6), (0, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_any_shape(tools, engine, shape, bias):
    linear = nn.Linear(6, 11, bias=bias)
    module = nnqr.Linear.from_float(linear, tools.weight_qparams(linear))
    reference, out = _model(tools, module, torch.randn(50, 6), torch.relu)
    lowered = _run(tools, reference, engine)
    assert lowered.left_in_float == ()
    x = torch.randn(shape) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("activation", [None, torch.relu, F.relu6])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_narrow_output_range_is_kept(tools, engine, activation, dims):
    conv = getattr(nn, f"Conv{dims}d")(4, 8, 3)
    x = torch.randn(3, 4, *[8] * dims) * 3
    module = getattr(nnqr, f"Conv{dims}d").from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, x, activation, out_range=(0, 127))
    lowered = _run(tools, reference, engine).graph_module
    tools.assert_within(lowered(x), reference(x), out.scale)
    top = (127 - out.zero_point) * out.scale
    assert reference(x).max().item() == pytest.approx(top)
    assert lowered(x).max().item() == pytest.approx(top)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, None])
def test_functional_forms(tools, engine, axis):
    conv_weight, fc_weight = torch.randn(8, 2, 3, 3), torch.randn(5, 8)
    middle, out = tools.qparams(0.2, 110), tools.qparams(0.1, 120)

    def integers(weight):
        scale = weight.abs().amax(tuple(range(1, weight.dim())) if axis == 0 else None) / 127
        shape = (-1, *[1] * (weight.dim() - 1)) if axis == 0 else ()
        q = (weight / scale.reshape(shape)).round().clamp(-127, 127).to(torch.int8)
        return q, scale

    (cq, cs), (fq, fs) = integers(conv_weight), integers(fc_weight)

    def weight_of(q, s, zero, literal):
        if axis == 0:
            op = torch.ops.quantized_decomposed.dequantize_per_channel.default
            return op(q, s, zero, 0, -127, 127, torch.int8)
        op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return op(q, literal, 0, -127, 127, torch.int8)

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        w = weight_of(self.cq, self.cs, self.cz, float(cs.max()))
        x = tools.qdq(F.conv2d(x, w, bias=self.cb, padding=1, stride=2, groups=2), middle)
        x = torch.flatten(tools.qdq(F.adaptive_avg_pool2d(x, 1), middle), 1)
        w = weight_of(self.fq, self.fs, self.fz, float(fs.max()))
        return tools.qdq(F.relu(F.linear(x, w, self.fb)), out)

    reference = tools.trace(
        forward,
        cq=cq,
        cs=cs,
        cz=torch.zeros(8, dtype=torch.int64),
        cb=torch.randn(8),
        fq=fq,
        fs=fs,
        fz=torch.zeros(5, dtype=torch.int64),
        fb=torch.randn(5),
    )
    lowered = _run(tools, reference, engine)
    assert lowered.left_in_float == ()
    x = torch.randn(3, 4, 8, 8) * 2
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    kept = {name.split(".")[0] for name in lowered.graph_module.state_dict()}
    assert not kept & {"cq", "cs", "cz", "fq", "fs", "fz"}  # no second copy of the weights


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("output_padding", [0, 1])
def test_transposed_convolutions(tools, engine, dims, groups, output_padding):
    make, ref = TRANSPOSED[dims]
    conv = make(4, 6, 3, stride=2, padding=1, output_padding=output_padding, groups=groups)
    x = torch.randn(2, 4, *[5] * dims) * 3
    module = ref.from_float(conv, tools.weight_qparams(conv, None))
    reference, out = _model(tools, module, x)
    lowered = _run(tools, reference, engine)
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    if engine == "qnnpack" and dims == 3:
        assert [reason.rule for reason in lowered.left_in_float] == ["dimensions"]
    else:
        made_by = "qnnpack" if engine == "qnnpack" else "fbgemm"
        assert lowered.left_in_float == ()
        assert lowered.kernels[0].kernel == f"quantized.conv_transpose{dims}d({made_by})"


def test_a_transposed_convolution_that_the_build_lacks_is_refused(tools):
    conv = nn.ConvTranspose2d(4, 6, 3)
    module = nnqr.ConvTranspose2d.from_float(conv, tools.weight_qparams(conv, None))
    engine = EngineInfo("onednn", "avx2", "2.13.0", (), (torch.uint8,), (torch.int8,))
    assert _refusal(tools, module, torch.randn(2, 4, 5, 5), engine).rule == "no-kernel"


def _refusal(tools, module, x, engine=None, **kwargs):
    reference, out = _model(tools, module, x, **kwargs)
    lowered = lower(reference, onednn.X86.rules(), engine or engine_info("x86"))
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    [reason] = lowered.left_in_float
    return reason


def test_a_kernel_of_fbgemm_that_returns_undefined_values_is_not_used(tools):
    conv = nn.ConvTranspose2d(8, 8, 2, 2)
    module = nnqr.ConvTranspose2d.from_float(conv, tools.weight_qparams(conv, None))
    reason = _refusal(tools, module, torch.randn(2, 8, 5, 5))
    assert reason.rule == "kernel-defect"
    assert "qnnpack" in reason.fix


def test_a_bias_finer_than_what_qnnpack_adds_is_refused(tools):
    linear = nn.Linear(4, 3)
    linear.weight.data.fill_(100.0)
    module = nnqr.Linear.from_float(linear, tools.weight_qparams(linear, None))

    def forward(self, value):
        return tools.qdq(self.op(tools.qdq(value, tools.qparams(1.0, 0))), tools.qparams(0.01, 0))

    reference = tools.trace(forward, op=module)
    for engine, refused in (("qnnpack", ["kernel-defect"]), ("fbgemm", [])):
        assert [each.rule for each in _run(tools, reference, engine).left_in_float] == refused


def test_a_transposed_convolution_per_channel_is_refused_with_the_fix(tools):
    conv = nn.ConvTranspose2d(4, 6, 3)
    module = nnqr.ConvTranspose2d.from_float(conv, tools.weight_qparams(conv, 1))
    reason = _refusal(tools, module, torch.randn(2, 4, 5, 5))
    assert reason.rule == "weight-granularity"
    assert "ConvTranspose2d" in reason.fix


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_other_padding_than_zeros_is_an_operator_before_the_kernel(tools, mode, engine):
    conv = nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode=mode)
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    x = torch.randn(2, 4, 5, 5)
    reference, out = _model(tools, module, x)
    lowered = _run(tools, reference, engine)
    assert lowered.left_in_float == ()
    assert [use.nodes[0] for use in lowered.kernels] == ["op"]  # paddings have no record
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    assert module.padding_mode == mode


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_same_padding(tools):
    x = torch.randn(2, 4, 9, 9)
    conv = nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1))
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, x)
    lowered = _run(tools, reference)
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
    conv = nn.Conv2d(4, 6, (2, 4), padding="same")  # one more behind than in front
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, x, F.relu)
    lowered = _run(tools, reference)
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"zero_point": torch.full((6,), 3)}, "weight-zero-point"),
        ({"dtype": torch.quint8, "zero_point": torch.full((6,), 128)}, "weight-dtype"),
        ({"dtype": torch.float16, "qscheme": None}, "weight-dtype"),
        ({"axis": 1, "scale": torch.full((4,), 0.01), "zero_point": torch.zeros(4)}, "weight-axis"),
    ],
)
def test_a_weight_that_the_kernel_cannot_hold_is_refused(tools, change, rule):
    conv = nn.Conv2d(4, 6, 3)
    module = nnqr.Conv2d.from_float(conv, {**tools.weight_qparams(conv), **change})
    reason = _refusal(tools, module, torch.randn(2, 4, 5, 5))
    assert (reason.rule, reason.node) == (rule, "op")
    assert reason.asked and reason.admitted and reason.place == "engine x86"


def test_signed_activations_of_convolutions_run_as_unsigned_ones(tools):
    signed = tools.qparams(0.05, -20, -128, 127)
    conv = nn.Conv2d(4, 6, 3)

    def forward(self, x):
        return tools.qdq(self.op(tools.qdq(x, signed)), tools.u8)

    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference = tools.trace(forward, op=module)
    lowered = _run(tools, reference)
    assert lowered.left_in_float == ()
    x = torch.randn(2, 4, 5, 5)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


NARROW = EngineInfo(
    "x86", "avx2", "2.13.0", (), (torch.uint8,), (torch.int8,), wide_accumulation=False
)


def test_without_vnni_eight_bits_are_refused_and_seven_are_not(tools):
    conv = nn.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 5, 5)
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reason = _refusal(tools, module, x, NARROW)
    assert reason.rule == "saturation"
    assert "255" in reason.asked and "VNNI" in reason.admitted and "reduce_range" in reason.fix

    seven = tools.qparams(0.05, 60, 0, 127)

    def forward(self, x):
        return tools.qdq(self.op(tools.qdq(x, seven)), tools.u8)

    reference = tools.trace(forward, op=module)
    lowered = lower(reference, onednn.X86.rules(), NARROW)
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


@pytest.mark.parametrize("kernel_size", [3, 5])
def test_depthwise_convolutions_of_eight_bits_do_not_saturate_on_fbgemm(tools, kernel_size):
    """Its depthwise kernel adds pairs of products in 16 bits; padded before, another one is taken."""
    conv = nn.Conv2d(16, 16, kernel_size, padding=kernel_size // 2, groups=16)
    nn.init.constant_(conv.weight, 0.5)
    x = torch.randn(4, 16, 6, 6).abs() * 6 + 6
    module = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference, out = _model(tools, module, x)
    lowered = _run(tools, reference, "fbgemm")
    assert lowered.left_in_float == ()
    [kernel] = [m for m in lowered.graph_module.modules() if isinstance(m, QuantizedWeighted)]
    assert kernel.config.pads_before
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


def test_padding_of_a_transposed_convolution_of_single_channels_cuts_off_results(tools):
    """Padded before, as depthwise convolutions are, its result was larger: a wrong shape, silently."""
    conv = nn.ConvTranspose2d(14, 2, (1, 2), (2, 2), (0, 1), (1, 1), groups=2)
    nn.init.constant_(conv.weight, 0.5)
    x = torch.randn(3, 14, 5, 4).abs() * 6 + 6
    module = nnqr.ConvTranspose2d.from_float(conv, tools.weight_qparams(conv, None))
    reference, out = _model(tools, module, x)
    lowered = _run(tools, reference, "fbgemm")
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


def test_a_small_weight_may_be_multiplied_by_eight_bits_without_vnni(tools):
    conv = nn.Conv2d(4, 6, 3)
    qparams = tools.weight_qparams(conv)
    qparams["scale"] = qparams["scale"] * 3
    module = nnqr.Conv2d.from_float(conv, qparams)
    x = torch.randn(2, 4, 5, 5)
    reference, out = _model(tools, module, x)
    lowered = lower(reference, onednn.X86.rules(), NARROW)
    assert lowered.left_in_float == ()
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


def test_packing_for_an_engine_leaves_the_process_wide_setting_alone(tools):
    before = torch.backends.quantized.engine
    linear = nn.Linear(6, 4)
    module = nnqr.Linear.from_float(linear, tools.weight_qparams(linear))
    reference, _ = _model(tools, module, torch.randn(5, 6))
    for engine in ENGINES:
        _run(tools, reference, engine).graph_module(torch.randn(2, 6))
        assert torch.backends.quantized.engine == before


class Computed(nn.Module):
    """Numbers of a convolution that are computed from sizes (FalconMamba pads so)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 1, 3, 3))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.function(x, self.weight)


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "native"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=4),
        lambda x, weight: F.conv2d(x, weight, stride=(1, weight.dim() - 2), groups=x.shape[1]),
        lambda x, weight: F.conv_transpose2d(x, weight, stride=weight.shape[-1] - 1, groups=4),
    ],
)
def test_numbers_that_are_computed_are_refused(backend, function):
    torch.manual_seed(0)
    model, x = Computed(function).eval(), torch.randn(2, 3, 6, 6)
    quantized = backquant.quantize(
        model, x, backend=backend, calibration=[x], slower="keep", capture="trace"
    )
    rows = {row.operator: row for row in quantized.report.rows}
    [row] = (row for name, row in rows.items() if "conv" in name)
    assert [reason.rule for reason in row.reasons] in (["arguments"], ["no-entry"])
    wanted, noise = model(x), model(x) - quantized(x)
    assert wanted.square().sum() > 100 * noise.square().sum()
