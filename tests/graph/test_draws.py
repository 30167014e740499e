from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from backquant.graph.interception import Draws


def test_what_draws_is_named_with_the_line_that_calls_it() -> None:
    with torch.random.fork_rng(), Draws() as draws:
        torch.ones(2, 3).normal_()
    [(name, line)] = draws.found.items()
    assert name == "aten.normal_.default"
    assert line.startswith(__file__) and line.endswith("torch.ones(2, 3).normal_()")


def test_what_could_draw_and_does_not_is_not_named() -> None:
    attention, lstm = nn.MultiheadAttention(4, 2, dropout=0.5).eval(), nn.LSTM(4, 4)
    x = torch.ones(2, 3, 4)
    with torch.no_grad(), Draws() as draws:
        attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x)
        lstm(x)
    assert draws.found == {}


def test_generators_of_ones_own_are_asked() -> None:
    generator = torch.Generator()
    with Draws() as draws:
        torch.rand(3, generator=generator)
    assert list(draws.found) == ["aten.rand.generator"]
