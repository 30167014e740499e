from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from applied import Applied, Function
from backquant.operators.aten import cut_windows

POOLS: dict[str, Function] = {
    "mean-of-all": lambda x: F.avg_pool2d(x, 2560, ceil_mode=True),
    "mean-with-a-step": lambda x: F.avg_pool2d(x, (8, 3), (4, 2), ceil_mode=True),
    "mean-with-padding": lambda x: F.avg_pool2d(x, 9, 8, 4, ceil_mode=True),
    "mean-without-padding-counted": lambda x: F.avg_pool2d(x, 9, 8, 4, True, False),
    "mean-by-a-number": lambda x: F.avg_pool2d(x, 8, ceil_mode=True, divisor_override=3),
    "mean-of-a-line": lambda x: F.avg_pool1d(x.flatten(2), 100, ceil_mode=True),
    "largest": lambda x: F.max_pool2d(x, 8, ceil_mode=True),
    "largest-with-padding": lambda x: F.max_pool2d(x, 9, 8, 4, ceil_mode=True),
    "largest-of-a-line": lambda x: F.max_pool1d(x.flatten(2), 100, ceil_mode=True),
}
DILATED: Function = lambda x: F.max_pool2d(x, 3, 4, 1, 2, ceil_mode=True)  # noqa: E731


def cut(function: Function, x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The window that is left, and the result."""
    program = torch.export.export(Applied(function), (x,))
    cut_windows(program.graph)
    program.graph_module.recompile()
    [node] = [node for node in program.graph.nodes if "_pool" in str(node.target)]
    return list(node.args[1]), program.module()(x)


@pytest.mark.parametrize("name", POOLS)
def test_windows_end_with_the_input_and_values_stay(name: str) -> None:
    x = torch.randn(2, 3, 5, 6)
    window, found = cut(POOLS[name], x)
    torch.testing.assert_close(found, POOLS[name](x), rtol=0, atol=0)
    assert max(window) <= (30 if "line" in name else 6 + 2 * 4)


def test_windows_with_holes_stay() -> None:
    x = torch.randn(1, 2, 5, 5)
    window, found = cut(DILATED, x)
    assert window == [3, 3]
    torch.testing.assert_close(found, DILATED(x), rtol=0, atol=0)
