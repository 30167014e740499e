"""Attention as one operator: where it is found, and that its kernel computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.native.plan import has_kernels
from backquant.runtime.compiled.attention import attention, join_attention
from backquant.runtime.compiled.program import compile_graph

register_quantized_decomposed()
_QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
BATCH, HEADS, QUERIES, KEYS, DEEP = 4, 3, 21, 35, 20
Forward = Callable[..., torch.Tensor]


def rounded(x: torch.Tensor, scale: float = 0.01) -> torch.Tensor:
    made: torch.Tensor = _QUANTIZE(x, scale, 120, 0, 255, torch.uint8)
    return made


def rounded_scores(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _DEQUANTIZE(
        _QUANTIZE(x, 0.02, 100, 0, 255, torch.uint8), 0.02, 100, 0, 255, torch.uint8
    )
    return made


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, -1, HEADS, DEEP).transpose(1, 2)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return rounded(found.transpose(1, 2).flatten(2))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask, scale=0.3)
    return rounded(found)


def apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(heads(q) / math.sqrt(DEEP), heads(k).transpose(-2, -1))
    return rounded(torch.matmul(scores.softmax(-1), heads(v))).transpose(1, 2)


def biased(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Windows: two images of two windows each, with a bias by head and a mask by window."""
    scores = torch.matmul(heads(q) * 0.2, heads(k).transpose(-2, -1)) + bias
    scores = scores.reshape(2, 2, HEADS, QUERIES, KEYS) + mask
    weights = torch.softmax(scores.reshape(-1, HEADS, QUERIES, KEYS), -1)
    return rounded(torch.matmul(weights, heads(v)).transpose(1, 2).reshape(BATCH, QUERIES, -1))


def on_integers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    scores = bias + rounded_scores(torch.matmul(heads(q), heads(k).transpose(-2, -1)))
    return rounded(torch.matmul(torch.softmax(scores, -1), heads(v)))


def without_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(1, 2)) * 0.125
    return rounded(torch.matmul(scores.softmax(2), v))


def inputs(generator: torch.Generator, *added: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    wide = HEADS * DEEP
    q, k, v = drawn(BATCH, QUERIES, wide), drawn(BATCH, KEYS, wide), drawn(BATCH, KEYS, wide)
    return (q, k, v, *(drawn(*size) for size in added))


BIAS, MASK = (1, HEADS, QUERIES, KEYS), (1, 2, 1, QUERIES, KEYS)
SITES: dict[str, tuple[Forward, tuple[tuple[int, ...], ...]]] = {
    "whole": (whole, ()),
    "masked": (masked, ((BATCH, 1, 1, KEYS),)),
    "masked by query": (masked, ((QUERIES, KEYS),)),
    "apart": (apart, ()),
    "biased": (biased, (BIAS, MASK)),
    "on integers": (on_integers, (BIAS,)),
    "without heads": (without_heads, ()),
}


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.run(*given)


def exported(forward: Forward, given: tuple[torch.Tensor, ...]) -> Any:
    return torch.export.export(Model(forward), given)


@pytest.mark.parametrize("name", SITES)
def test_found(name: str) -> None:
    """The operator computes what was there."""
    forward, added = SITES[name]
    given = inputs(torch.Generator().manual_seed(1), *added)
    program = exported(forward, given)
    assert join_attention(program.graph) == 1
    targets = [node.target for node in program.graph.nodes]
    assert attention in targets
    assert not {"matmul.default", "scaled_dot_product_attention.default"} & {
        str(target).removeprefix("aten.") for target in targets
    }
    program.graph_module.recompile()
    found, expected = program.module()(*given), forward(*given)
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1


def test_left() -> None:
    """What the operator does not compute stays: results that are not rounded, or read before they are; causal
    attention; scores that another node reads; scaled after something was added."""

    def in_float(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(heads(q), heads(k), heads(v))

    def read_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
        return rounded(found), found.sum()

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rounded(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))

    def with_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        scores = torch.matmul(heads(q), heads(k).transpose(-2, -1))
        return rounded(torch.matmul(scores.softmax(-1), heads(v))), scores.sum()

    def scaled_late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (torch.matmul(heads(q), heads(k).transpose(-2, -1)) + 1.5 * k.mean()) * 0.5
        return rounded(torch.matmul(scores.softmax(-1), heads(v)))

    def over_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rounded(torch.matmul(torch.matmul(q, k.transpose(1, 2)).softmax(1), v))

    given = inputs(torch.Generator().manual_seed(2))
    for forward in (in_float, read_twice, causal, with_scores, scaled_late, over_queries):
        program = exported(forward, given)
        assert join_attention(program.graph) == 0, forward.__name__


def in_one_tensor(
    forward: Forward, q: torch.Tensor, kv: torch.Tensor, *added: torch.Tensor
) -> torch.Tensor:
    """Keys and values as they come from one linear layer."""
    k, v = (kv + 0.25).chunk(2, -1)
    return forward(q, k, v, *added)


@pytest.mark.skipif(not has_kernels(), reason="this CPU has no AVX-512 VNNI")
def test_compiled() -> None:
    """The kernel, reading heads where they lie; all sites in one program, which is compiled once."""
    given = inputs(
        torch.Generator().manual_seed(3), *(s for _, added in SITES.values() for s in added)
    )
    q, kv, rest = given[0], torch.cat(given[1:3], -1), given[3:]

    def every(q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        left = list(rest)
        return [
            in_one_tensor(forward, q, kv, *[left.pop(0) for _ in added])
            for forward, added in SITES.values()
        ]

    graph = exported(every, (q, kv, *rest)).module()
    program = compile_graph(graph, (q, kv, *rest), None, {})
    assert program.kernels["backquant.attention"] == len(SITES)
    results = zip(SITES, program((q, kv, *rest)), every(q, kv, *rest), strict=True)
    for name, found, expected in results:
        assert found.shape == expected.shape
        off = (found.int() - expected.int()).abs()
        # products of bfloat16; a score that is rounded to another integer moves its row by more than a step
        assert off.max() <= (4 if name == "on integers" else 1), name
        assert (off > 0).double().mean() < 0.15, name
        assert expected.float().std() > 5
