from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from backquant.errors import ArtifactError, InputError
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors


def _tensors(*shape: int) -> WeightTensors:
    return WeightTensors(
        torch.randint(-127, 128, shape, dtype=torch.int8),
        torch.rand(shape[0]) * 0.01 + 0.001,
        torch.zeros(shape[0], dtype=torch.int64),
        torch.randn(shape[0]),
    )


def _conv():
    config = ConvConfig((1, 1), (1, 1), (1, 1), 1, 0.05, 100, 0.3, 120, torch.uint8, "relu")
    return OnednnConv(config, _tensors(8, 4, 3, 3)), (_input(2, 4, 6, 6),)


def _conv_add():
    config = ConvAddConfig((1, 1), (1, 1), (1, 1), 1, 0.05, 100, 0.2, 9, 0.3, 120, relu=True)
    return OnednnConvAdd(config, _tensors(8, 4, 3, 3)), (_input(2, 4, 6, 6), _input(2, 8, 6, 6))


def _linear():
    config = LinearConfig(0.05, 100, 0.3, 120, torch.uint8, "hardtanh", (0.0, 3.0))
    return OnednnLinear(config, _tensors(8, 4)), (_input(5, 4),)


def _input(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.fixture(params=[_conv, _conv_add, _linear])
def case(request):
    kernel, inputs = request.param()
    return kernel, inputs, kernel(*inputs)


def test_nothing_packed_is_stored(case):
    kernel, _, _ = case
    assert set(kernel.state_dict()) == {"weight", "weight_scale", "weight_zero_point", "bias"}
    assert kernel.state_dict()["weight"].dtype is torch.int8


@pytest.mark.parametrize("way", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_a_copy_computes_the_same_and_shares_nothing(case, way):
    kernel, inputs, expected = case
    other = way(kernel)
    assert torch.equal(other(*inputs), expected)
    other.load_state_dict({key: value * 0 for key, value in other.state_dict().items()})
    assert torch.equal(kernel(*inputs), expected)
    assert other.training == kernel.training


def test_a_loaded_weight_is_used(case):
    kernel, inputs, expected = case
    other = copy.deepcopy(kernel)
    changed = {key: value.clone() for key, value in kernel.state_dict().items()}
    changed["weight"] = -changed["weight"]
    other.load_state_dict(changed)
    assert not torch.equal(other(*inputs), expected)
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(*inputs), expected)


def test_casting_a_model_leaves_the_kernel_as_it_is(case):
    kernel, inputs, expected = case
    other = copy.deepcopy(kernel)
    before = {name: buffer.clone() for name, buffer in kernel.named_buffers()}
    for cast in (other.double, other.half, other.bfloat16):
        assert torch.equal(cast()(*inputs), expected)
        for name, buffer in other.named_buffers():  # not a digit of a scale is lost
            assert torch.equal(buffer, before[name]) and buffer.dtype == before[name].dtype
    assert torch.equal(other.to("cpu")(*inputs), expected)


def test_it_is_rebuilt_from_json_and_tensors(case):
    kernel, inputs, expected = case
    config = json.loads(json.dumps(kernel.artifact_config()))
    other = type(kernel).from_artifact(config, dict(kernel.named_buffers()))
    assert other.config == kernel.config
    assert torch.equal(other(*inputs), expected)


def test_a_missing_tensor_is_named(case):
    kernel, _, _ = case
    with pytest.raises(ArtifactError, match="weight_scale"):
        type(kernel).from_artifact(kernel.artifact_config(), {"weight": kernel.weight})


def test_a_kernel_without_bias(case):
    kernel, inputs, _ = case
    tensors = WeightTensors(kernel.weight, kernel.weight_scale, kernel.weight_zero_point, None)
    bare = type(kernel)(kernel.config, tensors)
    zero = WeightTensors(tensors.weight, tensors.scale, tensors.zero_point, torch.zeros(8))
    assert torch.equal(bare(*inputs), type(kernel)(kernel.config, zero)(*inputs))
    assert torch.equal(copy.deepcopy(bare)(*inputs), bare(*inputs))


def test_one_packed_weight_per_size_for_the_first_sizes(case):
    kernel, inputs, _ = case
    for size in range(1, 9):
        grown = [x[..., :1].expand(*x.shape[:-1], size).contiguous() for x in inputs]
        if isinstance(kernel, OnednnLinear):
            grown = list(inputs)
        fresh = copy.deepcopy(kernel)
        assert torch.equal(kernel(*grown), fresh(*grown))
    assert len(kernel._packed) == (1 if isinstance(kernel, OnednnLinear) else 3)


def test_a_pointwise_convolution_has_one_packed_weight():
    config = ConvConfig((1, 1), (0, 0), (1, 1), 1, 0.05, 100, 0.3, 120, torch.uint8)
    kernel = OnednnConv(config, _tensors(8, 4, 1, 1))
    for size in range(1, 9):
        out = kernel(_input(2, 4, size, size))
        assert out.shape == (2, 8, size, size)
        assert out.is_contiguous(memory_format=torch.channels_last)
    assert len(kernel._packed) == 1


def test_a_result_of_padding_alone_is_refused():
    """PyTorch's float convolutions refuse empty maps; a result without values would be other memory."""
    kernel, _ = _conv()
    with pytest.raises(InputError):
        kernel(_input(2, 4, 0, 6))
    assert kernel(_input(0, 4, 6, 6)).shape == (0, 8, 6, 6)
