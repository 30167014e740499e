"""What Inductor makes of ``backquant::attention``: a call of the kernel of ``attention.h``.

Queries, keys and values are read where they lie, heads and all: only channels have to lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.runtime.compiled.attention import attention
from backquant.runtime.compiled.inductor import ir, register_lowering
from backquant.runtime.compiled.template import ATTENTION, KernelCall, kernel_node

_CONTIGUOUS = (3, 2, 1, 0)


def _strided(x: Any) -> Any:
    """``x`` in memory, its last dimension without holes."""
    x = ir.ExternKernel.realize_input(x)
    if isinstance(x, ir.StorageBox):
        x = ir.ExternKernel.require_stride_order(x, _CONTIGUOUS)
    if x.get_stride()[-1] == 1 or x.get_size()[-1] == 1:
        return x
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.copy_input(x), _CONTIGUOUS)


def _strides(x: Any, repeated: bool = False) -> str:
    """Strides of all dimensions but the last; ``repeated``: of those with one element 0."""
    pairs = zip(x.get_size()[:3], x.get_stride()[:3], strict=True)
    return ", ".join("0" if repeated and size == 1 else str(stride) for size, stride in pairs)


# size: the operator's arguments
def _lower(
    q: Any,
    k: Any,
    v: Any,
    added: Sequence[Any],
    scale: float,
    score_scale: float,
    score_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> Any:
    tensors = {name: _strided(x) for name, x in (("q", q), ("k", k), ("v", v))}
    terms = {f"added{i}": _strided(x) for i, x in enumerate(added)}
    batch, heads, queries, deep = tensors["q"].get_size()
    keys, wide = tensors["v"].get_size()[2:]
    lines = [
        f"const backquant::Heads {name}_{{{name} + {x.get_layout().offset}, {_strides(x)}}};"
        for name, x in tensors.items()
    ]
    listed = ", ".join(
        f"{{{name} + {x.get_layout().offset}, {x.get_size()[0]}, {_strides(x, repeated=True)}}}"
        for name, x in terms.items()
    )
    if terms:
        lines.append(f"const backquant::Added added[] = {{{listed}}};")
    bounds = f"{score_scale!r}f, {-float(score_zero_point)}f, {255.0 - score_zero_point}f"
    lines += [
        f"const backquant::Attention a{{count, {heads}, {queries}, {keys}, {deep}, {wide}, "
        f"{scale!r}f, {bounds}, {1.0 / out_scale!r}f, {float(out_zero_point)}f}};",
        f"backquant::attend<{len(terms)}>(a, q_, k_, v_, {'added' if terms else 'nullptr'}, out);",
    ]
    size = (batch, heads, queries, wide)
    stride = (heads * queries * wide, wide, heads * wide, 1)
    body = "\n  ".join(lines)
    call = KernelCall(
        "attention", {**tensors, **terms}, body, size, stride, torch.uint8, batch, ATTENTION
    )
    return kernel_node(call)


def register_attention() -> None:
    """Tell Inductor; once is enough."""
    register_lowering(attention, type_promotion_kind=None)(_lower)
