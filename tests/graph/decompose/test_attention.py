"""The arithmetic of ``nn.MultiheadAttention``, traced: equal to the module's own in every call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from backquant.graph import capture
from backquant.graph.decompose import decomposition_of

_KINDS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "batch_first": True, "bias": False},
    {"add_bias_kv": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"add_zero_attn": True},
]
_HEADS, _SIZE, _BATCH, _QUERIES, _KEYS = 4, 8, 3, 5, 7


class Calls(nn.Module):
    """``which``: "self" (one tensor), "memory" (keys are values) or "apart"."""

    def __init__(self, which: str, options: dict[str, Any], **kind: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_SIZE, _HEADS, **kind)
        with torch.no_grad():
            for parameter in self.attention.parameters():
                parameter.normal_(std=0.4)
        self.which, self.options = which, options

    def forward(self, q: Any, k: Any, v: Any, mask: Any, padding: Any) -> Any:
        masks = {"attn_mask": mask, "key_padding_mask": padding}
        given = {name: value for name, value in masks.items() if self.options[name] is not None}
        rest = {name: value for name, value in self.options.items() if name not in masks}
        keys = {"self": (q, q), "memory": (k, k), "apart": (k, v)}[self.which]
        return self.attention(q, *keys, **given, **rest)


def _inputs(model: Calls, batched: bool) -> tuple[torch.Tensor, ...]:
    attention, keys = model.attention, _QUERIES if model.which == "self" else _KEYS
    generator = torch.Generator().manual_seed(0)
    batch = (_BATCH,) if batched else ()
    first = attention.batch_first

    def tensor(length: int, size: int) -> torch.Tensor:
        shape = (*batch, length, size) if first or not batched else (length, *batch, size)
        return torch.randn(shape, generator=generator)

    sizes = (_SIZE, attention.kdim, attention.vdim)
    q, k, v = (tensor(n, s) for n, s in zip((_QUERIES, keys, keys), sizes, strict=True))
    shapes = {"flat": (_QUERIES, keys), "heads": ((*batch, 1)[0] * _HEADS, _QUERIES, keys)}
    mask = _mask(model.options["attn_mask"], shapes, generator)
    padding = _mask(model.options["key_padding_mask"], {"flat": (*batch, keys)}, generator)
    return q, k, v, mask, padding


def _mask(kind: Any, shapes: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    if kind is None:
        return torch.zeros(1)
    dtype, shape = kind
    values = torch.rand(shapes[shape], generator=generator)
    hidden = (values > 0.6) & (torch.arange(values.shape[-1]) > 0)  # the first key is always seen
    return hidden if dtype is torch.bool else values


_MASKS = [
    (None, None),
    ((torch.bool, "flat"), None),
    ((torch.float32, "heads"), None),
    (None, (torch.bool, "flat")),
    ((torch.bool, "heads"), (torch.bool, "flat")),
    ((torch.float32, "flat"), (torch.bool, "flat")),
]
_WEIGHTS: list[dict[str, bool]] = [
    {"need_weights": False},
    {"need_weights": True, "average_attn_weights": True},
    {"need_weights": True, "average_attn_weights": False},
]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one"])
def test_equal_to_the_module(kind: dict[str, Any], batched: bool) -> None:
    calls = ["memory", "apart"] if "kdim" in kind else ["self", "memory", "apart"]
    calls = ["apart"] if "kdim" in kind else calls
    cases = list(zip(_MASKS, _WEIGHTS * 2, strict=True))
    for which, (masks, weights) in itertools.product(calls, cases):
        options = {"attn_mask": masks[0], "key_padding_mask": masks[1], **weights}
        model = Calls(which, options, **kind).eval()
        inputs = _inputs(model, batched)
        found = decomposition_of(model, inputs)
        assert found.paths == {"attention"} and not found.whole
        traced = capture(model, decomposition=found).module
        assert not any(node.op == "call_module" for node in traced.graph.nodes)
        with torch.no_grad():
            expected, got = model(*inputs), traced(*inputs)
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
        if weights["need_weights"]:
            torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)
        else:
            assert got[1] is None


def test_a_causal_hint_drops_the_mask() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(_QUERIES)
    options = {
        "attn_mask": (torch.float32, "flat"),
        "key_padding_mask": None,
        "is_causal": True,
        "need_weights": False,
    }
    model = Calls("self", options).eval()
    q, k, v, _, padding = _inputs(model, True)
    found = decomposition_of(model, (q, k, v, mask, padding))
    traced = capture(model, decomposition=found).module
    [attention] = [n for n in traced.graph.nodes if "scaled_dot_product" in n.name]
    assert attention.args[3:] == (None, 0.0, True)
    with torch.no_grad():
        expected = model(q, k, v, mask, padding)[0]
        torch.testing.assert_close(traced(q, k, v, mask, padding)[0], expected)


def test_weights_that_nobody_reads_are_not_computed() -> None:
    class First(Calls):
        def forward(self, q: Any, k: Any, v: Any, mask: Any, padding: Any) -> Any:
            return super().forward(q, k, v, mask, padding)[0]

    model = First("self", {"attn_mask": None, "key_padding_mask": None}).eval()
    found = decomposition_of(model, _inputs(model, True))
    names = [node.name for node in capture(model, decomposition=found).module.graph.nodes]
    assert "softmax" not in names and "mean" not in names
    assert names.count("linear") == 1 and "linear_2" not in names
