"""Models whose ``forward`` asks for sizes and flags are prepared for training, and train as they are."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length, width, count = *x.shape, heads
    return x.reshape(batch, length, count, width // count).transpose(1, 2)


class Attention(nn.Module):
    """As packages write it: sizes are unpacked and checked, masks and flags have defaults."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, mask=None):
        if x.shape[-1] != self.width:
            raise ValueError(f"{self.width} features")
        query, key, value = (_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        scores = query @ key.transpose(-1, -2) / x.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.finfo(scores.dtype).max)
        mixed = self.drop(scores.softmax(-1)) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """Integers in, with an offset; a batch norm; a flag; a dropout that follows the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.attention = Attention()
        self.conv, self.bn = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, *, pooled: bool = True):
        assert len(ids.shape) == 2, "rows of tokens"
        x = self.attention(self.table(ids + 2))
        x = F.relu(self.bn(self.conv(x.mT))).mT
        x = F.dropout(self.head(x), 0.3, self.training)
        return x.mean(1) if pooled else x


def _prepared(qat: Any, model: nn.Module, *example: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lists what stays float, and what is held
        return qat.ours(model, example)


def _alike(prepared: nn.Module, model: nn.Module, *inputs: Any, **named: Any) -> None:
    for mode in (True, False):
        for each in (prepared, model):
            each.train(mode)
        torch.manual_seed(1)
        expected = model(*inputs, **named)
        torch.manual_seed(1)
        assert torch.allclose(prepared(*inputs, **named), expected, atol=1e-5)


CASES = {
    "attention": (Attention, torch.randn(2, 5, 8), torch.randn(3, 7, 8)),
    "tokens": (Tokens, torch.randint(0, 9, (4, 6)), torch.randint(0, 9, (2, 9))),
}


@pytest.mark.parametrize("case", CASES)
def test_without_rounding_it_is_the_model_in_both_modes(qat: Any, case: str) -> None:
    make, example, other = CASES[case]
    torch.manual_seed(0)
    model = make()
    prepared = _prepared(qat, model, example)
    assert prepared.training
    prepared.apply(backquant.disable_fake_quant).apply(backquant.disable_observer)
    for inputs in (example, other):
        _alike(prepared, model, inputs)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_converts_to_integer_kernels(qat: Any, case: str) -> None:
    make, example, other = CASES[case]
    torch.manual_seed(0)
    model = make()
    prepared = _prepared(qat, model, example)
    before = [parameter.clone() for parameter in prepared.parameters()]
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        prepared(example).square().mean().backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, prepared.parameters(), strict=True))
    prepared.apply(backquant.disable_observer).eval()
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    step = 1.001 * reference.graph.output_node().args[0].args[1]
    quantized = backquant.convert_fx(prepared)
    assert quantized.kernels
    with torch.no_grad():
        for inputs in (example, other):
            assert (quantized(inputs) - reference(inputs)).abs().max() <= step
    notes = "\n".join(quantized.report.notes)
    assert "traced with the sizes and flags of the example inputs" in notes
    assert "is held, and checked at each call" in notes


def test_what_is_held_is_said_and_checked(qat: Any, tmp_path: Any) -> None:
    model, x = Attention(), torch.randn(2, 5, 8)
    prepared = _prepared(qat, model, x)
    prepared(x)
    quantized = backquant.convert_fx(prepared.eval())
    assert "arguments are held, and checked at each call: mask is None" in quantized.report.notes
    backquant.save(quantized, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert torch.equal(loaded(x), quantized(x))
    mask = torch.ones(5, 5, dtype=torch.bool)
    refused = (AssertionError, backquant.errors.InputError)
    for each in (prepared, quantized, loaded):
        with pytest.raises(refused, match="prepared for mask is None"):
            each(x, mask)
        with pytest.raises(refused, match=re.escape("not (x.shape[-1] != 8)")):
            each(torch.randn(2, 5, 16))


def test_the_warning_says_it(qat: Any) -> None:
    with pytest.warns(
        UserWarning, match="arguments are held, and checked at each call: mask is None"
    ):
        qat.ours(Attention(), torch.randn(2, 5, 8))


def test_an_argument_of_the_example_is_kept(qat: Any) -> None:
    model, x = Attention(), torch.randn(2, 5, 8)
    mask = torch.rand(5, 5) > 0.3
    prepared = _prepared(qat, model, x, mask)
    prepared.apply(backquant.disable_fake_quant).apply(backquant.disable_observer)
    _alike(prepared, model, x, mask)
    _alike(prepared, model, x, ~mask)


def test_a_trace_that_takes_another_way_than_the_model_is_not_taken(qat: Any) -> None:
    """A trace takes an argument that is left out for one that is given."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, scale=None):
            return self.fc(x) if scale is None else self.fc(x) * scale

    model, x = Scaled(), torch.randn(2, 4)
    prepared = _prepared(qat, model, x)
    prepared.apply(backquant.disable_fake_quant).apply(backquant.disable_observer)
    _alike(prepared, model, x)


def test_a_model_that_decides_by_values_is_refused(qat: Any) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            assert x.shape[-1] == 4
            return self.fc(x) if x.mean() > 0 else x

    with pytest.raises(backquant.errors.CaptureError, match="control flow") as raised:
        _prepared(qat, Deciding(), torch.randn(2, 4))
    assert "x.mean() > 0" in raised.value.where


def test_batch_norms_without_gamma_train_and_are_folded(qat: Any) -> None:
    """Packages have them (HardNet); PyTorch refuses to fuse them for training."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4 * 16, 4), nn.BatchNorm1d(4, affine=False)),
    )
    x = torch.randn(8, 3, 6, 6)
    prepared = _prepared(qat, model, x)
    names = {type(part).__name__ for part in prepared.modules()}
    assert {"ConvBnReLU2d", "LinearBn1d"} <= names
    for _ in range(20):
        prepared(x).sum().backward()
    prepared.eval()
    quantized = backquant.convert_fx(prepared)
    with torch.no_grad():
        wanted = prepared.apply(backquant.disable_observer)(x)
        assert (quantized(x) - wanted).abs().max() <= 0.05 * wanted.abs().max()
    assert not any(isinstance(part, nn.BatchNorm2d) for part in quantized.modules())


def test_batch_norms_without_statistics_are_not_fused(qat: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    prepared = _prepared(qat, model, torch.randn(8, 3, 6, 6))
    assert any(type(part) is nn.BatchNorm2d for part in prepared.modules())
    prepared.apply(backquant.disable_fake_quant).apply(backquant.disable_observer)
    _alike(prepared, model, torch.randn(4, 3, 6, 6))
