"""``nn.LSTM`` step by step: shapes and states as the reference module has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.nn.quantized.reference import LSTM
from backquant.nn.quantized.reference.stepped import lstm_step_by_step

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
]


def reference(**options: Any) -> LSTM:
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 5, **options)
    qparams = {
        name: {
            "qscheme": torch.per_tensor_affine,
            "dtype": torch.qint8,
            "scale": 0.01,
            "zero_point": 0,
        }
        for name, _ in lstm.named_parameters()
        if name.startswith("weight")
    }
    return LSTM.from_float(lstm, qparams)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("sizes", [(7, 3), (7,)], ids=["batch", "one sequence"])
def test_near_the_reference(options: Any, with_state: bool, sizes: tuple[int, ...]) -> None:
    lstm = reference(**options)
    x = torch.rand(*sizes, 6) - 0.3
    count = lstm.num_layers * (2 if lstm.bidirectional else 1)
    batch = () if len(sizes) == 1 else (x.shape[0 if lstm.batch_first else 1],)
    state = (torch.rand(count, *batch, 5), torch.rand(count, *batch, 5)) if with_state else None
    with torch.no_grad():
        (out, last), (wanted, states) = lstm_step_by_step(lstm, x, state), lstm(x, state)
    for found, near in zip((out, *last), (wanted, *states), strict=True):
        assert found.shape == near.shape
        assert torch.allclose(found, near, atol=0.01)
    assert not torch.equal(out, wanted)  # it does round


def test_the_rounding_is_that_of_quantize_nodes() -> None:
    register_quantized_decomposed()
    lstm = reference()
    with torch.no_grad():
        lstm.bias_ih_l0.zero_()
        lstm.bias_hh_l0.zero_()
        x = torch.tensor([[-1.0, 0.3, 0.501, 2.0, 0.0, 0.7]])
        ops = torch.ops.quantized_decomposed
        scale, zero = ops.choose_qparams.tensor(x, 0, 255, 1e-12, torch.uint8)
        rounded = ops.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        rounded = ops.dequantize_per_tensor.tensor(rounded, scale, zero, 0, 255, torch.uint8)
        assert torch.allclose(lstm_step_by_step(lstm, x)[0], lstm(rounded)[0], atol=1e-6)


def test_zeros_and_nothing_are_no_error() -> None:
    lstm = reference()
    for sizes in ((4, 2), (4, 0)):
        x = torch.zeros(*sizes, 6)
        with torch.no_grad():
            assert torch.allclose(lstm_step_by_step(lstm, x)[0], lstm(x)[0], atol=0.01)
