"""Which modules are traced as the operators that they are, and which stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import backquant
from backquant.errors import CaptureError, InputError
from backquant.graph import capture
from backquant.graph.decompose import decomposition_of

_X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def _layer(**kwargs: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kwargs)


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(_layer()).eval()
    decomposition_of(model, _X)
    assert "forward" not in vars(model[0]) and "forward" not in vars(model[0].self_attn)


def test_named_modules_stay_whole() -> None:
    model = nn.Sequential(_layer(), _layer()).eval()
    found = decomposition_of(model, _X, whole_names=["0"], whole_classes=[nn.MultiheadAttention])
    assert found.paths == {"1"}


def test_hooks_keep_a_module_whole() -> None:
    model = nn.Sequential(_layer(), _layer()).eval()
    model[0].register_forward_hook(lambda *_: None)
    found = decomposition_of(model, _X)
    assert found.whole == {"0": "it has hooks, which would not run"}
    assert {"1", "1.self_attn"} <= found.paths


def test_a_forward_of_ones_own_is_traced_as_it_is() -> None:
    class Own(nn.TransformerEncoderLayer):
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return self.norm1(src + self.self_attn(src, src, src)[0])

    model = nn.Sequential(Own(8, 2, 16, batch_first=True)).eval()
    found = decomposition_of(model, _X)
    assert found.paths == {"0.self_attn"}
    traced = capture(model, decomposition=found).module
    with torch.no_grad():
        torch.testing.assert_close(traced(_X), model(_X), atol=1e-5, rtol=1e-5)


class Translator(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 2, 2, 16, **kwargs)

    def forward(self, source: Any, target: Any, mask: Any, padding: Any) -> Any:
        return self.both(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kwargs", [{}, {"norm_first": True}, {"activation": "gelu"}])
def test_a_whole_transformer(kwargs: dict[str, Any]) -> None:
    model = Translator(batch_first=True, **kwargs).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    inputs = (_X, _X[:, :4].flip(0), mask, padding)
    traced = capture(model, decomposition=decomposition_of(model, inputs)).module
    called = {
        type(traced.get_submodule(str(n.target))).__name__
        for n in traced.graph.nodes
        if n.op == "call_module"
    }
    assert not called & {
        "Transformer",
        "TransformerEncoder",
        "TransformerDecoder",
        "MultiheadAttention",
    }
    with torch.no_grad():
        torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)
    more = (torch.cat([_X] * 2), torch.cat([_X[:, :4]] * 2), mask, padding.repeat(2, 1))
    with torch.no_grad():  # sizes stay free
        torch.testing.assert_close(traced(*more), model(*more), atol=1e-5, rtol=1e-5)


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: Any, mask: Any) -> Any:
            first = self.attention(x, x, x)[0]
            return self.attention(first, x, x, attn_mask=mask)[0]

    model, inputs = Twice().eval(), (_X, torch.zeros(2, 2))
    traced = capture(model, decomposition=decomposition_of(model, inputs)).module
    with torch.no_grad():
        torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


def test_a_mask_that_the_example_does_not_have_is_refused_at_a_call() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: Any, mask: Any = None) -> Any:
            return self.attention(x, x, x, attn_mask=mask)[0]

    model = Optional().eval()
    traced = capture(model, decomposition=decomposition_of(model, _X)).module
    with torch.no_grad():
        torch.testing.assert_close(traced(_X), model(_X), atol=1e-5, rtol=1e-5)
        with pytest.raises(AssertionError, match="mask was not in the example inputs"):
            traced(_X, torch.zeros(2, 2))


def test_a_layer_that_is_called_more_often_cannot_be_traced() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.calls = nn.MultiheadAttention(8, 2), 1

        def forward(self, x: Any) -> Any:
            for _ in range(self.calls):
                x = self.attention(x, x, x)[0]
            return x

    model = Grows().eval()
    found = decomposition_of(model, _X)
    model.calls = 2
    with pytest.raises(CaptureError, match="called otherwise than on the example inputs"):
        capture(model, decomposition=found)


_TOPS = [
    nn.TransformerDecoderLayer(8, 2, 16),
    nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
    nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    nn.MultiheadAttention(8, 2),
]


@pytest.mark.parametrize("model", _TOPS, ids=lambda model: type(model).__name__)
def test_the_model_itself_is_such_a_layer(model: nn.Module, tmp_path: Path) -> None:
    model.eval()
    counts = {nn.TransformerEncoderLayer: 1, nn.MultiheadAttention: 3}
    x = tuple(torch.randn(3, 2, 8) for _ in range(counts.get(type(model), 2)))
    result = backquant.quantize(model, x, calibration=[x], capture="trace", slower="keep")
    assert result.report.coverage is not None
    assert result.report.coverage > 0.7
    wanted, got = (torch.cat([v.flatten() for v in tree_leaves(m(*x))]) for m in (model, result))
    assert (wanted - got).norm() < 0.1 * wanted.norm()
    backquant.save(result, tmp_path / "model.bq")
    again = torch.cat([v.flatten() for v in tree_leaves(backquant.load(tmp_path / "model.bq")(*x))])
    assert torch.equal(again, got)
    if len(x) == 2:  # a mask that was left out is not ignored
        with pytest.raises(InputError, match="tgt_mask was not in the example inputs"):
            result(*x, tgt_mask=torch.zeros(3, 3))
