"""Quantizable attention, against ``nn.MultiheadAttention`` and ``torch.ao``'s."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as oracle
from torch import nn

from backquant.errors import ConfigError, InputError
from backquant.nn import quantizable
from backquant.nn.quantizable.slots import SlotQATLinear

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False, "add_zero_attn": True},
    {"add_bias_kv": True, "batch_first": True},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True},
]


def _float(qconfig: Any, **options: Any) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(8, 2, **options).eval()
    for name, parameter in attention.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    attention.qconfig = qconfig
    return attention


def _inputs(attention: nn.MultiheadAttention) -> tuple[torch.Tensor, ...]:
    shapes = [(4, 3, 8), (5, 3, attention.kdim), (5, 3, attention.vdim)]
    tensors = [torch.randn(shape) for shape in shapes]
    return tuple(t.transpose(0, 1) if attention.batch_first else t for t in tensors)


@pytest.mark.parametrize("options", OPTIONS)
def test_float_forward(options: dict[str, Any], minmax_qconfig: Any) -> None:
    attention = _float(minmax_qconfig, **options)
    ours = quantizable.MultiheadAttention.from_float(attention)
    inputs = _inputs(attention)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[:, -1] = True
    for extra in [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(4, 5)},
        {"attn_mask": torch.rand(6, 4, 5) > 0.8, "key_padding_mask": padding},
        {"need_weights": False},
        {"average_attn_weights": False},
    ]:
        one, two = ours(*inputs, **extra), attention(*inputs, **extra)
        torch.testing.assert_close(one[0], two[0], atol=1e-5, rtol=1e-4)
        if two[1] is None:
            assert one[1] is None
        else:
            torch.testing.assert_close(one[1], two[1], atol=1e-5, rtol=1e-4)


def test_unbatched(minmax_qconfig: Any) -> None:
    attention = _float(minmax_qconfig, batch_first=True)
    ours = quantizable.MultiheadAttention.from_float(attention)
    x, padding = torch.randn(4, 8), torch.tensor([False, False, False, True])
    one = ours(x, x, x, key_padding_mask=padding)
    two = attention(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}])
def test_observers_measure_what_the_oracles_do(
    options: dict[str, Any], minmax_qconfig: Any
) -> None:
    attention = _float(minmax_qconfig, **options)
    ours = quantizable.MultiheadAttention.from_float(attention)
    theirs = oracle.MultiheadAttention.from_float(attention)
    inputs = _inputs(attention)
    torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs)[0])
    state = ours.state_dict()
    missing = [key for key in theirs.state_dict() if key not in state]
    # Joined projections that nothing uses, and an observer that never sees data.
    unused = ("in_proj", "q_proj", "k_proj", "v_proj", "q_scaling_product")
    assert all(key.startswith(unused) for key in missing), missing
    assert all(key in theirs.state_dict() for key in state)
    for key, value in state.items():
        torch.testing.assert_close(value, theirs.state_dict()[key], msg=key)


def test_batch_first_is_not_scrambled(minmax_qconfig: Any) -> None:
    """PyTorch's quantizable form views heads as positions there: a difference on purpose."""
    attention = _float(minmax_qconfig, batch_first=True)
    theirs = oracle.MultiheadAttention.from_float(attention)
    inputs = _inputs(attention)
    assert not torch.allclose(theirs(*inputs)[0], attention(*inputs)[0], atol=1e-2)


@pytest.mark.parametrize("options", OPTIONS)
def test_dequantize_gives_the_float_module_back(
    options: dict[str, Any], minmax_qconfig: Any
) -> None:
    attention = _float(minmax_qconfig, **options)
    back = quantizable.MultiheadAttention.from_float(attention).dequantize()
    assert list(back.state_dict()) == list(attention.state_dict())
    for key, value in back.state_dict().items():
        assert torch.equal(value, attention.state_dict()[key])
    assert not back.training


def test_training(own_qat_qconfig: Any) -> None:
    attention = _float(own_qat_qconfig).train()
    ours = quantizable.MultiheadAttention.from_float(attention)
    assert isinstance(ours.linear_Q, SlotQATLinear)
    output, _ = ours(*_inputs(attention))
    output.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)
    assert {name for name, p in ours.named_parameters() if p.grad is None} == set()


def test_inside_an_encoder_layer(minmax_qconfig: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(3, 4, 8)
    expected = layer(x)
    layer.self_attn.qconfig = minmax_qconfig
    layer.self_attn = quantizable.MultiheadAttention.from_float(layer.self_attn)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


def test_copies_and_keywords(minmax_qconfig: Any) -> None:
    ours = quantizable.MultiheadAttention.from_float(_float(minmax_qconfig))
    x = torch.randn(4, 3, 8)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(query=x, key=x, value=x)[0], ours(x, x, x)[0])


def test_refusals(minmax_qconfig: Any) -> None:
    with pytest.raises(ConfigError, match="has no qconfig"):
        quantizable.MultiheadAttention.from_float(nn.MultiheadAttention(2, 1))
    with pytest.raises(ConfigError, match=r"takes a torch\.nn.MultiheadAttention, got Linear"):
        quantizable.MultiheadAttention.from_float(nn.Linear(2, 1))
    x = torch.randn(4, 3, 8)
    ours = quantizable.MultiheadAttention(8, 2)
    with pytest.raises(InputError, match="is_causal needs attn_mask"):
        ours(x, x, x, is_causal=True)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    assert torch.equal(
        ours(x, x, x, attn_mask=causal, is_causal=True)[0], ours(x, x, x, attn_mask=causal)[0]
    )
