from __future__ import annotations

import torch

from backquant.graph import register_quantized_decomposed
from fresh import failures

ORDERS = """
import torch
from backquant.graph import register_quantized_decomposed
{first}
{second}
op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
assert op(torch.tensor([5], dtype=torch.int8), 0.5, 1, -128, 127, torch.int8).item() == 2.0
"""
NOT_ASKED_FOR = """
import torch, backquant.graph
assert not hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")
"""


def test_works_before_and_after_pytorchs_own_users_and_not_before_it_is_asked_for() -> None:
    """Inductor loads the same operators; whoever comes first, the other finds them."""
    ours = "register_quantized_decomposed()"
    theirs = "import torch.ao.quantization.fx._decomposed"
    orders = ((ours, theirs), (theirs, ours), (ours, ours))
    codes = [ORDERS.format(first=first, second=second) for first, second in orders]
    assert failures([*codes, NOT_ASKED_FOR]) == {}


def test_the_operators_of_the_reference_dialect_are_there() -> None:
    register_quantized_decomposed()
    names = (
        "quantize_per_tensor",
        "dequantize_per_tensor",
        "quantize_per_channel",
        "dequantize_per_channel",
        "choose_qparams",
    )
    assert all(hasattr(torch.ops.quantized_decomposed, name) for name in names)
