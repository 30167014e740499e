"""Reference convolutions against ``torch.ao``'s."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as oracle
from tests.nn.quantized.reference.rounding import same_integers
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantized import reference

NAMES = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
KINDS = [
    "per_tensor_symmetric",
    "per_tensor_affine",
    "per_channel_symmetric",
    "per_channel_affine",
    "int32",
]


def random_conv(name: str, rng: random.Random) -> tuple[nn.Module, torch.Tensor]:
    """A convolution of random geometry and an input that fits it."""
    dimensions = int(name[-2])
    groups = rng.choice([1, 1, 2])
    arguments: dict[str, Any] = {
        "in_channels": groups * rng.randint(1, 3),
        "out_channels": groups * rng.randint(1, 3),
        "kernel_size": tuple(rng.randint(1, 3) for _ in range(dimensions)),
        "stride": rng.randint(1, 3),
        "padding": rng.randint(0, 2),
        "dilation": rng.randint(1, 2),
        "groups": groups,
        "bias": rng.random() < 0.7,
    }
    if "Transpose" in name:
        arguments["output_padding"] = 1 if arguments["stride"] > 1 else 0
    elif rng.random() < 0.3:
        arguments.update(padding="same", stride=1, kernel_size=3)
    conv = getattr(nn, name)(**arguments)
    size = [rng.randint(6, 9) for _ in range(dimensions)]
    return conv, torch.randn(2, arguments["in_channels"], *size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_bit_equal(name: str, kind: str, qparams: Any) -> None:
    rng = random.Random(name + kind)
    for _ in range(12):
        conv, x = random_conv(name, rng)
        axis = 1 if "Transpose" in name else 0
        asked = qparams(conv.weight, kind, axis)
        ours = getattr(reference, name).from_float(conv, asked)
        theirs = getattr(oracle, name).from_float(conv, asked)
        integers = theirs.get_quantized_weight().int_repr()
        assert same_integers(ours.weight, integers)
        if not torch.equal(ours.weight, integers):
            continue
        assert torch.equal(ours.dequantized_weight(), theirs.get_weight())
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("name", NAMES[:3])
def test_padding_modes_are_applied(name: str, mode: str, qparams: Any) -> None:
    """PyTorch's reference modules pad with zeros whatever the mode: a difference on purpose."""
    conv = getattr(nn, name)(2, 3, 3, padding=1, padding_mode=mode)
    asked = qparams(conv.weight, "per_channel_symmetric")
    x = torch.randn(2, 2, *[6] * int(name[-2]))
    ours = getattr(reference, name).from_float(conv, asked)
    theirs = getattr(oracle, name).from_float(conv, asked)
    conv.weight.data = ours.dequantized_weight()
    assert torch.equal(ours(x), conv(x))
    assert not torch.equal(ours(x), theirs(x))


def test_output_size_of_transposed(qparams: Any) -> None:
    """PyTorch's reference modules raise on it: a difference on purpose."""
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2)
    ours = reference.ConvTranspose2d.from_float(
        conv, qparams(conv.weight, "per_channel_symmetric", 1)
    )
    x = torch.randn(1, 2, 4, 4)
    conv.weight.data = ours.dequantized_weight()
    assert torch.equal(ours(x, output_size=[10, 10]), conv(x, output_size=[10, 10]))


@pytest.mark.parametrize("name", NAMES)
def test_from_float_leaves_the_module_alone(name: str, qparams: Any) -> None:
    conv, x = random_conv(name, random.Random(name))
    before = {key: value.clone() for key, value in conv.state_dict().items()}
    made = getattr(reference, name).from_float(
        conv.eval(), qparams(conv.weight, "per_tensor_affine")
    )
    assert not made.training
    for value in made.state_dict().values():
        value.zero_()
    for key, value in conv.state_dict().items():
        assert torch.equal(value, before[key])
    assert isinstance(conv.weight, nn.Parameter)
    assert made(x).shape == conv(x).shape


@pytest.mark.parametrize("name", NAMES)
def test_constructor_takes_the_float_arguments(name: str) -> None:
    made = getattr(reference, name)(4, 6, 3, stride=2, bias=False)
    assert made.weight.dtype == torch.uint8
    assert made.bias is None
    assert made.weight.shape == getattr(nn, name)(4, 6, 3).weight.shape
    assert made._get_name() == f"Quantized{name}(Reference)"
    assert not list(made.parameters())


def test_positional_arguments_are_those_of_the_oracle(qparams: Any) -> None:
    conv = nn.Conv2d(2, 4, 3)
    asked = qparams(conv.weight, "per_channel_symmetric")
    arguments = (2, 4, 3, 2, 1, 1, 2, False, "zeros", None, None, asked)
    torch.manual_seed(3)
    ours = reference.Conv2d(*arguments)
    torch.manual_seed(3)
    theirs = oracle.Conv2d(*arguments)
    x = torch.randn(1, 2, 7, 7)
    assert torch.equal(ours(x), theirs(x))


def test_scales_on_the_wrong_axis_are_refused(qparams: Any) -> None:
    conv = nn.ConvTranspose2d(3, 5, 2)
    with pytest.raises(ConfigError, match="do not fit") as error:
        reference.ConvTranspose2d.from_float(
            conv, {**qparams(conv.weight, "per_channel_affine", 1), "axis": 0}
        )
    assert "ConvTranspose2d" in error.value.where


def test_a_module_without_weight_is_refused(qparams: Any) -> None:
    with pytest.raises(ConfigError, match="ReLU has no float weight"):
        reference.Conv2d.from_float(nn.ReLU(), qparams(torch.ones(2, 2), "per_tensor_affine"))
