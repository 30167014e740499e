"""Which operators keep samples apart: what each rule says is tried on the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.operators.samples import _RULES, Mixed
from backquant.runtime.replay.in_parts import Result, samples_apart
from backquant.runtime.replay.record import Recording, record

N = 4
Function = Callable[..., Any]
ATEN = torch.ops.aten

X = torch.randn(N, 6, 5, 3, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 6, 3, 3)
TABLE, BIAS, SIX = torch.randn(5, 9), torch.randn(7), torch.randn(6)
SAMPLES = torch.arange(4.0).view(4, 1)
HELD = [W, TABLE, BIAS, SIX, SAMPLES]  # what a model holds


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 64, torch.quint8)


APART: dict[str, Function] = {
    "clone": lambda x: x.clone(),
    "mul": lambda x: x * x * 0.3,
    "mul_": lambda x: (x + 1).mul_(x),
    "add": lambda x: x + x + 0.3,
    "add_": lambda x: (x * 2).add_(x),
    "sub": lambda x: x - 0.7,
    "sub_": lambda x: (x * 2).sub_(x),
    "div": lambda x: x / 0.3,
    "div_": lambda x: (x + 1).div_(x),
    "abs": torch.abs,
    "abs_": lambda x: (x + 1).abs_(),
    "neg": torch.neg,
    "neg_": lambda x: (x + 1).neg_(),
    "sqrt": lambda x: x.abs().sqrt(),
    "sqrt_": lambda x: x.abs().sqrt_(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "reciprocal": torch.reciprocal,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "eq": lambda x: x == x.relu(),
    "ne": lambda x: x != x.relu(),
    "lt": lambda x: x < 0.1,
    "le": lambda x: x <= 0.1,
    "gt": lambda x: x > 0.1,
    "ge": lambda x: x >= 0.1,
    "logical_and": lambda x: torch.logical_and(x > 0, x < 1),
    "logical_or": lambda x: torch.logical_or(x < 0, x > 1),
    "logical_not": torch.logical_not,
    "bitwise_and": lambda x: torch.bitwise_and(x > 0, x < 1),
    "bitwise_or": lambda x: torch.bitwise_or(x < 0, x > 1),
    "bitwise_not": lambda x: ~(x > 0),
    "relu": torch.relu,
    "relu_": lambda x: (x + 1).relu_(),
    "clamp_": lambda x: (x + 1).clamp_(0.1, 1.0),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_min_": lambda x: (x + 1).clamp_min_(0.1),
    "hardtanh_": lambda x: F.hardtanh_(x + 1),
    "hardsigmoid": F.hardsigmoid,
    "hardsigmoid_": lambda x: ATEN.hardsigmoid_(x + 1),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.13),
    "leaky_relu_": lambda x: F.leaky_relu_(x + 1, 0.13),
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "_to_copy": lambda x: x.to(torch.float64),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "dequantize": lambda x: quantized(x).dequantize(),
    "quantize_per_tensor": lambda x: quantized(x).dequantize(),
    "int_repr": lambda x: quantized(x).int_repr(),
    "_make_per_tensor_quantized_tensor": lambda x: torch._make_per_tensor_quantized_tensor(
        (x > 0).to(torch.uint8), 0.1, 3
    ).dequantize(),
    "detach": lambda x: x.detach() + 1,
    "alias": lambda x: ATEN.alias(x) + 1,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "view": lambda x: x.view(-1, 3) * 2,
    "_unsafe_view": lambda x: ATEN._unsafe_view(x, [x.size(0), 2, 45]) * 2,
    "expand": lambda x: x[:, :, :1].expand(-1, -1, 7, -1).clone(),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: torch.ones_like(x) + x,
    "full_like": lambda x: torch.full_like(x, 3) + x,
    "permute": lambda x: x.permute(1, 3, 0, 2).clone(),
    "transpose": lambda x: x.transpose(0, 3).clone(),
    "t": lambda x: x[:, 0, 0].t().clone(),
    "select": lambda x: x.transpose(0, 2).select(0, 1) + 1,
    "unbind": lambda x: x.unbind(1)[2] + 1,
    "slice": lambda x: ATEN.slice(x, 0, 0, 2**63 - 1)[:, 1:5:2] + 1,
    "split": lambda x: x.split(2, 1)[1] + 1,
    "split_with_sizes": lambda x: x.split([1, 5], 1)[1] + 1,
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "masked_fill_": lambda x: (x + 1).masked_fill_(x > 0, 3.0),
    "_prelu_kernel": lambda x: F.prelu(x, SIX),
    "reflection_pad1d": lambda x: F.pad(x.flatten(2), (1, 2), "reflect"),
    "hardswish": F.hardswish,
    "hardswish_": lambda x: ATEN.hardswish_(x + 1),
    "flip": lambda x: x.flip(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(0) + 1,
    "squeeze": lambda x: x[:, :1].transpose(0, 1).squeeze(0) + 1,
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "stack": lambda x: torch.stack([x, x + 1], 0),
    "constant_pad_nd": lambda x: F.pad(x, (1, 2, 0, 1)),
    "reflection_pad2d": lambda x: F.pad(x, (1, 2, 0, 1), "reflect"),
    "replication_pad2d": lambda x: F.pad(x, (1, 2, 0, 1), "replicate"),
    "embedding": lambda x: F.embedding((x > 0).to(torch.int64).flatten(1), TABLE),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 2),
    "max_pool3d_with_indices": lambda x: F.max_pool3d(x.unsqueeze(1), 2),
    "quantized_max_pool1d": lambda x: torch.quantized_max_pool1d(
        quantized(x.flatten(2)), [2]
    ).dequantize(),
    "quantized_max_pool2d": lambda x: torch.quantized_max_pool2d(quantized(x), [2, 2]).dequantize(),
    "upsample_nearest1d": lambda x: F.interpolate(x.flatten(2), scale_factor=2),
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2),
    "as_strided_": lambda x: (x + 1).as_strided_(x.shape, x.stride()),
}
#: Operators that are called in inference mode, which are made of others elsewhere.
OF_PARTS: dict[str, Function] = {
    "prelu": lambda x: F.prelu(x, SIX),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "to": lambda x: x.to(torch.float64),
    "reshape": lambda x: x.transpose(1, 2).reshape(x.size(0), -1) + 1,
    "flatten": lambda x: x.flatten(1, 2) + 1,
    "unflatten": lambda x: x.unflatten(1, (2, 3)) + 1,
    "narrow": lambda x: x.narrow(1, 2, 3) + 1,
    "chunk": lambda x: x.chunk(2, 1)[1] + 1,
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool3d": lambda x: F.max_pool3d(x.unsqueeze(1), 2),
}
#: What PyTorch computes in an order, or by code, that sizes and places decide.
OF_OTHER_BITS: dict[str, Function] = {
    "cumsum": lambda x: x.cumsum(1),
    "_softmax": lambda x: x.softmax(1),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "_safe_softmax": lambda x: ATEN._safe_softmax(x, -1),
    "upsample_bicubic2d": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "glu": lambda x: F.glu(x, 1),
    "mean": lambda x: x.mean((2, 3), True),
    "sum": lambda x: x.transpose(0, 1).sum(0),
    "amax": lambda x: x.amax((1,)),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "amin": lambda x: x.amin((-1,), True),
    "native_layer_norm": lambda x: F.layer_norm(x, (5, 3)),
    "native_batch_norm": lambda x: F.batch_norm(x, SIX, SIX.exp()),
    "native_group_norm": lambda x: F.group_norm(x, 2),
    "mm": lambda x: x.flatten(1) @ torch.ones(90, 7),
    "addmm": lambda x: F.linear(x.flatten(1), torch.ones(7, 90), BIAS),
    "bmm": lambda x: torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2)),
    "convolution": lambda x: ATEN.convolution(x, W, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "mkldnn_convolution": lambda x: ATEN.mkldnn_convolution(x, W, None, [1, 1], [1, 1], [1, 1], 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x.unsqueeze(1), 2),
    "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 2)),
    "_adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.unsqueeze(1), (2, 2, 2)),
    "upsample_bilinear2d": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "_scaled_dot_product_flash_attention_for_cpu": lambda x: (
        ATEN._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]
    ),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (5, 3)),
    "batch_norm": lambda x: F.batch_norm(x, SIX, SIX.exp()),
    "linear": lambda x: F.linear(x.flatten(1), torch.ones(7, 90), BIAS),
    "matmul": lambda x: (x @ x.transpose(2, 3)) @ torch.ones(5, 2),
    "conv1d": lambda x: F.conv1d(x.flatten(2), W[..., 0]),
    "conv2d": lambda x: F.conv2d(x, W, padding=1),
    "conv3d": lambda x: F.conv3d(x.unsqueeze(2), W.unsqueeze(2), padding=(0, 1, 1)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x.flatten(2), 3),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 2)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.unsqueeze(1), (2, 2, 2)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "exp": torch.exp,
    "two operations": lambda x: torch.add(x, x, alpha=0.3),
    "halves": lambda x: x.half() + 1,
    "integers of floats": lambda x: x.to(torch.int32) + 1,
    "a mean of what is held": lambda x: x * W.mean(),
}
MORE: dict[str, Function] = {
    "what is the same for all, broadcast": lambda x: x * torch.ones(6, 5, 1) + torch.ones(1),
    "a token for each sample": lambda x: torch.cat(
        [torch.ones(1, 6, 5, 3).expand(x.size(0), -1, -1, -1), x], 2
    ),
    "zeros for each sample": lambda x: torch.zeros(x.size(0), 6, 5, 3).add_(x),
    "windows": lambda x: x.view(-1, 2, 3, 5, 3).transpose(1, 2).reshape(-1, 2, 15) * 2,
    "views and a reshape": lambda x: x.transpose(1, 2).reshape(x.size(0), -1) + 1,
    "heads behind rows": lambda x: x.permute(1, 0, 2, 3).reshape(6, -1, 5, 3).relu()[0] + 1,
}
MIXED: dict[str, Function] = {
    "mean over samples": lambda x: x - x.mean(0, True),
    "sum of all": lambda x: x + x.sum(),
    "neighbours": lambda x: x.roll(1, 0),
    "one sample": lambda x: x + x[0],
    "every other one": lambda x: x[::2] + 1,
    "a cut through samples": lambda x: x.reshape(2, -1) + 1,
    "what lies differently": lambda x: x.reshape(2, -1, 6).sum(0) + 1,
    "samples of another dimension": lambda x: x[:, :4, 0, 0] + x[:, :4, 0, 0].t(),
    "a table with a row for each sample": lambda x: x + SAMPLES.expand(4, 6)[:, :, None, None],
    "a mask that lies along heads": lambda x: F.scaled_dot_product_attention(
        x[:, :4], x[:, :4], x[:, :4], x[:, 0, :, :1].expand(-1, -1, 5)
    ),
    "norm of all": lambda x: x / x.norm(),
    "statistics of the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "sorted": lambda x: x.sort(0)[0],
    "norm over samples": lambda x: F.layer_norm(x, tuple(x.shape)),
    "something for each sample": lambda x: x + torch.arange(4.0).view(4, 1, 1, 1),
    "softmax over samples": lambda x: x.softmax(0),
    "padded by samples": lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0)),
    "joined samples": lambda x: torch.cat([x, x], 0),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "written into": lambda x: x.view(-1).relu_() + 1,
    "product over samples": lambda x: x.flatten(1).t() @ torch.ones(4, 2),
    "weights of each sample": lambda x: F.conv2d(x, x),
    "memory": lambda x: x.as_strided((4, 3), (1, 2)) + 1,
    "bits that a batch was rounded by": lambda x: torch.quantize_per_tensor_dynamic(
        x, torch.quint8, False
    ).dequantize(),
}


def apart(
    function: Function, x: torch.Tensor, inference: bool = False
) -> tuple[Any, Recording, list[Result]]:
    with torch.inference_mode(inference), torch.no_grad():
        result, recording = record(function, (x.clone(),), {}, lambda: HELD)
    assert isinstance(recording, Recording), recording
    return result, recording, samples_apart(recording, {recording.inputs[0]: 0}, x.size(0)).results


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [value.clone().flatten().contiguous().view(torch.uint8) for value in (one, other)]
    return one.dtype == other.dtype and torch.equal(*pair)


def check(function: Function, x: torch.Tensor, inference: bool) -> None:
    result, _, (found,) = apart(function, x, inference)
    assert found.samples is not None
    rows = result.size(found.samples) // x.size(0)
    for i in range(x.size(0)):
        block = result.narrow(found.samples, i * rows, rows)
        assert same_bits(block, function(x.narrow(0, i, 1)))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*APART, *OF_PARTS, *MORE])
def test_a_block_of_the_result_is_that_of_the_sample(name: str, inference: bool) -> None:
    check((APART | OF_PARTS | MORE)[name], X, inference)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OF_OTHER_BITS)
def test_what_may_have_other_bits_in_another_batch_is_refused(name: str, inference: bool) -> None:
    with pytest.raises(Mixed):
        apart(OF_OTHER_BITS[name], X, inference)


@pytest.mark.parametrize("name", [*APART, *OF_PARTS])
def test_a_value_has_the_same_bits_wherever_it_stands(name: str) -> None:
    """In vectors, and behind the last whole one; values that are special, too."""
    special = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        3.0,
        -3.0,
        1e38,
        -1e38,
        1e-45,
        0.5,
        1.5,
        1e10,
        -1e10,
    ]
    x = torch.cat([torch.randn(4000) * 10**k for k in range(-2, 3)] + [torch.tensor(special)])
    x = x[torch.randperm(x.numel())][: 200 * 90].view(200, 6, 5, 3)
    with torch.no_grad():
        function = (APART | OF_PARTS)[name]
        whole = function(x)
        _, _, (found,) = apart(function, x, name in OF_PARTS)
        rows = whole.size(found.samples) // len(x)
        for i in range(0, len(x), 7):
            block = whole.narrow(found.samples, i * rows, rows)
            assert same_bits(block, function(x[i : i + 1].clone()))


@pytest.mark.parametrize("name", [*APART, *OF_PARTS])
def test_the_operator_of_the_name_was_called(name: str) -> None:
    _, recording, _ = apart((APART | OF_PARTS)[name], X, name in OF_PARTS)
    assert f"aten::{name}" in {call.operator._schema.name for call in recording.calls}


def test_every_row_of_the_table_is_tried() -> None:
    rows = {name.partition("::")[2] for name in _RULES if name.startswith("aten::")}
    assert rows == {*APART, *OF_PARTS}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_refused(name: str, inference: bool) -> None:
    with pytest.raises(Mixed):
        apart(MIXED[name], X, inference)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_views_in_any_order_keep_blocks_or_are_refused(data: st.DataObject) -> None:
    """Views, permutations and selections in a row, of a batch of three whose other sizes are three, too."""
    steps = []
    x: torch.Tensor = torch.arange(3.0 * 3 * 2 * 6).view(3, 3, 2, 6)
    y = x
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["permute", "merge", "cut", "select"]))
        dim = data.draw(st.integers(0, y.dim() - 1))
        if kind == "permute":
            steps.append(("permute", tuple(data.draw(st.permutations(range(y.dim()))))))
        elif kind == "merge" and dim + 1 < y.dim():
            steps.append(("merge", dim))
        elif kind == "cut" and y.size(dim) % 3 == 0 and y.size(dim) > 3:
            steps.append(("cut", dim))
        elif y.dim() > 1 and kind == "select":
            steps.append((kind, dim))
        y = _stepped(x, steps)

    def function(z: torch.Tensor) -> torch.Tensor:
        return _stepped(z, steps) + 1

    try:
        result, _, (found,) = apart(function, x)
    except Mixed:
        return
    assert found.samples is not None
    changed = x.clone()
    changed[1] += 1000
    rows = result.size(found.samples) // 3
    differs = (function(changed) != result).movedim(found.samples, 0).reshape(3 * rows, -1).any(1)
    expected = [rows <= i < 2 * rows for i in range(3 * rows)]
    assert differs.tolist() == expected


def _stepped(x: torch.Tensor, steps: list[tuple[str, Any]]) -> torch.Tensor:
    for kind, how in steps:
        if kind == "permute":
            x = x.permute(how)
        elif kind == "merge":
            x = x.flatten(how, how + 1)
        elif kind == "cut":
            x = x.unflatten(how, (3, -1))
        else:
            x = x.select(how, 0)
    return x
