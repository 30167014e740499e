"""Counts of operators, against what their definitions say."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from backquant.graph.costs import FORMULAS, MultiplyAdds, has_no_formula

X = torch.randn(2, 5, 8)
PROJECTIONS = 4 * 2 * 5 * 8 * 8
PRODUCTS = 2 * 2 * 5 * 5 * 8
OFFSETS = torch.tensor([3, 8], dtype=torch.int32)


def _attention(**kwargs: bool) -> Callable[[], object]:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return lambda: layer(X, X, X, **kwargs)


def _encoder() -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    return lambda: layer(X)


CASES: dict[str, tuple[Callable[[], object], int]] = {
    "linear": (lambda: F.linear(X, torch.ones(3, 8)), 2 * 5 * 8 * 3),
    "einsum": (lambda: torch.einsum("bij,bkj->bik", X, X), 2 * 5 * 5 * 8),
    "matrix times vector": (lambda: torch.mv(torch.ones(3, 4), torch.ones(4)), 12),
    "dot": (lambda: torch.dot(torch.ones(4), torch.ones(4)), 4),
    "addbmm": (lambda: torch.addbmm(torch.ones(5, 5), X, X.mT), 2 * 5 * 5 * 8),
    "grouped convolution": (
        lambda: F.conv2d(torch.ones(2, 4, 6, 6), torch.ones(8, 2, 3, 3), groups=2),
        2 * 8 * 4 * 4 * 2 * 9,
    ),
    "transposed convolution": (
        lambda: F.conv_transpose2d(
            torch.ones(2, 4, 5, 5), torch.ones(4, 3, 3, 3), stride=2, groups=2
        ),
        2 * 4 * 25 * 3 * 9,
    ),
    "conv_tbc": (
        lambda: torch.conv_tbc(torch.ones(6, 2, 3), torch.ones(3, 3, 5), torch.ones(5)),
        4 * 2 * 3 * 3 * 5,
    ),
    "distances of few rows": (
        lambda: torch.cdist(torch.ones(2, 3, 4), torch.ones(2, 5, 4)),
        2 * 3 * 5 * 4,
    ),
    "distances of many": (lambda: torch.cdist(torch.ones(40, 4), torch.ones(50, 4)), 40 * 50 * 4),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5)(torch.ones(2, 3), torch.ones(2, 4)), 2 * 3 * 4 * 5),
    "grouped matrix product": (
        lambda: F.grouped_mm(torch.ones(8, 16), torch.ones(2, 16, 32), offs=OFFSETS),
        8 * 16 * 32,
    ),
    "grouped batches": (
        lambda: F.grouped_mm(torch.ones(2, 8, 16), torch.ones(2, 16, 32)),
        2 * 8 * 16 * 32,
    ),
    "attention": (lambda: F.scaled_dot_product_attention(X, X, X), PRODUCTS),
    "attention layer": (_attention(), PROJECTIONS + PRODUCTS),
    "attention layer without weights": (_attention(need_weights=False), PROJECTIONS + PRODUCTS),
    "encoder layer": (_encoder(), PROJECTIONS + PRODUCTS + 2 * 2 * 5 * 8 * 16),
    "lstm": (lambda: nn.LSTM(4, 6).eval()(torch.ones(5, 3, 4)), 15 * 24 * 10),
    "rnn": (
        lambda: nn.RNN(4, 6, nonlinearity="relu").eval()(torch.ones(5, 3, 4)),
        15 * 6 * 10,
    ),
    "nothing": (lambda: torch.relu(X) + torch.fft.rfft(X).abs()[..., :1], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_counts(name: str) -> None:
    run, expected = CASES[name]
    with torch.no_grad(), MultiplyAdds() as counter:
        run()
    assert (counter.count, counter.unknown) == (expected, [])


def test_a_padded_batch_is_counted_without_its_padding() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    from_mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch._nested_tensor_from_mask(X, ~from_mask, mask_check=False)
    with torch.no_grad(), MultiplyAdds() as counter:
        layer(nested)
    linears = 8 * (4 * 64 + 2 * 8 * 16)
    assert (counter.count, counter.unknown) == (linears + 2 * (25 + 9) * 8, [])


def test_what_has_no_formula_is_named() -> None:
    with torch.no_grad(), MultiplyAdds() as counter:
        torch.linalg.inv(torch.eye(3))
    assert (counter.count, counter.unknown) == (0, ["aten.linalg_inv_ex"])
    assert not any(has_no_formula(operator) for operator in FORMULAS if "slow" not in str(operator))


def test_custom_operators_are_counted_by_what_they_call() -> None:
    @torch.library.custom_op("backquant_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    with torch.no_grad(), MultiplyAdds() as counter:
        product(torch.ones(2, 3), torch.ones(3, 4))
    assert (counter.count, counter.unknown) == (24, [])


def test_custom_operators_that_show_nothing_are_not_counted() -> None:
    """One that works on memory, as compiled ones do."""

    @torch.library.custom_op("backquant_test::hidden", mutates_args=())
    def hidden(a: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(a.numpy() @ a.numpy())

    with torch.no_grad(), MultiplyAdds() as counter:
        hidden(torch.ones(2, 2))
    assert (counter.count, counter.unknown) == (0, ["backquant_test.hidden"])


AS_PYTORCH_COUNTS: dict[str, Callable[[], object]] = {
    "strided, in groups": lambda: F.conv2d(
        torch.ones(2, 6, 9, 8), torch.ones(4, 3, 3, 2), stride=2, padding=1, groups=2
    ),
    "without a batch": lambda: F.conv1d(torch.ones(6, 9), torch.ones(4, 6, 3)),
    "of nothing": lambda: F.conv2d(torch.ones(0, 6, 9, 8), torch.ones(4, 6, 3, 2)),
    "transposed, dilated": lambda: F.conv_transpose3d(
        torch.ones(1, 2, 3, 3, 3), torch.ones(2, 5, 2, 2, 2), dilation=2
    ),
    "mm": lambda: torch.ones(3, 4) @ torch.ones(4, 5),
    "bmm": lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
    "addmm": lambda: torch.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5), beta=2),
    "baddbmm": lambda: torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
}


@pytest.mark.parametrize("name", AS_PYTORCH_COUNTS)
def test_own_formulas_of_what_pytorch_counts(name: str) -> None:
    call = AS_PYTORCH_COUNTS[name]
    with torch.no_grad(), MultiplyAdds() as ours, FlopCounterMode(display=False) as theirs:
        call()
    assert ours.unknown == []
    assert ours.count == theirs.get_total_flops() // 2
