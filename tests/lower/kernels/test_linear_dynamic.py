from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.errors import InputError
from backquant.lower.kernels.linear_dynamic import DynamicLinear, DynamicLinearConfig

ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")


def _tensors(dtype: torch.dtype = torch.int8) -> dict[str, torch.Tensor]:
    weight = torch.randint(-127, 128, (8, 16)).to(dtype)
    scale = torch.rand(8) * 0.01 if dtype == torch.int8 else torch.ones(1)
    return {
        "weight": weight if dtype == torch.int8 else weight / 64,
        "weight_scale": scale,
        "weight_zero_point": torch.zeros(scale.numel(), dtype=torch.int64),
        "bias": torch.randn(8),
    }


def _float(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    weight = tensors["weight"].float()
    if tensors["weight"].dtype == torch.int8:
        weight = weight * tensors["weight_scale"].unsqueeze(1)
    return F.linear(x, weight, tensors["bias"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (0, 16), (2, 0, 16)])
def test_inputs_of_any_rank(engine, shape):
    tensors = _tensors()
    x = torch.randn(shape)
    out = DynamicLinear(DynamicLinearConfig(engine, torch.int8), tensors)(x)
    expected = _float(tensors, x)
    assert out.shape == expected.shape
    if x.numel():
        step = (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255
        bound = 0.51 * step * tensors["weight"].float().abs().sum(1) * tensors["weight_scale"]
        assert ((out - expected).abs() <= bound + 1e-5).all()


def test_seven_bits_are_coarser_than_eight():
    tensors, x = _tensors(), torch.randn(64, 16)
    errors = {}
    for reduced in (False, True):
        kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8, reduced), tensors)
        errors[reduced] = (kernel(x) - _float(tensors, x)).abs().mean()
    assert 1.5 < errors[True] / errors[False] < 2.5


@pytest.mark.parametrize("engine", ["fbgemm", "x86"])
def test_float16_weights_meet_float32_inputs(engine):
    tensors, x = _tensors(torch.float16), torch.randn(5, 16)
    kernel = DynamicLinear(DynamicLinearConfig(engine, torch.float16), tensors)
    assert torch.allclose(kernel(x), _float(tensors, x), atol=1e-4)
    assert torch.equal(kernel(x[0]), kernel(x)[0])


ACTIVATIONS = {
    "relu": (F.relu, (), ""),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 2.0), (-0.5, 2.0), ""),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), (0.2,), ""),
    "tanh": (torch.tanh, (), ""),
    "hardswish": (F.hardswish, (), ""),
    "swish": (F.silu, (), ""),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), (), "tanh"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("post_op", ACTIVATIONS)
def test_activations(engine, post_op):
    function, numbers, algorithm = ACTIVATIONS[post_op]
    tensors, x = _tensors(), torch.randn(5, 16)
    plain = DynamicLinear(DynamicLinearConfig(engine, torch.int8), tensors)
    config = DynamicLinearConfig(engine, torch.int8, False, post_op, numbers, algorithm)
    assert torch.equal(DynamicLinear(config, tensors)(x), function(plain(x)))


def test_the_result_has_the_dtype_of_the_input():
    kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8), _tensors())
    x = torch.randn(3, 16).half()
    assert kernel(x).dtype == torch.float16
    assert torch.equal(kernel(x), kernel(x.float()).half())
    for other in (x.double(), x.long(), x[:, 1:]):
        with pytest.raises(InputError, match="16-bit floats"):
            kernel(other)


def test_the_input_need_not_be_contiguous():
    kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8), _tensors())
    x = torch.randn(16, 7).T
    assert torch.equal(kernel(x), kernel(x.contiguous()))
