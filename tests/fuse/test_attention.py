"""Attention written apart: the same values, and where it stays whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.backend_config import BackendConfig, QDQRules
from backquant.fuse import decompose_attention
from backquant.graph import capture
from backquant.qconfig import QConfigMapping, default_dynamic_qconfig, get_default_qconfig

EXAMPLES = Path(__file__).parents[2] / "examples/backends"
STATIC = QConfigMapping().set_global(get_default_qconfig("x86"))
APART = BackendConfig("b").set_qdq(QDQRules(attention="products"))


class Attention(nn.Module):
    """``lengths``: keys from there on are hidden. ``added``: in place of that, a mask of floats."""

    def __init__(self, masked: bool = False, added: bool = False, **options: Any) -> None:
        super().__init__()
        self.masked, self.added, self.options = masked, added, options

    def forward(self, q: Any, k: Any, v: Any, lengths: Any, added: Any) -> torch.Tensor:
        mask = added if self.added else None
        if self.masked:
            mask = torch.arange(7).lt(lengths)[:, None].unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def drawn() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    heads = [torch.randn(2, 3, size, 4) for size in (5, 7, 7)]
    return (*heads, torch.tensor([[4], [7]]), torch.randn(5, 7))


def apart(model: nn.Module, mapping: QConfigMapping = STATIC, backend: Any = APART) -> Any:
    captured = capture(model)
    decompose_attention(captured, backend, mapping)
    return captured


def is_whole(captured: Any) -> bool:
    return any(n.target is F.scaled_dot_product_attention for n in captured.module.graph.nodes)


@pytest.mark.parametrize("options", [{}, {"masked": True}, {"is_causal": True}, {"scale": 0.3}])
def test_same_values(options: dict[str, Any]) -> None:
    model, inputs = Attention(**options), drawn()
    captured = apart(model)
    assert not is_whole(captured)
    torch.testing.assert_close(captured.module(*inputs), model(*inputs))
    calls = {n.name for n in captured.module.graph.nodes if n.op.startswith("call")}
    assert calls <= set(captured.scopes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_constant_mask_is_known_by_its_dtype(dtype: torch.dtype) -> None:
    """As captures fold what ``torch.ones`` makes; floats may be added."""

    class Constant(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(5, 7).tril().to(dtype))

        def forward(self, q: Any, k: Any, v: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    model, heads = Constant(), drawn()[:3]
    captured = apart(model)
    assert is_whole(captured) == (dtype != torch.bool)
    torch.testing.assert_close(captured.module(*heads), model(*heads))


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"added": True}, {"enable_gqa": True}])
def test_whole_where_the_products_are_not_all_of_it(options: dict[str, Any]) -> None:
    assert is_whole(apart(Attention(**options)))


def test_whole_unless_integer_products_are_asked_for() -> None:
    whole = QConfigMapping().set_global(STATIC.global_qconfig)
    dynamic = QConfigMapping().set_global(default_dynamic_qconfig)
    for mapping in (
        whole.set_object_type(F.scaled_dot_product_attention, None),
        QConfigMapping().set_global(STATIC.global_qconfig).set_object_type(torch.matmul, None),
        dynamic,
        QConfigMapping(),
    ):
        assert is_whole(apart(Attention(), mapping))
    assert is_whole(apart(Attention(), STATIC, BackendConfig("b").set_qdq(QDQRules())))
    assert is_whole(apart(Attention(), STATIC, BackendConfig("b")))
    assert not is_whole(
        apart(Attention(), QConfigMapping().set_object_type(torch.matmul, STATIC.global_qconfig))
    )


def test_its_result_may_lie_otherwise_in_memory() -> None:
    """The operator gives heads that are turned back without a copy (transformers' decoders, exported)."""

    class Joined(Attention):
        def forward(self, q: Any, k: Any, v: Any) -> torch.Tensor:
            x = F.scaled_dot_product_attention(q, k, v).view(2, 3, 5, 4)
            return x.transpose(1, 2).view(2, 5, 12)

    heads = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in drawn()[:3]]
    captured, wanted = capture(Joined()), Joined()(*heads)
    decompose_attention(captured, APART, STATIC)
    assert torch.allclose(captured.module(*heads), wanted, atol=1e-6)


class Shared(nn.Module):
    """As DiffLlama: two attentions that share query and key."""

    def forward(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        one, other = v.chunk(2, dim=-1)
        first = F.scaled_dot_product_attention(q, k, one)
        return first - F.scaled_dot_product_attention(q, k, other)


def test_scores_that_two_attentions_share_are_one_product() -> None:
    captured, inputs = apart(Shared()), drawn()[:3]
    products = [node for node in captured.module.graph.nodes if node.target is torch.matmul]
    assert len(products) == 3
    torch.testing.assert_close(captured.module(*inputs), Shared()(*inputs))


class Heads(nn.Module):
    """Attention between linear layers, as a network has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize("name", ["qualcomm_htp", "esp32_p4"])
def test_scores_are_scaled_on_integers(name: str) -> None:
    backend = BackendConfig.load(EXAMPLES / f"{name}.yaml")
    mapping, x = backquant.get_default_qconfig_mapping(backend), torch.randn(4, 6, 16)
    prepared = backquant.prepare_fx(Heads().eval(), mapping, (x,), backend_config=backend)
    prepared(x)
    integers = backquant.convert_to_integer_reference(copy.deepcopy(prepared))
    assert torch.equal(integers(x), backquant.convert_to_reference_fx(prepared)(x))


def test_a_width_that_is_a_number_is_checked() -> None:
    q, k, v, lengths, added = drawn()
    captured = capture(Attention())
    decompose_attention(captured, APART, STATIC, (q, k, v, lengths, added))
    assert torch.allclose(
        captured.module(q, k, v, lengths, added), F.scaled_dot_product_attention(q, k, v)
    )
    with pytest.raises(AssertionError, match="prepared for"):
        captured.module(q[..., :3], k[..., :3], v, lengths, added)
