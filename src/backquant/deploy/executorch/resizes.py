"""Bicubic resizing to a known size, as one product with a matrix along the columns and one along the rows.

The delegate of ExecuTorch 1.5 has none, and its other kernels gather sixteen images that are added up: of
CrossViT, which resizes its input, most of the time. The matrices are what the operator makes of unit ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload

__all__ = ["RESIZES"]

_ONE, _BY_FACTORS = overload("upsample_bicubic2d"), overload("upsample_bicubic2d", "vec")
_MOST = 4096  # rows and columns: beyond, sixteen gathers are fewer operations


def resize(node: Any) -> None:
    """``upsample_bicubic2d``."""
    source, _, corners, *scales = node.args
    if node.target is _BY_FACTORS:
        scales = (scales[0] if scales else None) or []
    height, width = (*scales, None, None)[:2]
    before, after = source.meta["val"], node.meta["val"]
    sizes = [*before.shape[2:], *after.shape[2:]]
    if node.kwargs or before.dtype is not torch.float32:
        return
    if not all(isinstance(size, int) for size in sizes) or sum(sizes[:2]) > _MOST:
        return
    write = AtenCalls(node)

    def matrix(old: int, new: int, scale: Any) -> Any:
        unit = write.reshape(write.call(overload("eye"), old), [1, 1, old, old])
        made = write.call(_ONE, unit, [new, old], corners, scale, None)
        return write.reshape(made, [new, old])

    columns = write.linear(source, matrix(sizes[1], sizes[3], width))
    turned = write.permute(columns, [0, 1, 3, 2])
    rows = write.linear(turned, matrix(sizes[0], sizes[2], height))
    replace(node, write.permute(rows, [0, 1, 3, 2]))


RESIZES: dict[Any, Callable[[Any], None]] = {_ONE: resize, _BY_FACTORS: resize}
