"""The table of the engines ``x86`` and ``onednn``: oneDNN kernels on plain integer tensors, and
``quantized::`` kernels through zero-copy views for the rest."""

from __future__ import annotations

from backquant.lower.rule import LowerRule
from backquant.lower.tables.activation import clamp_rules
from backquant.lower.tables.conv import conv_rules
from backquant.lower.tables.conv_add import conv_add_rules
from backquant.lower.tables.elementwise import binary_rules
from backquant.lower.tables.linear import linear_rules
from backquant.lower.tables.matrix import matrix_rules
from backquant.lower.tables.norm import norm_rules
from backquant.lower.tables.passthrough import passthrough_rules
from backquant.lower.tables.pointwise import pointwise_rules
from backquant.lower.tables.pooling import adaptive_rules, average_rules, max_rules, mean_rules

__all__ = ["rules"]


def rules() -> list[LowerRule]:
    """All rules, in order of preference among those that fit one occurrence.

    >>> len(rules()) > 20
    True
    """
    return [
        *conv_add_rules(),
        *conv_rules(),
        *linear_rules(),
        *binary_rules(),
        *max_rules(),
        *average_rules(),
        *adaptive_rules(),
        *mean_rules(),
        *norm_rules(),
        *matrix_rules(),
        *clamp_rules(),
        *passthrough_rules(),
        *pointwise_rules(),
    ]
