"""The life of kernels with several weights: copies, files, casts, and what is stored of them."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from backquant.errors import ArtifactError
from backquant.lower.kernels.linear_dynamic import DynamicLinear, DynamicLinearConfig
from backquant.lower.kernels.recurrent import (
    CellConfig,
    QuantizedCell,
    QuantizedRecurrent,
    RecurrentConfig,
)
from backquant.lower.kernels.repacked import pack_linear


def _weight(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        f"{name}_scale": torch.rand(rows) * 0.01 + 0.001,
        f"{name}_zero_point": torch.zeros(rows, dtype=torch.int64),
        name.replace("weight", "bias"): torch.randn(rows),
    }


def _linear():
    kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8, True), _weight("weight", 8, 4))
    return kernel, (torch.randn(3, 4),)


def _half():
    tensors = {**_weight("weight", 8, 4), "weight": torch.randn(8, 4).half()}
    return DynamicLinear(DynamicLinearConfig("x86", torch.float16), tensors), (torch.randn(3, 4),)


def _lstm():
    config = RecurrentConfig("lstm", "fbgemm", torch.int8, 5, 2, True, True, True)
    tensors = {}
    for suffix, columns in (("_l0", 4), ("_l0_reverse", 4), ("_l1", 10), ("_l1_reverse", 10)):
        tensors |= _weight(f"weight_ih{suffix}", 20, columns) | _weight(f"weight_hh{suffix}", 20, 5)
    return QuantizedRecurrent(config, tensors), (torch.randn(2, 6, 4),)


def _cell():
    tensors = _weight("weight_ih", 15, 4) | _weight("weight_hh", 15, 5)
    kernel = QuantizedCell(CellConfig("gru", "onednn", torch.int8, 5), tensors)
    return kernel, (torch.randn(3, 4), torch.randn(3, 5))


def _values(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _values(part)]


def _same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_values(one), _values(two), strict=True))


@pytest.fixture(params=[_linear, _half, _lstm, _cell])
def case(request):
    kernel, inputs = request.param()
    return kernel, inputs, kernel(*inputs)


def test_only_buffers_are_stored(case):
    kernel, _, _ = case
    assert set(kernel.state_dict()) == set(type(kernel).buffer_names(kernel.config))
    assert not list(kernel.parameters())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_a_copy_computes_the_same_and_shares_nothing(case, way):
    kernel, inputs, expected = case
    other = way(kernel)
    assert _same(other(*inputs), expected)
    changed = {key: value.clone() for key, value in kernel.state_dict().items()}
    for key in changed:
        if key.startswith("bias"):
            changed[key] += 1
    other.load_state_dict(changed)
    assert not _same(other(*inputs), expected)
    assert _same(kernel(*inputs), expected)
    assert other.training == kernel.training


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "float"])
def test_casting_a_model_leaves_the_kernel_as_it_is(case, cast):
    kernel, inputs, expected = case
    other = getattr(copy.deepcopy(kernel), cast)()
    assert _same(other(*inputs), expected)
    dtypes = {name: buffer.dtype for name, buffer in kernel.named_buffers()}
    assert {name: buffer.dtype for name, buffer in other.named_buffers()} == dtypes


def test_it_is_rebuilt_from_json_and_tensors(case):
    kernel, inputs, expected = case
    config = json.loads(json.dumps(kernel.artifact_config()))
    other = type(kernel).from_artifact(config, dict(kernel.named_buffers()))
    assert other.config == kernel.config
    assert _same(other(*inputs), expected)


def test_a_missing_tensor_is_named(case):
    kernel, _, _ = case
    tensors = dict(kernel.named_buffers())
    gone = next(name for name in tensors if name.endswith("_scale"))
    del tensors[gone]
    with pytest.raises(ArtifactError, match=f"lacks {gone}"):
        type(kernel).from_artifact(kernel.artifact_config(), tensors)


def test_without_biases_they_are_zero(case):
    kernel, inputs, _ = case
    tensors = {n: b for n, b in kernel.named_buffers() if not n.startswith("bias")}
    zeros = {n: torch.zeros_like(b) for n, b in kernel.named_buffers() if n.startswith("bias")}
    bare = type(kernel)(kernel.config, tensors)
    assert _same(bare(*inputs), type(kernel)(kernel.config, tensors | zeros)(*inputs))
    assert _same(copy.deepcopy(bare)(*inputs), bare(*inputs))
    config = kernel.artifact_config()
    stored = dict.fromkeys(zeros) | tensors
    assert _same(type(kernel).from_artifact(config, stored)(*inputs), bare(*inputs))


def test_packing_leaves_the_process_as_it_was():
    before = torch.backends.quantized.engine
    for engine in ("fbgemm", "qnnpack", "onednn", "x86"):
        tensors = _weight("weight", 8, 4)
        pack_linear(engine, *tensors.values())
        assert torch.backends.quantized.engine == before


def test_names_say_engine_and_range(case):
    kernel, _, _ = case
    assert kernel.config.engine in kernel.name
    half = kernel.config.weight_dtype == torch.float16
    assert ("7 bits" in kernel.name) is not half
    assert kernel.name in repr(kernel)
