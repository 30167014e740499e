"""The scale and zero point of QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

from typing import Any

import numpy as np


def has_one_scale(node: Any) -> bool:
    """Whether scale and zero point are constants, one of each."""
    constants = [value.const_value for value in node.inputs[1:]]
    return len(constants) == 2 and all(c is not None and c.size == 1 for c in constants)


def same_grid(one: Any, other: Any) -> bool:
    """Whether two nodes have the same ones: what one dequantizes and the other quantizes is as it was."""
    pairs = zip(one.inputs[1:], other.inputs[1:], strict=False)
    constants = [tuple(None if v is None else v.const_value for v in pair) for pair in pairs]
    return len(constants) == 2 and all(
        a is not None and b is not None and np.array_equal(a.numpy(), b.numpy())
        for a, b in constants
    )
