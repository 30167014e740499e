from __future__ import annotations

import subprocess
import sys

import torch

from backquant.graph import register_quantized_decomposed

ORDERS = """
import torch
from backquant.graph import register_quantized_decomposed
{first}
{second}
op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
print(op(torch.tensor([5], dtype=torch.int8), 0.5, 1, -128, 127, torch.int8).item())
"""


def test_works_before_and_after_pytorchs_own_users() -> None:
    """Inductor loads the same operators; whoever comes first, the other finds them."""
    ours = "register_quantized_decomposed()"
    theirs = "import torch.ao.quantization.fx._decomposed"
    for first, second in ((ours, theirs), (theirs, ours), (ours, ours)):
        code = ORDERS.format(first=first, second=second)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "2.0"


def test_not_loaded_before_it_is_asked_for() -> None:
    code = (
        "import torch, backquant.graph; "
        "print(hasattr(torch.ops.quantized_decomposed, 'quantize_per_tensor'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
