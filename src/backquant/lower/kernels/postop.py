"""Unary operators that a oneDNN convolution or linear kernel applies before it rounds.

Source: the op schemas ``onednn::qconv_pointwise(..., attr, scalars, algorithm)`` and
``onednn::qlinear_pointwise(..., post_op_name, post_op_args, post_op_algorithm)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from backquant.dtypes import QParams

_CLAMPS = frozenset({"none", "relu", "hardtanh"})
_CONV2D = _CLAMPS | {"hardswish", "swish"}
_LINEAR = _CONV2D | {"gelu", "leaky_relu", "tanh"}
# Post-ops that the convolution kernel itself applies, by the number of spatial dimensions.
_BY_KERNEL = {1: frozenset({"none", "relu"}), 2: _CONV2D, 3: frozenset({"none"})}


@dataclass(frozen=True)
class PostOp:
    """``name`` and its numbers, as the kernels take them.

    >>> PostOp("hardtanh", (0.0, 6.0)).admitted_by_conv(1), PostOp("swish").admitted_by_conv(1)
    (True, False)
    """

    name: str
    numbers: tuple[float, ...] = ()
    algorithm: str = ""

    def admitted_by_conv(self, dimensions: int) -> bool:
        """Whether convolutions of so many dimensions take it: those of 1 or 3 take clamps only, which
        integers can follow.
        """
        return self.name in (_CONV2D if dimensions == 2 else _CLAMPS)

    def applied_by_conv(self, dimensions: int) -> bool:
        """Whether the kernel itself does it."""
        return self.name in _BY_KERNEL[dimensions]

    @property
    def bounds(self) -> tuple[float, float]:
        """What a clamp clamps to."""
        low, high = self.numbers or (0.0, float("inf"))
        return low, high

    @property
    def admitted_by_linear(self) -> bool:
        return self.name in _LINEAR


NONE = PostOp("none")
RELU = PostOp("relu")


def within(post_op: PostOp, out: QParams | None) -> PostOp | None:
    """A post-op that also keeps the result within ``quant_min`` and ``quant_max`` of ``out``.

    ``None`` if the kernel cannot do both; rounding is monotone, so clamping before it is exact.

    >>> import torch
    >>> within(RELU, QParams(0.5, 0, 0, 127, torch.uint8))
    PostOp(name='hardtanh', numbers=(0.0, 63.5), algorithm='')
    """
    if out is None or out.is_full_range:
        return post_op
    low, high = out.bounds
    if post_op.name == "relu":
        low = max(low, 0.0)
    elif post_op.name == "hardtanh":
        low, high = max(low, post_op.numbers[0]), min(high, post_op.numbers[1])
    elif post_op.name != "none":
        return None
    return PostOp("hardtanh", (low, high)) if low <= high else None


def with_post_op(kernel: str, post_op: str, rounds_once: bool) -> str:
    """The name of a kernel for people.

    >>> with_post_op("qlinear", "gelu", True), with_post_op("qlinear", "none", False)
    ('qlinear(gelu, rounds once)', 'qlinear')
    """
    parts = [post_op] * (post_op != "none") + ["rounds once"] * rounds_once
    return f"{kernel}({', '.join(parts)})" if parts else kernel
